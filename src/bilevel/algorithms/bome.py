"""BOME: descent on the outer objective with a dynamic barrier (Liu, Ye, Wright, Stone and Liu, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import Self

from bilevel.algorithms.draws import Draws
from bilevel.algorithms.single_loop import Memory, Move, Rates, SingleLoop
from bilevel.algorithms.step_sizes import Probe
from bilevel.engine.oracles import Derivatives, Triple
from bilevel.errors import BilevelError


@dataclass(frozen=True)
class BOME(SingleLoop):
    """min E(w, λ) subject to q(w, λ) = L(w, λ) − min L(·, λ) ≤ 0; w and λ move together, by first derivatives only.

    From w, Q gradient steps of size `inner_lr` on L reach z. With z held fixed, q ≈ L(w, λ) − L(z, λ), and both move by

        w −= ξ (∇_w E + m ∇_w q),   λ −= γ (∇_λ E + m ∇_λ q),   m = max(0, barrier − ⟨∇E, ∇q⟩ / ‖∇q‖²),

    the direction closest to ∇E that lowers q at the rate barrier·‖∇q‖². In the paper ξ = γ, and so it is here
    with `outer_lr=γ`. With `outer_lr=None`, L is counted in units u in which γ times its curvature in λ is ½. ξ is then
    half of `inner_lr`·u, or less where E is steep in w, the barrier is divided by u, and both step sizes fall with k;
    the products count λ in units of √(γ/ξ). In these units the algorithm is the paper's. Reference: "BOME! Bilevel
    optimization made easy: a simple first-order approach" (NeurIPS 2022).

    It approximates a stationary point of f. The error is of the order of ξ, plus the distance from z to the minimiser
    that remains after Q steps. There is no certificate. With batches, m is the multiplier of one batch, whose mean is
    not that of the data, so the point that is reached is biased. If that matters, pass all the data, or use SOBA.

    Args:
        inner_steps: Q.
        barrier: how fast q falls; the paper's η.

    >>> import torch, bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: (w - lam) ** 2,
    ...     outer=lambda w, lam, x: (w - 1) ** 2 + lam**2,
    ...     init=lambda lam: torch.zeros_like(lam),
    ... )
    >>> sol = bl.solve(problem, torch.tensor(3.0), bl.Task(None, None), algorithm=bl.BOME(), iterations=300)
    >>> round(float(sol.outer), 2)
    0.5
    """

    exponents: ClassVar[tuple[float, float]] = (0.0, 0.5)
    eta_exponent: ClassVar[float] = 0.5
    unbiased: ClassVar[bool] = False
    second_derivatives: ClassVar[bool] = False
    needs_curvature: ClassVar[bool] = False
    counts: ClassVar[tuple[str, ...]] = ("inner_steps",)

    inner_steps: int = 10
    barrier: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.barrier < float("inf"):
            raise BilevelError(f"BOME(barrier={self.barrier!r}) is not a rate at which q falls; pass a number > 0.")

    def scales(self, probe: Probe, nu: float, rates: Rates) -> tuple[float, float]:
        """ξ, or 0 if γ is given; and u. ξ also moves w along ∇E, so the curvature of E limits it."""
        if self.outer_lr is not None:
            return 0.0, 1.0
        steepest, unit = probe.outer_curvature(), 2 * rates.outer * probe.curvature_in_lam() or 1.0
        half = 0.5 * rates.inner * unit
        return min(half, 0.5 / steepest) if steepest > 0 else half, unit

    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        batch, w, lam = draw.inner(), point.w, point.lam
        z = w
        for _ in range(self.inner_steps):
            z = z.sub(at.gradient(z, lam, batch), alpha=rates.inner)
        value, outer_w, outer_lam = at.outer(w, lam, draw.outer())
        here, there = at.inner(w, lam, batch), at.inner(z, lam, batch)
        gap_w, gap_lam = here[1], here[2] - there[2]
        step = rates.eta or rates.outer
        unit = rates.outer / step
        length = float(gap_w.square().sum() + unit * gap_lam.square().sum())
        along = float((outer_w * gap_w).sum() + unit * (outer_lam * gap_lam).sum())
        multiplier = max(0.0, self.barrier / rates.unit - along / length) if length > 0 else 0.0
        direction = Triple(
            outer_w + multiplier * gap_w, torch.zeros_like(w), outer_lam.add(gap_lam, alpha=multiplier)
        )  # fmt: skip
        after = Triple(w.sub(direction.w, alpha=step), point.v, lam.sub(direction.lam, alpha=rates.outer))
        return Move(value, direction, after, memory)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(inner_steps=30, barrier=1.0)]
