"""AmIGO: inner steps and steps on the linear system, both from where they were (Arbel and Mairal, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel.algorithms.draws import Draws
from bilevel.algorithms.single_loop import Memory, Move, Rates, SingleLoop
from bilevel.engine.oracles import Derivatives, Triple


@dataclass(frozen=True)
class AmIGO(SingleLoop):
    """Q steps w −= ρ ∇_w L, then Q steps v −= ρ (∇²_w L v + ∇_w E), then λ −= γ (∇²_{λw} L v + ∇_λ E).

    ∇E is computed once, on one batch; every other product has a batch of its own. Reference: "Amortized implicit
    differentiation for stochastic bilevel optimization" (ICLR 2022).

    Args:
        inner_steps: Q.
    """

    exponents: ClassVar[tuple[float, float]] = (0.25, 0.5)
    needs_curvature: ClassVar[bool] = False
    counts: ClassVar[tuple[str, ...]] = ("inner_steps",)

    inner_steps: int = 10

    def draws(self, terms: int) -> tuple[int, int]:
        return 2 * self.inner_steps + 1, 1

    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        w, v, lam = point.w, point.v, point.lam
        for _ in range(self.inner_steps):
            slope = at.gradient(w, lam, draw.inner())
            w = w.sub(slope, alpha=rates.inner)
        value, outer_w, outer_lam = at.outer(w, lam, draw.outer())
        for _ in range(self.inner_steps):
            residual = at.hessian(w, lam, v, draw.inner()) + outer_w
            v = v.sub(residual, alpha=rates.inner)
        hypergradient = at.cross(w, lam, v, draw.inner()) + outer_lam
        after = Triple(w, v, lam.sub(hypergradient, alpha=rates.outer))
        return Move(value, Triple(slope, residual, hypergradient), after, memory)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(inner_steps=1)]
