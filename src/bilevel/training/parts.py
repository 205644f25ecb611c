"""Parts of the loop of a training: what is logged, when it is validated, and when it stops early."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bilevel.errors import Outcome
from bilevel.training.stopping import EarlyStopping, Interrupted, StopRequest

if TYPE_CHECKING:
    from bilevel.training.loop import Job

# write(k, numbers): one line of the log, after k hyperiterations.
Write = Callable[[int, Mapping[str, float]], None]
# show(k, **fields): moves the progress bar and changes its texts.
Show = Callable[..., None]


def ignore(k: int, *numbers: Any, **fields: Any) -> None:
    """The log or progress bar of a run without one."""


@dataclass
class JobStep:
    """The result of the last hyperiteration: its numbers (None before the first one), and whether to stop."""

    numbers: dict[str, float] | None = None
    stopped: bool = False


@dataclass
class Metrics:
    """Logs the means of the steps' numbers over `every` hyperiterations, and those of the last ones."""

    every: int
    iterations: int
    write: Write = ignore
    show: Show = ignore
    losses: list[dict[str, float]] = field(default_factory=list)

    def restore(self, losses: list[dict[str, float]]) -> None:
        """Restore the numbers since the last record from a checkpoint."""
        self.losses = [{name: float(x) for name, x in line.items()} for line in losses]
        if any(line.keys() != self.losses[0].keys() for line in self.losses):
            raise ValueError("losses of different kinds")

    def __call__(self, k: int, step: JobStep) -> None:
        if step.numbers is None:
            return
        self.losses.append(step.numbers)
        # Lines of a checkpoint that an earlier version wrote may lack a number.
        means = {name: fmean(line[name] for line in self.losses if name in line) for name in step.numbers}
        self.show(k, loss=f"{means['loss']:.4f}", rate=f"{means['images_per_second']:.0f}")
        if k % self.every == 0 or k == self.iterations:
            self.losses.clear()
            self.write(k, means)


@dataclass
class Validation:
    """Validates the job when a validation is due, and records the best score.

    A request to stop interrupts a validation. It is repeated when the run is resumed.
    """

    job: Job
    due: Callable[[int], bool]
    stopping: EarlyStopping = field(default_factory=EarlyStopping)
    stop: StopRequest | bool = False
    write: Write = ignore
    show: Show = ignore
    keep_best: Write = ignore
    validated_at: int = -1
    began: float = field(default_factory=time.monotonic)

    def __call__(self, k: int, step: JobStep) -> None:
        if not self.due(k) or self.validated_at == k:
            return
        try:
            numbers = self.job.validate(k, self.stop)
        except Interrupted:
            step.stopped = True
            return
        self.validated_at = k
        self.show(k, accuracy=f"{numbers['score']:.2%}")
        better = self.stopping.update(k, numbers["score"])
        self.write(k, {**numbers, "minutes": self.seconds / 60})
        if better:
            self.keep_best(k, numbers)

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore the best score, the last validation and the time from a checkpoint."""
        self.stopping.restore(facts["stopping"])
        self.validated_at = int(facts.get("validated_at", facts["iteration"]))
        self.began -= float(facts["seconds"])

    def stop_early(self, k: int, step: JobStep) -> Outcome | None:
        """The part that ends the loop when scores have not improved for long enough."""
        if not self.stopping.stop:
            return None
        waited = self.stopping.waited
        return Outcome("stopped early", f"Stopped early: no better validation score in {waited} validations.")

    @property
    def seconds(self) -> float:
        """Seconds of training, including those before a restart."""
        return time.monotonic() - self.began
