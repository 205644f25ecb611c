"""The Nyström low-rank inverse (Hataya and Yamada, 2023; Frangella, Tropp and Udell, 2023)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import LinearSolution, LinearSolver, Operator, as_operator, random_directions, relative
from bilevel.linear_solvers.cg import refuse_unless_symmetric


@dataclass(frozen=True)
class Nystrom(LinearSolver):
    """x = (Â + damping·I)⁻¹ b with Â = U diag(s) Uᵀ, a rank-`rank` approximation of A from as many products.

    It is accurate if A is nearly a low-rank matrix plus damping·I, such as the Hessian of a wide model with weight
    decay `damping`; the residual says whether it is. Otherwise use it as a preconditioner:
    `CG(preconditioner=Nystrom(rank=50))`.

    Args:
        rank: number of products for the sketch.
        damping: the eigenvalue in directions outside the sketch; None takes the sketch's smallest eigenvalue.
        seed: of the Gaussian sketch.
    """

    rank: int = 20
    damping: float | None = None
    seed: int = 0

    advice: ClassVar[str] = "Raise rank, or use it as a preconditioner: CG(preconditioner=Nystrom(rank))."

    def inverse(self, operator: Operator, like: Tensor) -> Callable[[Tensor], Tensor]:
        """The map r ↦ (Â + damping·I)⁻¹ r."""
        if self.rank < 1:
            raise BilevelError(f"Nystrom(rank={self.rank}) has no directions to sketch; pass rank ≥ 1.")
        if operator.symmetric is None:
            refuse_unless_symmetric(operator, like, "Nystrom")
        rank = min(self.rank, like.numel())
        basis = torch.linalg.qr(random_directions(rank, like, self.seed).T).Q
        image = operator.rows(basis.T).T
        # A shift of the size of rounding errors, so that the Cholesky factorisation of a semi-definite sketch exists.
        shift = torch.finfo(like.dtype).eps * image.norm() * like.numel() ** 0.5
        image = image + shift * basis
        core = basis.T @ image
        factor, failed = torch.linalg.cholesky_ex((core + core.T) / 2)
        if failed:
            raise BilevelError(
                "Nystrom() met negative curvature: the matrix is not positive semi-definite, so w_T is not near a "
                "minimiser of the inner objective. Run more inner steps, add an L2 term, or use Reverse()."
            )
        half = torch.linalg.solve_triangular(factor, image.T, upper=False).T
        vectors, singular, _ = torch.linalg.svd(half, full_matrices=False)
        values = (singular.square() - shift).clamp_min(0)
        if self.damping is None:
            outside = values[-1]
            inside_values = values
        else:
            outside = torch.as_tensor(self.damping, dtype=like.dtype, device=like.device)
            # The sketch sees A, which contains the damping already.
            inside_values = torch.maximum(values, outside)
        if not outside > 0:
            raise BilevelError(
                "Nystrom() needs a positive damping here, because the sketch found directions without curvature. Pass "
                "damping=…, the strength of the L2 term for example."
            )

        def apply(r: Tensor) -> Tensor:
            inside = vectors.T @ r
            return vectors @ (inside / inside_values) + (r - vectors @ inside) / outside

        return apply

    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> LinearSolution:
        operator = as_operator(matvec)
        invert = self.inverse(operator, b)
        x = invert(b) if x0 is None else x0 + invert(b - operator(x0))
        residual = relative(b - operator(x), b)
        products = min(self.rank, b.numel()) + 1 + (x0 is not None) + 2 * (operator.symmetric is None)
        return LinearSolution(x, residual, products, residual < 1e-2)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(rank=12)]
