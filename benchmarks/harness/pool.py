"""The worker processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from harness.contestants import Contestant, Worker, WorkerError
from harness.contract import Case
from harness.environments import NotInstalled
from harness.timing import Timing

Tick = Callable[[str, float], None]


class Pool:
    """The workers, each started when it is first needed. `absent` has the contestants that cannot run, and why."""

    def __init__(self, contestants: list[Contestant], quick: bool) -> None:
        self.contestants = contestants
        self.workers: dict[str, Worker] = {}
        self.absent: dict[str, str] = {c.name: "in full runs only" for c in contestants if quick and c.slow_start}

    def of(self, cases: Sequence[Case], names: Container[str] | None, tick: Tick) -> list[Worker]:
        """The workers of the contestants that enter at least one of the cases; if names are given, of these only."""
        chosen = [c for c in self._entering(cases) if names is None or c.name in names]
        started = []
        for contestant in chosen:
            if contestant.name not in self.workers and contestant.name not in self.absent:
                tick(f"starting {contestant.label}", 0.0)
                started.append(contestant)
                self._start(contestant)
        for contestant in started:
            self._await(contestant)
        return [self.workers[contestant.name] for contestant in chosen if contestant.name in self.workers]

    def missing(self, cases: Sequence[Case], names: Container[str] | None) -> list[Timing]:
        """A `Timing` without times for every absent contestant and every case that it would have entered."""
        return [
            Timing(c.name, c.label, c.group, case.name, case.steps, unavailable=self.absent[c.name])
            for case in cases
            for c in self._entering([case])
            if c.name in self.absent and (names is None or c.name in names)
        ]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def _entering(self, cases: Sequence[Case]) -> list[Contestant]:
        return [contestant for contestant in self.contestants if any(map(contestant.enters, cases))]

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
            # A peer that fails on this machine is reported. A contestant of the package that fails ends the run.
            if contestant.environment is None:
                raise
            self.workers.pop(contestant.name).close()
            self.absent[contestant.name] = str(error).splitlines()[0]
