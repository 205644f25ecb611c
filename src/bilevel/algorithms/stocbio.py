"""StocBiO: inner steps from the last w, then a Neumann series on batches (Ji, Yang and Liang, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel.algorithms.draws import Draws
from bilevel.algorithms.inverse_products import neumann, outer_move
from bilevel.algorithms.single_loop import Memory, Move, Rates, SingleLoop
from bilevel.engine.oracles import Derivatives, Triple


@dataclass(frozen=True)
class StocBiO(SingleLoop):
    """Q steps w −= ρ ∇_w L;  v = −ρ Σ_q Π_{i≤q} (I − ρ ∇²_w L_i) ∇_w E;  λ −= γ (∇²_{λw} L v + ∇_λ E).

    Every gradient, factor and product has a batch of its own, so the direction of λ is unbiased for the truncated
    series. Reference: "Bilevel optimization: convergence analysis and enhanced design" (ICML 2021).

    Args:
        inner_steps: Q.
        terms: of the series. None chooses them for a relative truncation error of 1e-3, by the curvature at the start.
    """

    exponents: ClassVar[tuple[float, float]] = (0.0, 0.5)
    counts: ClassVar[tuple[str, ...]] = ("inner_steps", "terms")

    inner_steps: int = 10
    terms: int | None = None

    def draws(self, terms: int) -> tuple[int, int]:
        return self.inner_steps + terms, 1

    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        w = point.w
        for _ in range(self.inner_steps):
            slope = at.gradient(w, point.lam, draw.inner())
            w = w.sub(slope, alpha=rates.inner)
        return outer_move(neumann, at, point, w, slope, memory, draw, rates)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(inner_steps=1, terms=2)]
