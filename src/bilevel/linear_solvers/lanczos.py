"""Extreme eigenvalues of a symmetric matrix from products with it (Lanczos, 1950)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel.linear_solvers.base import Operator, random_directions


@dataclass(frozen=True)
class Spectrum:
    """Bounds on the eigenvalues of A.

    `smallest` and `largest` are Ritz values moved outwards by their residual norms. With `complete` the Krylov space
    was exhausted, and they are the extreme eigenvalues to rounding; otherwise the true smallest may lie lower, with
    small probability for a random start. `attained` is the smallest Ritz value, a curvature that A has
    along some direction.
    """

    smallest: float
    largest: float
    complete: bool
    products: int
    attained: float


def lanczos(operator: Operator, like: Tensor, products: int = 200, seed: int = 3) -> Spectrum:
    """The spectrum of A from at most `products` products, with full reorthogonalisation."""
    size = like.numel()
    vector = random_directions(1, like, seed)[0]
    vector = vector / vector.norm()
    basis, diagonal, off = [vector], [], []
    complete = False
    for _ in range(min(products, size)):
        image = operator(basis[-1])
        diagonal.append(torch.dot(image, basis[-1]))
        span = torch.stack(basis)
        # Two passes, because one leaves rounding errors that grow with the number of converged Ritz values.
        for _ in range(2):
            image = image - span.T @ (span @ image)
        length = image.norm()
        off.append(length)
        scale = max(
            float(torch.stack(diagonal).abs().max()), float(torch.stack(off[:-1]).max()) if len(off) > 1 else 0.0
        )
        if float(length) <= 1e3 * torch.finfo(like.dtype).eps * max(scale, 1e-300):
            complete = True
            break
        basis.append(image / length)
    complete = complete or len(diagonal) == size
    betas = torch.stack(off[:-1]) if len(off) > 1 else like.new_zeros(0)
    tridiagonal = torch.diag(torch.stack(diagonal)) + torch.diag(betas, 1) + torch.diag(betas, -1)
    # In double precision, because torch has no eigenvalues of matrices in half precision.
    values, vectors = torch.linalg.eigh(tridiagonal.double())
    residuals = torch.zeros_like(values) if complete else off[-1].double() * vectors[-1].abs()
    smallest, largest = float(values[0] - residuals[0]), float(values[-1] + residuals[-1])
    return Spectrum(smallest, largest, complete, len(diagonal), float(values[0]))
