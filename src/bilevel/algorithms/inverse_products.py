"""Approximate products with the inverse of a Hessian that is drawn batch by batch, and the step of λ with them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bilevel.algorithms.draws import Draws
from bilevel.algorithms.single_loop import Memory, Move, Rates
from bilevel.engine.oracles import Derivatives, Triple

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


def outer_move(
    series: Callable[..., list[Tensor]],
    at: Derivatives,
    point: Triple,
    w: Tensor,
    slope: Tensor,
    memory: Memory,
    draw: Draws,
    rates: Rates,
) -> Move:
    """The step of λ after inner steps from `point` to w, the last of them along `slope`; v is computed by `series`."""
    lam = point.lam
    value, outer_w, outer_lam = at.outer(w, lam, draw.outer())
    (v,) = series(at, [(w, lam, outer_w)], rates.eta, rates.terms, draw)
    hypergradient = at.cross(w, lam, v, draw.inner()) + outer_lam
    after = Triple(w, v, lam.sub(hypergradient, alpha=rates.outer))
    return Move(value, Triple(slope, v - point.v, hypergradient), after, memory)


def _factor(at: Derivatives, systems: Systems, powers: list[Tensor], eta: float, draw: Draws) -> list[Tensor]:
    batch = draw.inner()
    return [
        power.sub(at.hessian(w, lam, power, batch), alpha=eta)
        for (w, lam, _), power in zip(systems, powers, strict=True)
    ]
