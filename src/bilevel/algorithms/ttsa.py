"""TTSA: one inner step, and a slower step of λ (Hong, Wai, Wang and Yang, 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel.algorithms.draws import Draws
from bilevel.algorithms.inverse_products import outer_move, random_neumann
from bilevel.algorithms.single_loop import Memory, Move, Rates, SingleLoop
from bilevel.engine.oracles import Derivatives, Triple


@dataclass(frozen=True)
class TTSA(SingleLoop):
    """w −= ρ_k ∇_w L, then λ −= γ_k (∇²_{λw} L v + ∇_λ E), with v from a random term of the Neumann series.

    Two time scales: ρ_k falls like k^−2/5 and γ_k like k^−3/5. Reference: "A two-timescale stochastic algorithm
    framework for bilevel optimization: complexity analysis and application to actor-critic" (SIAM J. Optim. 2023).

    Args:
        terms: of the series. None chooses them for a relative truncation error of 1e-3, by the curvature at the start.
            The noise of v grows with their number.
    """

    exponents: ClassVar[tuple[float, float]] = (0.4, 0.6)
    counts: ClassVar[tuple[str, ...]] = ("terms",)

    terms: int | None = None

    def draws(self, terms: int) -> tuple[int, int]:
        return terms + 1, 1

    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        slope = at.gradient(point.w, point.lam, draw.inner())
        w = point.w.sub(slope, alpha=rates.inner)
        return outer_move(random_neumann, at, point, w, slope, memory, draw, rates)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(terms=2)]
