"""The iterates of gradient descent and heavy ball on a quadratic as functions of its matrix, and their derivatives.

With A = Q diag(s) Qᵀ and constant settings, w_T = Q (p(s) ∘ Qᵀw_0 + q(s) ∘ Qᵀb) with polynomials p and q. Both come
from T-fold composition of the affine map of one step, by repeated squaring. Run on plain vectors of eigenvalues the
composition gives p(s) and q(s); run on `Divided` numbers it gives their divided differences as well, in log T products
and without subtracting p(sᵢ) − p(sⱼ).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Divided:
    """A function f on the nodes s: its values f(sᵢ) and its divided differences f[sᵢ, sⱼ] (f′ on the diagonal).

    (f·g)[sᵢ, sⱼ] = f(sᵢ)·g[sᵢ, sⱼ] + f[sᵢ, sⱼ]·g(sⱼ), and sums add.
    """

    values: Tensor
    table: Tensor

    def __mul__(self, other: Divided | Tensor) -> Divided:
        if isinstance(other, Tensor):
            return Divided(self.values * other, self.table * other)
        if other is self:
            return Divided(self.values * self.values, self.table * (self.values[:, None] + self.values))
        return Divided(
            self.values * other.values, torch.addcmul(self.table * other.values, self.values[:, None], other.table)
        )

    def __add__(self, other: Divided) -> Divided:
        return Divided(self.values + other.values, self.table + other.table)


# One step, or several, of the dynamics for a single eigenvalue: x ↦ M x + c, entries tensors or Divided numbers.
Affine = tuple[list[list[Any]], list[Any]]


def compose(second: Affine, first: Affine) -> Affine:
    """x ↦ M₂(M₁x + c₁) + c₂."""
    size = range(len(first[1]))

    def entry(row: list[Any], column: list[Any]) -> Any:
        terms = [a * b for a, b in zip(row, column, strict=True)]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    matrix = [[entry(second[0][i], [first[0][k][j] for k in size]) for j in size] for i in size]
    return matrix, [entry(second[0][i], first[1]) + second[1][i] for i in size]


def repeat(step: Affine, times: int) -> Affine:
    """The `times`-fold composition of one step, by repeated squaring."""
    result: Affine | None = None
    while True:
        if times & 1:
            result = step if result is None else compose(step, result)
        times >>= 1
        if not times:
            assert result is not None
            return result
        step = compose(step, step)


def one_step(s: Any, lr: Any, momentum: Any, unit: Any, plain: bool) -> Affine:
    """The step as an affine map of (w, v): v ← momentum·v − lr·(s·w − b), w ← w + v; of w alone when there is no
    momentum."""
    if plain:
        return [[unit + s * -lr]], [unit * lr]
    return [[unit + s * -lr, unit * momentum], [s * -lr, unit * momentum]], [unit * lr, unit * lr]


@dataclass(frozen=True)
class SpectralIterate:
    """w_T, and what its derivatives are computed from."""

    w: Tensor
    vectors: Tensor
    p: Divided
    q: Divided
    start: Tensor
    target: Tensor
    nodes: Tensor
    settings: tuple[Tensor, Tensor]
    steps: int

    def pull_back(self, cotangent: Tensor, with_settings: bool) -> list[Tensor]:
        """The cotangents of A, b and w_0, and of lr and momentum if they are learned, from that of w_T."""
        alpha = self.vectors.T @ cotangent
        core = self.q.table * (alpha @ self.target.T) + self.p.table * (alpha @ self.start.T)
        matrix = self.vectors @ core @ self.vectors.T
        return [
            (matrix + matrix.T) / 2,
            self.vectors @ (self.q.values[:, None] * alpha),
            self.vectors @ (self.p.values[:, None] * alpha),
            *(self._pull_back_settings(alpha) if with_settings else ()),
        ]

    def _pull_back_settings(self, alpha: Tensor) -> list[Tensor]:
        lr, momentum = (setting.detach().requires_grad_() for setting in self.settings)
        if self.steps == 0:
            return [torch.zeros_like(lr), torch.zeros_like(momentum)]
        with torch.enable_grad():
            matrix, shift = repeat(
                one_step(self.nodes, lr, momentum, torch.ones_like(self.nodes), plain=False), self.steps
            )
            moved = (alpha * (matrix[0][0][:, None] * self.start + shift[0][:, None] * self.target)).sum()
        # The velocity starts at zero, so the first step does not depend on the momentum.
        return list(torch.autograd.grad(moved, (lr, momentum), allow_unused=True, materialize_grads=True))


def iterate(
    matrix: Tensor, target: Tensor, start: Tensor, lr: Tensor, momentum: Tensor, steps: int, plain: bool
) -> SpectralIterate:
    """w_T of the dynamics on ½⟨w, A w⟩ − ⟨b, w⟩ from w_0, for every column of b and w_0."""
    nodes, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    ones, zeros = torch.ones_like(nodes), torch.zeros_like(matrix)
    unit, s = Divided(ones, zeros), Divided(nodes, torch.ones_like(matrix))
    if steps == 0:
        p, q = Divided(ones, zeros), Divided(torch.zeros_like(nodes), zeros)
    else:
        affine, shift = repeat(one_step(s, lr, momentum, unit, plain), steps)
        p, q = affine[0][0], shift[0]
    start, target = vectors.T @ start, vectors.T @ target
    w = vectors @ (p.values[:, None] * start + q.values[:, None] * target)
    return SpectralIterate(w, vectors, p, q, start, target, nodes, (lr, momentum), steps)
