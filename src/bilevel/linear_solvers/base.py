"""The base class of linear solvers, which solve A x = b from products with A alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel.errors import BilevelError


@dataclass(frozen=True)
class Operator:
    """A square matrix A, given by its products with vectors, and facts about it.

    Args:
        matvec: v ↦ A v for a vector v.
        matmat: rows V ↦ rows A v for a batch of vectors, if it is faster than one product after another.
        symmetric: True if A is symmetric by construction, None if unknown.
        step: an ω for which x ← x + ω(b − A x) converges (1 for A = I − ∂Φ); None if unknown.
        inverse: v ↦ an approximation of A⁻¹ v, symmetric and positive definite: a preconditioner; None for none.
        transposed: v ↦ Aᵀ v for a vector v; None if unknown. A symmetric A needs none.
    """

    matvec: Callable[[Tensor], Tensor]
    matmat: Callable[[Tensor], Tensor] | None = None
    symmetric: bool | None = None
    step: float | None = None
    inverse: Callable[[Tensor], Tensor] | None = None
    transposed: Callable[[Tensor], Tensor] | None = None

    def __call__(self, vector: Tensor) -> Tensor:
        return self.matvec(vector)

    def rows(self, vectors: Tensor) -> Tensor:
        if self.matmat is not None:
            return self.matmat(vectors)
        return torch.stack([self.matvec(vector) for vector in vectors])

    def transposed_product(self, solver: str) -> Callable[[Tensor], Tensor]:
        """v ↦ Aᵀ v, or an error where it is unknown."""
        known = self.matvec if self.symmetric else self.transposed
        if known is None:
            raise BilevelError(
                f"{solver} needs products with Aᵀ, and this operator has none. Pass Operator(matvec, transposed=…), or "
                "use GMRES() or BiCGSTAB(), which take products with A alone."
            )
        return known


@dataclass(frozen=True)
class LinearSolution:
    """The solution x, its measured relative residual ‖b − A x‖/‖b‖, and the number of products with A."""

    x: Tensor
    residual: float
    products: int
    converged: bool


@dataclass(frozen=True)
class LinearSolver(ABC):
    """Solves A x = b for a vector b.

    Attributes:
        advice: what to do if the solver did not converge; it ends the warning of `Implicit`.
    """

    advice: ClassVar[str] = "Use a more accurate solver."

    @abstractmethod
    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> LinearSolution:
        """The solution. `matvec` is an `Operator` or v ↦ A v. Iterative solvers begin at `x0`, a warm start."""

    @classmethod
    def examples(cls) -> list[Self]:
        """Instances for the battery, accurate to 1e-8 on a positive definite 12×12 system with condition number 8."""
        return [cls()]


def as_operator(matvec: Any) -> Operator:
    return matvec if isinstance(matvec, Operator) else Operator(matvec)


def reachable(tol: float, b: Tensor) -> float:
    """The tolerance, but at least ten times the rounding error of b's dtype."""
    return max(tol, 10 * torch.finfo(b.dtype).eps)


def relative(residual: Tensor, b: Tensor) -> float:
    scale = float(b.norm())
    return float(residual.norm()) / scale if scale > 0 else 0.0


def first_residual(operator: Operator, b: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """x_0, b − A x_0 and the products spent.

    A warm start that is worse than zero is dropped, because cancellation would lose digits for good.
    """
    if x0 is None:
        return torch.zeros_like(b), b.clone(), 0
    residual = b - operator(x0)
    return (x0.clone(), residual, 1) if residual.norm() <= b.norm() else (torch.zeros_like(b), b.clone(), 1)


def random_directions(count: int, like: Tensor, seed: int) -> Tensor:
    """Standard normal rows. They depend on the seed only, not on the machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, like.numel(), generator=generator, dtype=torch.float64, device="cpu").to(like)


def largest_eigenvalue(operator: Operator, like: Tensor, products: int = 30) -> float:
    """An estimate of ‖A‖ by power iteration; it is too small by a few per cent."""
    vector = random_directions(1, like, seed=0)[0]
    scale = 0.0
    for _ in range(products):
        vector = vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
        vector = operator(vector)
        scale = float(vector.norm())
    return scale
