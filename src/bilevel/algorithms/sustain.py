"""SUSTAIN: recursive momentum, and a random term of the Neumann series (Khanduri and others, 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bilevel.algorithms.double_momentum import DoubleMomentum
from bilevel.algorithms.draws import Draws
from bilevel.algorithms.inverse_products import Systems, random_neumann
from bilevel.algorithms.single_loop import Rates
from bilevel.engine.oracles import Derivatives


@dataclass(frozen=True)
class SUSTAIN(DoubleMomentum):
    """Momentum d_k = G(z_k) + (1 − η_k)(d_{k−1} − G(z_{k−1})) for w and λ; v from a random term of the Neumann series.

    Reference: "A near-optimal algorithm for stochastic bilevel optimization via double-momentum" (NeurIPS 2021).
    """

    def inverse(self, at: Derivatives, systems: Systems, rates: Rates, draw: Draws) -> list[Tensor]:
        return random_neumann(at, systems, rates.eta, rates.terms, draw)
