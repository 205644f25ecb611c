"""The gradient that ignores the dynamics: the paper's *Approx*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bilevel.engine.method import Hypergradient, Method, Part
from bilevel.engine.process import Process


@dataclass(frozen=True)
class FirstOrder(Method):
    """∇_λ E(w_T, λ) with ∇_λ w_T set to zero (Section 5.3, *Approx*).

    It differentiates only the outer objective and `encode`. A λ that enters through the inner problem alone is refused.
    """

    exact: ClassVar[bool] = False
    sees_dynamics: ClassVar[bool] = False
    second_derivatives: ClassVar[bool] = False

    def sees(self, process: Process) -> frozenset[Part]:
        return frozenset({"the outer objective"})

    def __call__(self, process: Process) -> Hypergradient:
        state = process.run()
        value, _, gradients, _ = process.outer_gradients(state)
        return self.result(process, value, state, gradients, steps=process.steps)
