"""SOBA: stochastic steps of w, v and λ at once (Dagréou, Ablin, Vaiter and Moreau, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bilevel.algorithms.draws import Draws
from bilevel.algorithms.single_loop import Memory, Move, Rates, SingleLoop
from bilevel.engine.oracles import Derivatives, Triple


@dataclass(frozen=True)
class SOBA(SingleLoop):
    """w −= ρ ∇_w L,  v −= ρ (∇²_w L v + ∇_w E),  λ −= γ (∇²_{λw} L v + ∇_λ E), on one batch of each level.

    All three directions are computed at the old point. The default step sizes fall like k^−1/2, as in Theorem 1 of "A
    framework for bilevel optimization that enables stochastic and global variance reduction algorithms" (NeurIPS 2022).

    >>> import torch, bilevel as bl
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> X, Z = torch.randn(64, 3), torch.randn(64, 3)
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: ((w - lam - x) ** 2).mean(),
    ...     outer=lambda w, lam, z: ((w - z) ** 2).mean() + 0.1 * (lam**2).mean(),
    ...     init=lambda lam: torch.zeros_like(lam),
    ... )
    >>> task = bl.Task(train=bl.Minibatches(X, 16), val=bl.Minibatches(Z, 16))
    >>> sol = bl.solve(problem, torch.ones(3), task, algorithm=bl.SOBA(), iterations=2000)
    >>> bool(((sol.outer - (Z.mean(0) - X.mean(0)) / 1.1).abs() < 0.02).all())
    True
    """

    exponents: ClassVar[tuple[float, float]] = (0.5, 0.5)
    needs_curvature: ClassVar[bool] = False

    def step(self, at: Derivatives, point: Triple, memory: Memory, draw: Draws, rates: Rates) -> Move:
        value, direction = at.directions(point, draw.inner(), draw.outer())
        return Move(value, direction, point.moved(direction, rates.inner, rates.outer), memory)
