"""A long run: the loop with validation, checkpoints, a log and requests to stop, in a folder from which it resumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from bilevel.distributed import World
from bilevel.errors import BilevelError, DivergenceError, Outcome
from bilevel.files import NotWritten, write_bytes
from bilevel.hyperiterations import Loop, budget, every
from bilevel.progress import bar
from bilevel.training.files import packed, write_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import Log
from bilevel.training.parts import JobStep, Metrics, Validation
from bilevel.training.stopping import EarlyStopping, Interrupted, StopRequest, stop_requests


class Job(Protocol):
    """The driver of a training. Hyperiterations are numbered 1, 2, …; number k depends on k and the state alone."""

    def step(self, iteration: int, stop: StopRequest | bool) -> tuple[dict[str, float], bool]:
        """Run one hyperiteration; return its `loss` and `images_per_second`, and whether a process was asked to stop.

        It raises `Interrupted` if it stops before its end. If it raises an error, the state has not changed."""

    def validate(self, iteration: int, stop: StopRequest | bool) -> dict[str, float]:
        """Numbers on validation data, with the `score` to maximise. It raises `Interrupted` if a process is to stop."""

    def state(self) -> dict[str, Tensor]:
        """Everything that the next hyperiteration depends on."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned."""

    def weights(self) -> dict[str, Tensor]:
        """The result of the run so far: λ by name."""


