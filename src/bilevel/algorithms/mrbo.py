"""MRBO: recursive momentum, and a whole Neumann series (Yang, Ji and Liang, 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bilevel.algorithms.double_momentum import DoubleMomentum
from bilevel.algorithms.draws import Draws
from bilevel.algorithms.inverse_products import Systems, neumann
from bilevel.algorithms.single_loop import Rates
from bilevel.engine.oracles import Derivatives


@dataclass(frozen=True)
class MRBO(DoubleMomentum):
    """Momentum d_k = G(z_k) + (1 − η_k)(d_{k−1} − G(z_{k−1})) for w and λ; v from a Neumann series.

    Reference: "Provably faster algorithms for bilevel optimization" (NeurIPS 2021).
    """

    def inverse(self, at: Derivatives, systems: Systems, rates: Rates, draw: Draws) -> list[Tensor]:
        return neumann(at, systems, rates.eta, rates.terms, draw)
