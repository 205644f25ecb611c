"""Approximate products with the inverse of a Hessian that is drawn batch by batch."""

from __future__ import annotations

from torch import Tensor

from bilevel.algorithms.draws import Draws
from bilevel.engine.oracles import Derivatives

# A point (w, λ) and the right-hand side ∇_w E there. Several systems share their batches.
Systems = list[tuple[Tensor, Tensor, Tensor]]


def neumann(at: Derivatives, systems: Systems, eta: float, terms: int, draw: Draws) -> list[Tensor]:
    """−η Σ_{q < terms} Π_{i ≤ q} (I − η H_i) b, with a new batch for every factor (Ji, Yang and Liang, 2021).

    Its mean over the batches is the truncated Neumann series of −H⁻¹ b.
    """
    powers = [b for _, _, b in systems]
    sums = powers
    for _ in range(terms - 1):
        powers = _factor(at, systems, powers, eta, draw)
        sums = [total + power for total, power in zip(sums, powers, strict=True)]
    return [-eta * total for total in sums]


def random_neumann(at: Derivatives, systems: Systems, eta: float, terms: int, draw: Draws) -> list[Tensor]:
    """−η·terms Π_{i ≤ p} (I − η H_i) b for a random p < terms: one term of the series, whose mean over p is the whole
    (Ghadimi and Wang, 2018)."""
    powers = [b for _, _, b in systems]
    for _ in range(draw.integer(terms)):
        powers = _factor(at, systems, powers, eta, draw)
    return [-eta * terms * power for power in powers]


def _factor(at: Derivatives, systems: Systems, powers: list[Tensor], eta: float, draw: Draws) -> list[Tensor]:
    batch = draw.inner()
    return [
        power.sub(at.hessian(w, lam, power, batch), alpha=eta)
        for (w, lam, _), power in zip(systems, powers, strict=True)
    ]
