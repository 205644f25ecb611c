"""The outer loop that `solve` and trainings share: hyperiterations, and the parts that are called in each of them.

A driver (an algorithm of `solve`, or the job of a training) evaluates and updates λ. Between two updates it calls
`Loop.report`. Everything else is a part: history, progress bar, tolerance, patience, callbacks, validation,
checkpoints, logs, requests to stop. Any part can end the loop with an outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from bilevel.errors import BilevelError, Outcome

# part(k, result) is called after k updates of λ, with the `result` that the driver reports. An outcome ends the loop.
Part: TypeAlias = Callable[[int, Any], Outcome | None]


class LoopEnded(Exception):
    """A part ended the loop. Drivers must not catch this exception."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Loop:
    """Runs a driver, and shows every hyperiteration to the parts, in their order.

    Attributes:
        parts: called one after the other until one of them returns an outcome.
        k: how many updates of λ have been made.

    >>> loop, seen = Loop([lambda k, x: seen.append(x), budget(2)]), []
    >>> def halve():
    ...     x = 1.0
    ...     for k in range(100):
    ...         loop.report(k, x)
    ...         x = x / 2
    >>> print(loop.run(halve), seen)
    Ran all 2 hyperiterations. [1.0, 0.5, 0.25]
    """

    def __init__(self, parts: Sequence[Part], k: int = 0) -> None:
        self.parts, self.k = list(parts), k

    def report(self, k: int, result: Any) -> None:
        """Show hyperiteration k to the parts; `LoopEnded` is raised if one of them ends the loop."""
        self.k = k
        for part in self.parts:
            outcome = part(k, result)
            if outcome is not None:
                raise LoopEnded(outcome)

    def run(self, drive: Callable[[], Outcome]) -> Outcome:
        """Call the driver; the outcome is the driver's own or that of the part that ended the loop."""
        try:
            return drive()
        except LoopEnded as ended:
            return ended.outcome


def budget(iterations: int) -> Part:
    """A part that ends the loop after this number of hyperiterations."""

    def part(k: int, result: Any) -> Outcome | None:
        return Outcome("finished", f"Ran all {k} hyperiterations.") if k >= iterations else None

    return part


def every(count: int, part: Part) -> Part:
    """A part that is called every `count` hyperiterations, and not at the start, for example to write checkpoints."""
    return lambda k, result: part(k, result) if k and k % count == 0 else None


def tolerance(tol: float) -> Part:
    """The part that ends the loop when the gradient norm has fallen to `tol`."""
    if isinstance(tol, str) or not tol >= 0:
        raise BilevelError(f"tol={tol!r} is not a tolerance: no gradient norm falls to it. Pass a number ≥ 0, or None.")

    def part(k: int, here: Any) -> Outcome | None:
        if not here.gradient_norm <= tol:
            return None
        return Outcome(
            "converged",
            f"Converged: the gradient norm fell to {here.gradient_norm:.3g} ≤ {tol:.3g} at hyperiteration {k}.",
        )

    return part
