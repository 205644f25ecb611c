"""The outer loop of a long run: hyperiterations, validation, checkpoints, and an orderly end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from bilevel.errors import BilevelError, DivergenceError, Outcome
from bilevel.progress import bar
from bilevel.training.distributed import World
from bilevel.training.files import write_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import Log
from bilevel.training.stopping import EarlyStopping, StopRequest, stop_requests

State = tuple[dict[str, Tensor], dict[str, Any]]


class Job(Protocol):
    """What is being learned. Hyperiterations are numbered 1, 2, …, and number k must depend on k and the state alone."""

    def step(self, iteration: int, stop: bool) -> tuple[dict[str, float], bool]:
        """One hyperiteration: its numbers, and whether any process was asked to stop."""

    def validate(self, iteration: int) -> dict[str, float]:
        """Numbers on validation data; `score` is the one to maximise."""

    def state(self) -> State:
        """Everything the next hyperiteration depends on."""

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go back to a state."""

    def weights(self) -> dict[str, Tensor]:
        """What the run is for: λ by parameter name."""


@dataclass(frozen=True)
class Schedule:
    """How long to run, and how often to look up.

    Args:
        iterations: hyperiterations in all.
        validate_every: hyperiterations between validations.
        checkpoint_every: hyperiterations between checkpoints.
        log_every: hyperiterations between records of the outer loss, which are means.
        patience: validations without a new best after which to stop; 0 for never.
    """

    iterations: int
    validate_every: int = 1000
    checkpoint_every: int = 500
    log_every: int = 20
    patience: int = 0


@dataclass
class Ending:
    """How a run ended, where it stands, and the exit code that says so."""

    outcome: Outcome
    iteration: int
    seconds: float
    best: float
    best_iteration: int
    exit_code: int = 0


def train(
    job: Job,
    folder: RunFolder,
    schedule: Schedule,
    *,
    world: World | None = None,
    report: Callable[[str], None] = print,
    progress: bool = False,
) -> Ending:
    """Run the job from the folder's newest checkpoint, or from the start, to the end of its schedule.

    A run that is stopped and continued goes through the same states, bit for bit, as one that was not. Rank 0 writes;
    all processes read the same checkpoint.
    """
    return _Run(job, folder, schedule, world or World(), report).go(progress)


class _Run:
    """One call of `train`."""

    def __init__(
        self, job: Job, folder: RunFolder, schedule: Schedule, world: World, report: Callable[[str], None]
    ) -> None:
        self.job, self.folder, self.schedule, self.world, self.report = job, folder, schedule, world, report
        self.stopping = EarlyStopping(schedule.patience)
        self.iteration = 0
        self.earlier_seconds = 0.0
        self.saved_at = -1
        found = folder.checkpoints.newest(report if world.writes else lambda message: None)
        if found is not None:
            tensors, facts = found
            job.restore(tensors, facts["job"])
            self.stopping.restore(facts["stopping"])
            self.iteration = self.saved_at = facts["iteration"]
            self.earlier_seconds = facts["seconds"]
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + time.monotonic() - self.began

    def go(self, progress: bool) -> Ending:
        with ExitStack() as stack:
            stop = stack.enter_context(stop_requests())
            log = stack.enter_context(Log(self.folder, self.iteration)) if self.world.writes else None
            show = stack.enter_context(self._bar(progress and self.world.writes))
            try:
                outcome = self._loop(stop, log, show)
            except DivergenceError as error:
                outcome = Outcome("diverged", f"Stopped in hyperiteration {self.iteration + 1}: {error}")
            self._save()
        code = stop.exit_code if outcome.kind == "interrupted" else int(not outcome.ok)
        best = self.stopping
        return Ending(outcome, self.iteration, self.seconds, best.best, best.best_iteration, code)

    def _loop(self, stop: StopRequest, log: Log | None, show: Callable[..., None]) -> Outcome:
        schedule = self.schedule
        if self.iteration == 0:
            self._validate(log, show)
        losses: list[dict[str, float]] = []
        while self.iteration < schedule.iterations:
            if self.stopping.stop:
                return Outcome(
                    "stopped early",
                    f"Stopped early: no better validation score in {self.stopping.waited} validations.",
                )
            numbers, stopped = self.job.step(self.iteration + 1, bool(stop))
            self.iteration += 1
            losses.append(numbers)
            if self.iteration % schedule.log_every == 0 or self.iteration == schedule.iterations:
                means = {name: sum(line[name] for line in losses) / len(losses) for name in losses[0]}
                losses.clear()
                show(self.iteration, loss=f"{means['loss']:.4f}", rate=f"{means['images_per_second']:.0f}")
                if log is not None:
                    log.write(self.iteration, means)
            if self.iteration % schedule.validate_every == 0 or self.iteration == schedule.iterations:
                self._validate(log, show)
            if self.iteration % schedule.checkpoint_every == 0:
                self._save()
            if stopped:
                return Outcome("interrupted", f"Stopped by {stop.name} after hyperiteration {self.iteration}.")
        return Outcome("finished", f"Ran all {schedule.iterations} hyperiterations.")

    def _validate(self, log: Log | None, show: Callable[..., None]) -> None:
        numbers = self.job.validate(self.iteration)
        show(self.iteration, accuracy=f"{numbers['score']:.2%}")
        better = self.stopping.update(self.iteration, numbers["score"])
        if log is not None:
            log.write(self.iteration, {**numbers, "minutes": self.seconds / 60})
            if better:
                write_tensors(self.folder.best, self.job.weights(), {"iteration": self.iteration, **numbers})

    def _save(self) -> None:
        """A checkpoint, and the weights it holds for people who want only those."""
        if not self.world.writes or self.saved_at == self.iteration:
            return
        tensors, facts = self.job.state()
        everything = {"job": facts, "stopping": self.stopping.state(), "seconds": self.seconds}
        try:
            self.folder.checkpoints.write(self.iteration, tensors, everything)
            write_tensors(self.folder.last, self.job.weights(), {"iteration": self.iteration, **facts})
        except BilevelError as error:
            raise BilevelError(
                f"{error} The run stopped in hyperiteration {self.iteration}; its earlier checkpoint is valid. Make "
                "room and go on with --resume."
            ) from error
        self.saved_at = self.iteration

    def _bar(self, progress: bool) -> AbstractContextManager[Callable[..., None]]:
        if not progress:
            return nullcontext(lambda done, **fields: None)
        detail = "loss {task.fields[loss]}  validation {task.fields[accuracy]}  {task.fields[rate]} images/s"
        fields = {"loss": "…", "accuracy": "…", "rate": "…"}
        return bar("hyperiterations", self.schedule.iterations, detail, done=self.iteration, **fields)
