"""The sections of the benchmark: what is measured, and how long in a quick and in a full run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import cases
from harness.contestants import Contestant, Worker, WorkerError
from harness.contract import Case
from harness.environments import NotInstalled
from harness.memory import measure_memory
from harness.ranks import measure_ranks
from harness.timing import Timing, measure

Tick = Callable[[str, float], None]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    budget: float
    network_steps: int
    memory_steps: tuple[int, ...]
    memory_repeats: int
    scaling_steps: tuple[int, ...]
    lam_sizes: tuple[int, ...]
    rank_steps: int
    rank_repeats: int


FULL = Effort(25, 0.1, 50, (10, 100, 1000), 3, (10, 50, 250, 1000, 4000), (1, 8, 64, 512), 10, 3)
QUICK = Effort(5, 0.03, 10, (300,), 1, (10, 50, 250), (1, 8, 64), 3, 1)


class Pool:
    """The workers, started when first asked for; a peer that cannot be had is remembered with the reason."""

    def __init__(self, contestants: list[Contestant], quick: bool) -> None:
        self.contestants = contestants
        self.workers: dict[str, Worker] = {}
        self.absent: dict[str, str] = {c.name: "in full runs only" for c in contestants if quick and c.slow_start}

    def of(self, names: list[str] | None, tick: Tick) -> list[Worker]:
        """The workers of the named contestants, or of all."""
        chosen = [c for c in self.contestants if (c.enters_most if names is None else c.name in names)]
        started = []
        for contestant in chosen:
            if contestant.name not in self.workers and contestant.name not in self.absent:
                tick(f"starting {contestant.label}", 0.0)
                started.append(contestant)
                self._start(contestant)
        for contestant in started:
            self._await(contestant)
        return [self.workers[contestant.name] for contestant in chosen if contestant.name in self.workers]

    def _start(self, contestant: Contestant) -> None:
        try:
            self.workers[contestant.name] = Worker(contestant)
        except NotInstalled as reason:
            self.absent[contestant.name] = f"not installed: {reason}"

    def _await(self, contestant: Contestant) -> None:
        try:
            if contestant.name in self.workers:
                self.workers[contestant.name].wait_until_ready()
        except WorkerError as error:
            # A peer that is broken on this machine is its own affair; a broken contestant of ours is not.
            if contestant.environment is None:
                raise
            self.workers.pop(contestant.name).close()
            self.absent[contestant.name] = str(error).splitlines()[0]

    def missing(self, case: Case) -> list[Timing]:
        """A line for every absent contestant that would have entered the case."""
        return [
            Timing(c.name, c.label, c.group, case.name, case.steps, unavailable=self.absent[c.name])
            for c in self.contestants
            if c.name in self.absent and c.enters(case)
        ]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def _timed(
    pool: Pool, names: list[str] | None, problems: list[Case], effort: Effort, folder: Path, tick: Tick
) -> list[dict[str, Any]]:
    timings = measure(pool.of(names, tick), problems, folder, effort.rounds, effort.budget, tick)
    timings += [line for case in problems for line in pool.missing(case) if names is None or line.contestant in names]
    return [timing.as_json() for timing in timings]


def ridge(pool: Pool, effort: Effort, folder: Path, tick: Tick) -> dict[str, Any]:
    """Everyone on the paper's ridge problem, at a short and a long horizon."""
    return {"timings": _timed(pool, None, [cases.ridge(50), cases.ridge(250)], effort, folder, tick)}


def network(pool: Pool, effort: Effort, folder: Path, tick: Tick) -> dict[str, Any]:
    """Everyone who can, on a small network with 7,040 hyperparameters."""
    return {"timings": _timed(pool, None, [cases.network(effort.network_steps)], effort, folder, tick)}


def memory(pool: Pool, effort: Effort, folder: Path, tick: Tick) -> dict[str, Any]:
    """Peak memory against T."""
    return {
        "memory": [
            asdict(figure) for figure in measure_memory(effort.memory_steps, effort.memory_repeats, folder, tick)
        ]
    }


def scaling(pool: Pool, effort: Effort, folder: Path, tick: Tick) -> dict[str, Any]:
    """Time against T and against the size of λ."""
    in_steps, in_lam = (
        [cases.ridge(steps) for steps in effort.scaling_steps],
        [cases.shared_ridge(size, 10) for size in effort.lam_sizes],
    )

    def half(what: str, amount: float) -> None:
        tick(what, amount / 2)

    by_steps = _timed(
        pool, ["bilevel_unrolled", "bilevel_reverse", "bilevel_spectral", "jaxopt"], in_steps, effort, folder, half
    )
    by_lam = _timed(pool, ["bilevel_reverse", "bilevel_forward"], in_lam, effort, folder, half)
    return {"steps": by_steps, "lam": by_lam}


def hyper(pool: Pool, effort: Effort, folder: Path, tick: Tick) -> dict[str, Any]:
    """A meta-batch of the hyper-representation at a short and a long horizon, and trainings by several processes."""
    problems = [cases.hyper(5), cases.hyper(50)]
    names = [contestant.name for contestant in pool.contestants if contestant.enters(problems[0])]

    def most(what: str, amount: float) -> None:
        tick(what, amount * 0.8)

    def rest(what: str, amount: float) -> None:
        tick(what, amount * 0.2)

    timings = _timed(pool, names, problems, effort, folder, most)
    ranks = [asdict(figure) for figure in measure_ranks(effort.rank_steps, effort.rank_repeats, rest)]
    return {"timings": timings, "ranks": ranks, "dataset": cases.dataset()}


SECTIONS: dict[str, Callable[[Pool, Effort, Path, Tick], dict[str, Any]]] = {
    "ridge": ridge,
    "network": network,
    "memory": memory,
    "scaling": scaling,
    "hyper": hyper,
}
