"""The iterates of gradient descent on a quadratic, all T of them, in log T matrix products.

Measured from w_0, where ∇L = g, the iterates are u_t = M u_{t−1} − ηg with M = I − ηA and u_0 = 0: sums of the moves
−ηM^t g. Their adjoints are M^{T−t} α. Both are rows of x, xM, xM², …, of which twice as many are known after each
product with M, M², M⁴, … For few steps this is cheaper than decomposing A, and it needs no divided differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KrylovIterate:
    """w_T and what its adjoint needs; `shifts` holds u_1 … u_T, one row for each column of w."""

    w: Tensor
    shifts: Tensor
    powers: list[Tensor]
    matrix: Tensor
    slope: Tensor
    lr: Tensor

    def pull_back(self, cotangent: Tensor, with_settings: bool) -> list[Tensor]:
        """The cotangents of A, g and w_0, and of lr if it is learned, from that of w_T."""
        steps, width, rows = self.shifts.shape
        adjoints = orbit(cotangent.T, self.powers, steps).view(steps, width, rows)
        total = adjoints.sum(0).T
        # Σ_t α_t ⊗ u_{t−1}, the cotangent of M; u_0 is zero.
        ordered = adjoints[:-1].flip(0).reshape(-1, rows)
        outer = ordered.T @ self.shifts[:-1].reshape(-1, rows)
        # M^T α. The equal expression α − A Σ_t ηα_t would subtract nearly equal numbers.
        start = self.powers[0] @ adjoints[-1].T
        parts = [(outer + outer.T) * (self.lr * -0.5), total * -self.lr, start]
        if with_settings:
            parts.append(-(outer * self.matrix).sum() - (total * self.slope).sum())
        return parts


def iterate_all(matrix: Tensor, slope: Tensor, start: Tensor, lr: Tensor, steps: int) -> KrylovIterate:
    """w_T of T ≥ 1 steps of gradient descent from w_0, where the gradient is `slope`, for every column of w_0."""
    matrix = (matrix + matrix.T) / 2
    powers = [torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device) - matrix * lr]
    while 2 ** len(powers) < steps:
        powers.append(powers[-1] @ powers[-1])
    shifts = orbit(slope.T * -lr, powers, steps).view(steps, start.shape[1], -1).cumsum(0)
    return KrylovIterate(start + shifts[-1].T, shifts, powers, matrix, slope, lr)


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
