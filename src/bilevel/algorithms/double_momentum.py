"""The base class of SUSTAIN and MRBO: recursive momentum on the directions of w and of λ."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel.algorithms.draws import BatchSource, Draws
from bilevel.algorithms.inverse_products import Systems
from bilevel.algorithms.single_loop import DELAY, Memory, Move, Rates, SingleLoop
from bilevel.engine.oracles import Derivatives, Triple
from bilevel.errors import BilevelError


@dataclass(frozen=True)
class DoubleMomentum(SingleLoop):
    """d_k = G(z_k) + (1 − η_k)(d_{k−1} − G(z_{k−1})), both G on the same batches, for w and for λ; then both move.

    G is ∇_w L for w, and ∇²_{λw} L v + ∇_λ E for λ, with v from a Neumann series on batches of its own.

    Args:
        terms: of the series. None chooses them for a relative truncation error of 1e-3, by the curvature at the start.
        momentum: η_0; η_k falls like k^−2/3, and the step sizes like k^−1/3.
    """

    exponents: ClassVar[tuple[float, float]] = (1 / 3, 1 / 3)
    counts: ClassVar[tuple[str, ...]] = ("terms",)

    terms: int | None = None
    momentum: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.momentum <= 1:
            raise BilevelError(
                f"momentum={self.momentum!r} is not the weight of a new gradient; pass 0 < momentum ≤ 1."
            )

    @abstractmethod
    def inverse(self, at: Derivatives, systems: Systems, rates: Rates, draw: Draws) -> list[Tensor]:
        """v at each of the points."""

    def draws(self, terms: int) -> tuple[int, int]:
        return terms + 1, 1

    def begin(self, at: Derivatives, point: Triple, train: BatchSource, val: BatchSource) -> Memory:
        zero = Triple(torch.zeros_like(point.w), torch.zeros_like(point.w), torch.zeros_like(point.lam))
        return {"before": point, "direction": zero}

    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        first = draw.k == 0
        points = [point] if first else [point, memory["before"]]
        batch, val, cross_batch = draw.inner(), draw.outer(), draw.inner()
        slopes = [at.gradient(z.w, z.lam, batch) for z in points]
        outers = [at.outer(z.w, z.lam, val) for z in points]
        systems = [(z.w, z.lam, outer[1]) for z, outer in zip(points, outers, strict=True)]
        solutions = self.inverse(at, systems, rates, draw)
        hypers = [
            at.cross(z.w, z.lam, v, cross_batch) + outer[2]
            for z, v, outer in zip(points, solutions, outers, strict=True)
        ]
        keep = 0.0 if first else 1 - self.momentum * (1 + draw.k / DELAY) ** (-2 / 3)
        before: Triple = memory["direction"]
        w = slopes[0] if first else slopes[0] + keep * (before.w - slopes[1])
        lam = hypers[0] if first else hypers[0] + keep * (before.lam - hypers[1])
        direction = Triple(w, solutions[0] - point.v, lam)
        after = Triple(
            point.w.sub(w, alpha=rates.inner), solutions[0], point.lam.sub(lam, alpha=rates.outer)
        )  # fmt: skip
        return Move(outers[0][0], direction, after, {"before": point, "direction": direction})

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(terms=2)]
