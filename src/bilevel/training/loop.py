"""The outer loop of a long run: hyperiterations, validation, checkpoints, and an orderly end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bilevel.errors import BilevelError, DivergenceError, Outcome
from bilevel.progress import bar
from bilevel.training.distributed import World
from bilevel.training.files import NotWritten, write_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import Log
from bilevel.training.stopping import EarlyStopping, Interrupted, StopRequest, stop_requests


class Job(Protocol):
    """What is being learned. Hyperiterations are numbered 1, 2, …; number k depends on k and the state alone."""

    def step(self, iteration: int, stop: StopRequest) -> tuple[dict[str, float], bool]:
        """One hyperiteration: its `loss` and `images_per_second`, and whether any process was asked to stop.

        If it raises, nothing has changed."""

    def validate(self, iteration: int, stop: StopRequest) -> dict[str, float]:
        """Numbers on validation data, with the `score` to maximise; `Interrupted` if a process is asked to stop."""

    def state(self) -> dict[str, Tensor]:
        """Everything the next hyperiteration depends on."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
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
    return Run(job, folder, schedule, world, report).go(progress)


class Run:
    """`train` in two parts: the constructor goes back to the newest checkpoint, and `go` goes on from there."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        schedule: Schedule,
        world: World | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        self.job, self.folder, self.schedule, self.world = job, folder, schedule, world or World()
        self.stopping = EarlyStopping(schedule.patience)
        self.iteration = 0
        self.validated_at = -1
        self.saved: tuple[int, int] | None = None
        self.losses: list[dict[str, float]] = []
        self.earlier_seconds = 0.0
        with self.world.agreed():
            self._restore(report)
        self._check_agreement()
        self.began = time.monotonic()

    def _restore(self, report: Callable[[str], None]) -> None:
        found = self.folder.checkpoints.newest(report if self.world.writes else lambda message: None)
        if found is None:
            return
        tensors, facts = found
        self.job.restore(tensors)
        self.stopping.restore(facts["stopping"])
        self.iteration, self.earlier_seconds = facts["iteration"], facts["seconds"]
        self.validated_at = facts.get("validated_at", self.iteration)
        self.losses = facts.get("losses", [])
        self.saved = (self.iteration, self.validated_at)

    def _check_agreement(self) -> None:
        where = torch.zeros(self.world.size, dtype=torch.long)
        where[self.world.rank] = self.iteration
        self.world.sum(where)
        if len(set(where.tolist())) > 1:
            raise BilevelError(
                f"The processes found checkpoints of hyperiterations {', '.join(map(str, where.tolist()))} in "
                f"{self.folder.path}. Choose a folder that all machines share with --out DIR."
            )

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + time.monotonic() - self.began

    def go(self, progress: bool = False, title: str = "hyperiterations") -> Ending:
        try:
            with ExitStack() as stack:
                stop = stack.enter_context(stop_requests())
                log = stack.enter_context(self._log()) if self.world.writes else None
                show = stack.enter_context(self._bar(title, progress and self.world.writes))
                try:
                    outcome = self._loop(stop, log, show)
                except DivergenceError as error:
                    outcome = Outcome("diverged", f"Stopped in hyperiteration {self.iteration + 1}: {error}")
                self._save()
        except NotWritten as error:
            raise NotWritten(
                f"{error} The run stopped after hyperiteration {self.iteration}, and its newest checkpoint is valid. "
                "Make room and go on with --resume."
            ) from error
        code = stop.exit_code if outcome.kind == "interrupted" else int(not outcome.ok)
        best = self.stopping
        return Ending(outcome, self.iteration, self.seconds, best.best, best.best_iteration, code)

    def _loop(self, stop: StopRequest, log: Log | None, show: Callable[..., None]) -> Outcome:
        schedule, stopped = self.schedule, False
        while True:
            due = self.iteration % schedule.validate_every == 0 or self.iteration == schedule.iterations
            if due and self.validated_at != self.iteration:
                try:
                    self._validate(stop, log, show)
                except Interrupted:  # made up for when the run goes on
                    stopped = True
            if self.iteration and self.iteration % schedule.checkpoint_every == 0:
                self._save()
            if stopped:
                return Outcome("interrupted", f"Stopped by {stop.name} after hyperiteration {self.iteration}.")
            if self.iteration >= schedule.iterations:
                return Outcome("finished", f"Ran all {self.iteration} hyperiterations.")
            if self.stopping.stop:
                waited = self.stopping.waited
                return Outcome("stopped early", f"Stopped early: no better validation score in {waited} validations.")
            stopped = self._step(stop, log, show)

    def _step(self, stop: StopRequest, log: Log | None, show: Callable[..., None]) -> bool:
        schedule = self.schedule
        numbers, stopped = self.job.step(self.iteration + 1, stop)
        self.iteration += 1
        self.losses.append(numbers)
        means = {name: sum(line[name] for line in self.losses) / len(self.losses) for name in numbers}
        show(self.iteration, loss=f"{means['loss']:.4f}", rate=f"{means['images_per_second']:.0f}")
        if self.iteration % schedule.log_every == 0 or self.iteration == schedule.iterations:
            self.losses.clear()
            if log is not None:
                log.write(self.iteration, means)
        return stopped

    def _validate(self, stop: StopRequest, log: Log | None, show: Callable[..., None]) -> None:
        numbers = self.job.validate(self.iteration, stop)
        self.validated_at = self.iteration
        show(self.iteration, accuracy=f"{numbers['score']:.2%}")
        better = self.stopping.update(self.iteration, numbers["score"])
        if log is not None:
            log.write(self.iteration, {**numbers, "minutes": self.seconds / 60})
            if better:
                write_tensors(self.folder.best, self.job.weights(), {"iteration": self.iteration, **numbers})

    def _save(self) -> None:
        """A checkpoint, and the weights it holds for people who want only those."""
        now = (self.iteration, self.validated_at)
        if not self.world.writes or self.saved == now:
            return
        facts = {
            "stopping": self.stopping.state(),
            "seconds": self.seconds,
            "validated_at": self.validated_at,
            "losses": self.losses,
        }
        self.folder.checkpoints.write(self.iteration, self.job.state(), facts)
        write_tensors(self.folder.last, self.job.weights(), {"iteration": self.iteration})
        self.saved = now

    def _log(self) -> Log:
        return Log(self.folder, self.iteration if self.saved else None)

    def _bar(self, title: str, progress: bool) -> AbstractContextManager[Callable[..., None]]:
        if not progress:
            return nullcontext(lambda done, **fields: None)
        detail = "loss {task.fields[loss]}  validation {task.fields[accuracy]}  {task.fields[rate]} images/s"
        fields = {"loss": "…", "accuracy": "…", "rate": "…"}
        return bar(title, self.schedule.iterations, detail, done=self.iteration, **fields)
