"""Reverse mode without second derivatives: products with Hessians by differences of gradients."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import Self

from bilevel.engine.differences import BoundByDifferences
from bilevel.engine.method import EVERYTHING, Hypergradient, Method, Part
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.truncated import refuse_early_stop, through_last_steps


@dataclass(frozen=True)
class FiniteDifference(Method):
    """Algorithm 1 with u ∇²L ≈ (∇L(w + h u) − ∇L(w − h u)) / (2 h): the architecture gradient of DARTS (Liu et al.,
    2019), for any dynamics and any number of steps.

    It approximates ∇f_T, or with `k` its part through the last k steps, as `Truncated(k)` does. For a smooth L the
    differences have a relative error of order h²: 1e-9 in double and 1e-4 in single precision. There is no certificate,
    because a difference may cross a kink of L. DARTS is `solve(steps=1, start="warm",
    method=FiniteDifference())`.

    The inner objective is differentiated once only, so it may contain operations without a second derivative. A step
    costs two gradients where `Reverse` takes the derivative of one, and its activations are not kept: memory is that of
    the iterates.

    Args:
        k: differentiate the last k steps; None differentiates all.
        width: h‖u‖ / (1 + ‖w‖); the cube root of the precision by default.
    """

    k: int | None = None
    width: float | None = None
    exact: ClassVar[bool] = False
    second_derivatives: ClassVar[bool] = False
    single_tolerance: ClassVar[float] = 1e-3

    def check(self, process: Process) -> None:
        if self.k is not None and (not isinstance(self.k, int) or self.k < 1):
            raise BilevelError(
                f"FiniteDifference(k={self.k!r}) differentiates no step. Pass k ≥ 1, or None for all steps."
            )
        if self.width is not None and not 0 < self.width < 1:
            raise BilevelError(
                f"FiniteDifference(width={self.width!r}) is not a relative width. Pass a number between 0 and 1, such "
                "as 1e-5, or None."
            )
        if self.k is not None:
            refuse_early_stop(self, self.k, process)

    def sees(self, process: Process) -> frozenset[Part]:
        return EVERYTHING if self.k is None or self.k >= process.steps else EVERYTHING - {"the start"}

    def __call__(self, process: Process) -> Hypergradient:
        once = copy.copy(process)
        once.bound = BoundByDifferences(process, self.width)
        # A recorded step keeps the w at which it took its gradient, and nothing else.
        once.check_results = replace(process.check_results, graph_bytes=0)
        return through_last_steps(self, max(1, self.k or process.steps), once)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(k=1000)]
