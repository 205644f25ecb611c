"""StocBiO: inner steps from the last w, then a Neumann series on batches (Ji, Yang and Liang, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel.algorithms.draws import Draws
from bilevel.algorithms.inverse_products import neumann
from bilevel.algorithms.single_loop import Memory, Move, Rates, SingleLoop, check_count
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

    inner_steps: int = 10
    terms: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "inner_steps", "terms")

    def draws(self, terms: int) -> tuple[int, int]:
        return self.inner_steps + terms, 1

    @property
    def inner_steps_taken(self) -> int:
        return self.inner_steps

    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        w, lam = point.w, point.lam
        for _ in range(self.inner_steps):
            slope = at.gradient(w, lam, draw.inner())
            w = w.sub(slope, alpha=rates.inner)
        value, outer_w, outer_lam = at.outer(w, lam, draw.outer())
        (v,) = neumann(at, [(w, lam, outer_w)], rates.eta, rates.terms, draw)
        hypergradient = at.cross(w, lam, v, draw.inner()) + outer_lam
        after = Triple(w, v, lam.sub(hypergradient, alpha=rates.outer))
        return Move(value, Triple(slope, v - point.v, hypergradient), after, memory)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(inner_steps=1, terms=2)]
