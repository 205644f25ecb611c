"""The iterates of gradient descent on a quadratic, all T of them, in log T matrix products.

With M = I − ηA the moves d_t = w_{t+1} − w_t are M^t d_0, and the adjoints of the iterates are M^{T−t} α. Both are rows
of x, xM, xM², …, of which twice as many are known after each product with M, M², M⁴, … For few steps this is cheaper
than decomposing A, and it needs no divided differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KrylovIterate:
    """w_T and what its adjoint needs; `before` holds w_0 … w_{T−1}, one row for each column of w."""

    w: Tensor
    before: Tensor
    powers: list[Tensor]
    matrix: Tensor
    target: Tensor
    lr: Tensor
    steps: int

    def pull_back(self, cotangent: Tensor, with_settings: bool) -> list[Tensor]:
        """The cotangents of A, b and w_0, and of lr and momentum if asked for, from that of w_T."""
        width = cotangent.shape[1]
        adjoints = orbit(cotangent.T, self.powers, self.steps)
        last = adjoints[-width:] @ self.powers[0]
        ordered = adjoints.view(self.steps, width, -1)
        total = ordered.sum(0).T
        # Σ_t α_t ⊗ w_{t−1}, the cotangent of M.
        outer = ordered.flip(0).reshape(adjoints.shape).T @ self.before
        matrix = (outer + outer.T) * (self.lr * -0.5)
        parts = [matrix, total * self.lr, last.T]
        if with_settings:
            parts += [(total * self.target).sum() - (outer * self.matrix).sum(), torch.zeros_like(self.lr)]
        return parts


def iterate_all(matrix: Tensor, target: Tensor, start: Tensor, lr: Tensor, steps: int) -> KrylovIterate:
    """w_T of T ≥ 1 steps of gradient descent on ½⟨w, A w⟩ − ⟨b, w⟩ from w_0, for every column of b and w_0."""
    matrix = (matrix + matrix.T) / 2
    powers = [torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device) - matrix * lr]
    while 2 ** len(powers) < steps:
        powers.append(powers[-1] @ powers[-1])
    moves = orbit((target - matrix @ start).T * lr, powers, steps)
    width = start.shape[1]
    points = torch.cat([start.T, moves]).view(steps + 1, width, -1).cumsum(0)
    before = points[:-1].reshape(moves.shape)
    return KrylovIterate(points[-1].T, before, powers, matrix, target, lr, steps)


def orbit(rows: Tensor, powers: list[Tensor], steps: int) -> Tensor:
    """The rows of x, xM, …, xM^{T−1} from x and M, M², M⁴, …

    >>> shift = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> orbit(torch.tensor([[3.0, 4.0]]), [shift], 2).tolist()
    [[3.0, 4.0], [0.0, 3.0]]
    """
    width = len(rows)
    for power in powers:
        missing = steps * width - len(rows)
        if missing:
            rows = torch.cat([rows, rows[:missing] @ power])
    return rows
