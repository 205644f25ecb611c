"""SABA: SOBA with the variance reduction of SAGA (Dagréou, Ablin, Vaiter and Moreau, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bilevel.algorithms.draws import BatchSource, Draws
from bilevel.algorithms.single_loop import Memory, Move, Rates, SingleLoop
from bilevel.engine.oracles import Derivatives, Triple


@dataclass(frozen=True)
class SABA(SingleLoop):
    """SOBA's directions, each corrected by its value when the same batch was last drawn: d_i − m_i + mean(m).

    The last value m_i of (∇_w L, ∇²_w L v, ∇²_{λw} L v) is remembered for every training batch, and of ∇E for every
    validation batch. With constant step sizes it converges linearly where f is strongly convex, as gradient descent
    does, at the cost of one batch per iteration. It stores 2·dim w + dim λ numbers for every batch.
    """

    finite_sum: ClassVar[bool] = True
    variance_reduced: ClassVar[bool] = True
    share: ClassVar[float] = 1 / 3
    needs_curvature: ClassVar[bool] = False

    def begin(self, at: Derivatives, point: Triple, train: BatchSource, val: BatchSource) -> Memory:
        inner = torch.stack([torch.cat(at.products(point.w, point.lam, point.v, batch)) for batch in train.all()])
        outer = torch.stack([torch.cat(at.outer(point.w, point.lam, batch)[1:]) for batch in val.all()])
        means = {"inner_mean": inner.mean(0), "outer_mean": outer.mean(0)}
        return {"inner": inner, "outer": outer, **means, "new": ((0, inner[0]), (0, outer[0]))}

    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        inner, outer = memory["inner"], memory["outer"]
        # The rows of the last iteration are written only now, because a checkpoint may save the memory of the last
        # iteration until here. Writing a row twice changes nothing.
        for table, (index, row) in zip((inner, outer), memory["new"], strict=True):
            table[index] = row
        i, j = draw.inner_index(), draw.outer_index()
        inner_row = torch.cat(at.products(point.w, point.lam, point.v, draw.train[i]))
        value, *slopes = at.outer(point.w, point.lam, draw.val[j])
        outer_row = torch.cat(slopes)
        inner_change, outer_change = inner_row - inner[i], outer_row - outer[j]
        w, v, lam = (inner_change + memory["inner_mean"]).split([len(point.w), len(point.v), len(point.lam)])
        outer_w, outer_lam = (outer_change + memory["outer_mean"]).split([len(point.w), len(point.lam)])
        direction = Triple(w.to(point.w.dtype), (v + outer_w).to(point.w.dtype), (lam + outer_lam).to(point.lam.dtype))
        means = {
            "inner_mean": torch.add(memory["inner_mean"], inner_change, alpha=1 / len(inner)),
            "outer_mean": torch.add(memory["outer_mean"], outer_change, alpha=1 / len(outer)),
        }
        after = {**memory, **means, "new": ((i, inner_row), (j, outer_row))}
        return Move(value, direction, point.moved(direction, rates.inner, rates.outer), after)