@dataclass(frozen=True)
class Schedule:
    """How long to run, and how often to validate, save and log.

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

    def validates(self, k: int) -> bool:
        """Whether a validation is due after k hyperiterations."""
        return k % self.validate_every == 0 or k == self.iterations


@dataclass
class Ending:
    """How a run ended, its last hyperiteration and best score, and the exit code for the shell."""

    outcome: Outcome
    iteration: int
    seconds: float
    best: float
    best_iteration: int
    exit_code: int = 0


class Run:
    """A job in its folder: the constructor restores the newest checkpoint, and `go` runs to the end of the schedule.

    A run that is stopped and continued has the same states, bit for bit, as one that was not. Rank 0 writes; all
    processes read the same checkpoint.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        schedule: Schedule,
        world: World | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        self.job, self.folder, self.schedule, self.world = job, folder, schedule, world or World()
        self.metrics = Metrics(schedule.log_every, schedule.iterations)
        self.validation = Validation(job, schedule.validates, EarlyStopping(schedule.patience))
        self.loop = Loop([])
        self.saved: tuple[int, int] | None = None
        with self.world.agreed():
            self._restore(report)
        self._check_agreement()

    @property
    def iteration(self) -> int:
        """How many hyperiterations are done."""
        return self.loop.k

    def _restore(self, report: Callable[[str], None]) -> None:
        found = self.folder.checkpoints.newest(report if self.world.writes else lambda message: None)
        if found is None:
            # `last` is written after a checkpoint, so a run that was killed before its first one has no such file.
            if self.folder.last.exists():
                raise BilevelError(
                    f"{self.folder.path} holds a run whose checkpoints are gone: {self.folder.checkpoints.folder} has "
                    "none, and starting at 0 would overwrite the run's weights and metrics. Put the checkpoints back, "
                    "or begin a new run in another folder with --out DIR."
                )
            return
        tensors, facts = found
        self.job.restore(tensors)
        self.loop.k = facts["iteration"]
        try:
            self.metrics.restore(facts.get("losses", []))
            self.validation.restore(facts)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BilevelError(
                f"The newest checkpoint in {self.folder.checkpoints.folder} does not hold the state of the run "
                f"({error!r:.80}). Remove it to resume from the one before it, or begin a new run."
            ) from error
        self.saved = (self.iteration, self.validation.validated_at)

    def _check_agreement(self) -> None:
        where = torch.zeros(self.world.size, dtype=torch.long)
        where[self.world.rank] = self.iteration
        self.world.sum(where)
        if len(set(where.tolist())) > 1:
            raise BilevelError(
                f"The processes found checkpoints of hyperiterations {', '.join(map(str, where.tolist()))} in "
                f"{self.folder.path}. Choose a folder that all machines share with --out DIR."
            )

    def go(self, progress: bool | None = False, title: str = "hyperiterations", deadline: float = math.inf) -> Ending:
        """Run, save, and return how the run ended; `deadline` is when to stop, on the clock of `time.monotonic`."""
        try:
            with ExitStack() as stack:
                stop = stack.enter_context(stop_requests(deadline))
                self._complete_the_last_save()
                self._assemble(stop, stack, title, progress if self.world.writes else False)
                try:
                    outcome = self.loop.run(lambda: drive(self.job, self.loop, stop))
                except Interrupted:
                    outcome = _interrupted(stop, self.iteration)
                except DivergenceError as error:
                    outcome = Outcome("diverged", f"Stopped in hyperiteration {self.iteration + 1}: {error}")
                self._save(self.iteration)
        except NotWritten as error:
            raise NotWritten(
                f"{error} The run stopped after hyperiteration {self.iteration}, and its newest checkpoint is valid. "
                "Make room and resume with --resume."
            ) from error
        code = stop.exit_code if outcome.kind == "interrupted" else int(not outcome.ok)
        best = self.validation.stopping
        return Ending(outcome, self.iteration, self.validation.seconds, best.best, best.best_iteration, code)

    def _assemble(self, stop: StopRequest, stack: ExitStack, title: str, show: bool | None) -> None:
        """Give the loop its parts. Only one process writes files and shows progress."""

        def stopped(k: int, step: JobStep) -> Outcome | None:
            return _interrupted(stop, k) if step.stopped else None

        self.validation.stop = stop
        if self.world.writes:
            log = stack.enter_context(closing(Log(self.folder, *(self.saved or (None,)))))
            self.metrics.write = self.validation.write = log.write
            self.validation.keep_best = self._write_best
        detail = "loss {task.fields[loss]}  validation {task.fields[accuracy]}  {task.fields[rate]} images/s"
        fields = {"loss": "…", "accuracy": "…", "rate": "…"}
        done, total = self.iteration, self.schedule.iterations
        advance = stack.enter_context(bar(title, total, detail, done, show, **fields))
        self.metrics.show = self.validation.show = advance
        self.loop.parts = [
            self.metrics,
            self.validation,
            every(self.schedule.checkpoint_every, self._save),
            stopped,
            budget(self.schedule.iterations),
            self.validation.stop_early,
        ]

    def _write_best(self, k: int, numbers: Mapping[str, float]) -> None:
        write_tensors(self.folder.best, self.job.weights(), {"iteration": k, **numbers})

    def _save(self, k: int, step: JobStep | None = None) -> None:
        """Write a checkpoint, and its weights in a file of their own."""
        now = (k, self.validation.validated_at)
        if not self.world.writes or self.saved == now:
            return
        facts = {
            "stopping": self.validation.stopping.state(),
            "seconds": self.validation.seconds,
            "validated_at": self.validation.validated_at,
            "losses": self.metrics.losses,
        }
        self.folder.checkpoints.write(k, self.job.state(), facts)
        write_bytes(self.folder.last, self._last(k))
        self.saved = now

    def _complete_the_last_save(self) -> None:
        """Write `last` if the run was killed after its newest checkpoint and before the weights of that checkpoint."""
        if self.saved and self.world.writes:
            content = self._last(self.iteration)
            if not self.folder.last.is_file() or self.folder.last.read_bytes() != content:
                write_bytes(self.folder.last, content)

    def _last(self, k: int) -> bytes:
        return packed(self.job.weights(), {"iteration": k})


def _interrupted(stop: StopRequest, k: int) -> Outcome:
    return Outcome("interrupted", f"Stopped by {stop.name} after hyperiteration {k}.")


def drive(job: Job, loop: Loop, stop: StopRequest | bool = False) -> NoReturn:
    """Run hyperiterations of the job from where the loop is, until one of its parts ends it."""
    step, k = JobStep(), loop.k
    while True:
        loop.report(k, step)
        k += 1
        step = JobStep(*job.step(k, stop))
