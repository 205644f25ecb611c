"""Timing in turns: each contestant has one turn in every round, in a new order, so that a busy machine slows all
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
# For float32, where rounding can change the sign of an input of a ReLU.
FLOAT32_TOLERANCE = 2e-2


class Disagreement(Exception):
    """Two contestants computed different hypergradients, so their times mean nothing."""


@dataclass
class Timing:
    """The times of one contestant on one case. `rounds` has the seconds of every single call, by round."""

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
    """The ratio of two contestants' times: its median over rounds, and its 10 % and 90 % quantiles."""

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
        folder: where the cases are written, so that the workers can load them.
        budget: seconds for one contestant's turn in a round. A short run is repeated within its turn, at most 20 times.
        tick: called with what was done and its share of the whole, for the progress bar. The shares add up to 1.
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
        # A floor does not compute a hypergradient.
        same = [t for t in timings if t.case == case.name and t.rounds and t.group != "floor"]
        check_agreement(same, TOLERANCE if case.lam[0].dtype == np.float64 else FLOAT32_TOLERANCE)
    return timings


def _load(worker: Worker, path: str) -> dict[str, Any]:
    """Load a case. A peer that fails is reported as unavailable; a failing contestant of the package ends the run."""
    try:
        return worker.ask(do="load", case=path)
    except WorkerError as error:
        if worker.contestant.environment is None:
            raise
        return {"unavailable": str(error).splitlines()[0]}


def check_agreement(timings: Sequence[Timing], allowed: float = TOLERANCE) -> None:
    """Compare every hypergradient with the first, and raise `Disagreement` if they differ."""
    for timing in timings[1:]:
        reference = timings[0]
        error = distance(timing.gradient, reference.gradient)
        if not error <= allowed:
            raise Disagreement(
                f"{timing.label} and {reference.label} return different hypergradients on {timing.case}: the "
                f"relative difference is {error:.2g}, allowed is {allowed:g}."
            )


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The relative difference. It is infinite if the shapes differ or an array is empty."""
    if one.shape != other.shape or not one.size:
        return float("inf")
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
