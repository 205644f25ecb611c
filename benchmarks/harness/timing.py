"""Timing by turns: in every round each contestant runs once, in another order, so that a busy machine slows all of them
alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.contestants import Worker, WorkerError
from harness.contract import Case

TOLERANCE = 1e-6
# For float32, where a sign of a ReLU may already turn on rounding.
ROUGH = 2e-2


class Disagreement(Exception):
    """Two contestants computed different hypergradients, so their times mean nothing."""


@dataclass
class Timing:
    """The times of one contestant on one case: `rounds` has the seconds of every single call."""

    contestant: str
    label: str
    group: str
    case: str
    steps: int
    first: float = 0.0
    unavailable: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    rounds: list[list[float]] = field(default_factory=list)
    gradient: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)

    @property
    def minimum(self) -> float:
        return min(map(min, self.rounds))

    @property
    def median(self) -> float:
        return float(np.median(np.concatenate(self.rounds)))

    def as_json(self) -> dict[str, Any]:
        figures = {"minimum": self.minimum, "median": self.median} if self.rounds else {}
        return {**{k: v for k, v in asdict(self).items() if k != "gradient"}, **figures}


@dataclass(frozen=True)
class Ratio:
    """How many times longer one takes than another: the median over rounds, and the range of the middle four fifths of
    them."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(one: Timing, other: Timing) -> Ratio:
        pairs = [min(a) / min(b) for a, b in zip(one.rounds, other.rounds, strict=True)]
        low, value, high = np.quantile(pairs, [0.1, 0.5, 0.9])
        return Ratio(float(value), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


def measure(
    workers: Sequence[Worker],
    cases: Sequence[Case],
    folder: Path,
    rounds: int,
    budget: float,
    tick: Callable[[str, float], None],
) -> list[Timing]:
    """Time every worker on every case that it enters.

    Args:
        folder: where the cases are written for the workers to load.
        budget: seconds for one contestant's turn in a round; a short run is repeated within its turn, at most 20 times.
        tick: told what was done and by how much, for the progress bar; the amounts add up to 1.
    """
    pairs = [(worker, case) for case in cases for worker in workers if worker.contestant.enters(case)]
    share = 1 / (len(pairs) * (rounds + 1)) if pairs else 1.0
    timings, turns = [], []
    paths = {case.name: str(case.save(folder)) for case in cases}
    for worker, case in pairs:
        who = worker.contestant
        timing = Timing(who.name, who.label, who.group, case.name, case.steps, versions=worker.versions)
        reply = _load(worker, paths[case.name])
        timing.unavailable, timing.first = reply.get("unavailable"), reply.get("first", 0.0)
        timings.append(timing)
        if timing.unavailable is None:
            turns.append((worker, timing, int(np.clip(budget / reply["warm"], 1, 20))))
        tick(f"{case.name}: {who.label} loaded", share if timing.unavailable is None else share * (rounds + 1))

    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(turns)
        for worker, timing, times in turns:
            reply = worker.ask(do="run", case=timing.case, times=times)
            timing.rounds.append(reply["seconds"])
            timing.gradient = np.array(reply["gradient"])
            tick(f"{timing.case}: {timing.label}", share)
    for case in cases:
        # A floor computes something else than a hypergradient.
        same = [t for t in timings if t.case == case.name and t.rounds and t.group != "floor"]
        check_agreement(same, TOLERANCE if case.lam[0].dtype == np.float64 else ROUGH)
    return timings


def _load(worker: Worker, path: str) -> dict[str, Any]:
    """A peer that fails on this machine drops out of the case; a contestant of ours that fails ends the run."""
    try:
        return worker.ask(do="load", case=path)
    except WorkerError as error:
        if worker.contestant.environment is None:
            raise
        return {"unavailable": str(error).splitlines()[0]}


def check_agreement(timings: Sequence[Timing], allowed: float = TOLERANCE) -> None:
    """Hold every hypergradient against the first one's."""
    for timing in timings[1:]:
        reference = timings[0]
        error = distance(timing.gradient, reference.gradient)
        if not error <= allowed:
            raise Disagreement(
                f"{timing.label} and {reference.label} return different hypergradients on {timing.case}: {error:.2g} "
                f"apart (relative), allowed {allowed:g}."
            )


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Relative difference; infinite where the shapes differ or nothing was computed."""
    if one.shape != other.shape or not one.size:
        return float("inf")
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
