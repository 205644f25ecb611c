"""What a linear solver is: it solves A x = b from products with A alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self


@dataclass(frozen=True)
class Operator:
    """A square matrix as a function of vectors, with what is known about it.

    Args:
        matvec: v ↦ A v for a vector v.
        matmat: rows V ↦ rows A v for a batch of vectors, where that is faster than one after another.
        symmetric: True if A is symmetric by construction, None if nobody knows.
        step: an ω for which x ← x + ω(b − A x) is known to be the natural iteration (1 for A = I − ∂Φ), or None.
        inverse: v ↦ roughly A⁻¹ v, symmetric and positive definite: a preconditioner, where one is known.
    """

    matvec: Callable[[Tensor], Tensor]
    matmat: Callable[[Tensor], Tensor] | None = None
    symmetric: bool | None = None
    step: float | None = None
    inverse: Callable[[Tensor], Tensor] | None = None

    def __call__(self, vector: Tensor) -> Tensor:
        return self.matvec(vector)

    def rows(self, vectors: Tensor) -> Tensor:
        if self.matmat is not None:
            return self.matmat(vectors)
        return torch.stack([self.matvec(vector) for vector in vectors])


@dataclass(frozen=True)
class LinearSolution:
    """x with the relative residual ‖b − A x‖/‖b‖ that was measured for it, and the number of products with A."""

    x: Tensor
    residual: float
    products: int
    converged: bool


@dataclass(frozen=True)
class LinearSolver(ABC):
    """Solves A x = b, b a vector."""

    @abstractmethod
    def solve(
        self, matvec: Operator | Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None
    ) -> LinearSolution:
        """The solution, started from `x0` (a warm start) where the solver iterates."""

    @classmethod
    def examples(cls) -> list[Self]:
        """Instances for the battery, accurate to 1e-8 on a positive definite 12×12 system with condition number 8."""
        return [cls()]


def as_operator(matvec: Any) -> Operator:
    return matvec if isinstance(matvec, Operator) else Operator(matvec)


def reachable(tol: float, b: Tensor) -> float:
    """The tolerance, or what the floating-point format can do where that is less."""
    return max(tol, 10 * torch.finfo(b.dtype).eps)


def relative(residual: Tensor, b: Tensor) -> float:
    scale = float(b.norm())
    return float(residual.norm()) / scale if scale > 0 else 0.0


def random_directions(count: int, like: Tensor, seed: int) -> Tensor:
    """Standard normal rows, the same on every machine for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, like.numel(), generator=generator, dtype=torch.float64).to(like)


def largest_eigenvalue(operator: Operator, like: Tensor, products: int = 30) -> float:
    """An estimate of ‖A‖ by power iteration, from below by a few per cent."""
    vector = random_directions(1, like, seed=0)[0]
    scale = 0.0
    for _ in range(products):
        vector = vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
        vector = operator(vector)
        scale = float(vector.norm())
    return scale
