"""SRBA: SOBA with the recursive variance reduction of SARAH (Dagréou, Moreau, Vaiter and Ablin, 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bilevel.algorithms.draws import BatchSource, Draws
from bilevel.algorithms.single_loop import Memory, Move, Rates, SingleLoop
from bilevel.algorithms.step_sizes import mean_directions
from bilevel.engine.oracles import Derivatives, Triple


@dataclass(frozen=True)
class SRBA(SingleLoop):
    """d_k = d_{k−1} + D_i(z_k) − D_i(z_{k−1}), with SOBA's directions D_i at z = (w, v, λ) on batch i.

    Every `period` iterations d is the mean of D_i over all batches. SRBA stores two points instead of SABA's table, and
    costs two batches per iteration. Reference: "A lower bound and a near-optimal algorithm for bilevel empirical risk
    minimization" (AISTATS 2024).

    Args:
        period: iterations from one mean over all batches to the next; None takes half the number of batches of both
            levels.
    """

    finite_sum: ClassVar[bool] = True
    variance_reduced: ClassVar[bool] = True
    share: ClassVar[float] = 1 / 2
    needs_curvature: ClassVar[bool] = False
    counts: ClassVar[tuple[str, ...]] = ("period",)

    period: int | None = None

    def begin(self, at: Derivatives, point: Triple, train: BatchSource, val: BatchSource) -> Memory:
        return {"since": 0, "before": point, "direction": point}

    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        train, val = draw.train, draw.val
        if memory["since"] == 0:
            value, direction = mean_directions(at, point, train.all(), val.all())
        else:
            i, j = train[draw.inner_index()], val[draw.outer_index()]
            value, now = at.directions(point, i, j)
            direction = memory["direction"] + (now - at.directions(memory["before"], i, j)[1])
        period = self.period or max(2, ((train.count or 1) + (val.count or 1)) // 2)
        after = {"since": (memory["since"] + 1) % period, "before": point, "direction": direction}
        return Move(value, direction, point.moved(direction, rates.inner, rates.outer), after)
