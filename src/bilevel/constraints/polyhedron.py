"""Linear inequalities and equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import extras, trees
from bilevel.constraints.base import Constraint
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class Polyhedron(Constraint):
    """Λ = {x : G x ≤ h, A x = b}, where x is the vector of all leaves.

    The nearest point is found by an active-set method (Lawson and Hanson, 1974, by scipy's `nnls`), and then computed
    from the active rows B, c as x − Bᵀ(B Bᵀ)⁻¹(B x − c), which has derivatives in x and in G, h, A and b. With
    the dynamics `Projected` or `FISTA`, the inner problem can be a quadratic program with inequalities, or any other
    convex objective over this set.

    Args:
        G, h: a matrix and a vector; None for no inequality.
        A, b: likewise, for equations.

    >>> G = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    >>> Polyhedron(G, torch.tensor([1.0, 0.0])).project(torch.tensor([2.0, 1.0]))
    tensor([1., 0.])
    """

    G: Any = None
    h: Any = None
    A: Any = None
    b: Any = None

    def __post_init__(self) -> None:
        for matrix, vector, names in ((self.G, self.h, ("G", "h")), (self.A, self.b, ("A", "b"))):
            if (matrix is None) != (vector is None) or (
                matrix is not None
                and (getattr(matrix, "ndim", 0) != 2 or getattr(vector, "shape", None) != matrix.shape[:1])
            ):
                sizes = [list(x.shape) if hasattr(x, "shape") else type(x).__name__ for x in (matrix, vector)]
                raise BilevelError(
                    f"Polyhedron has {names[0]} and {names[1]} of the shapes {sizes[0]} and {sizes[1]}. Pass a matrix "
                    "and a vector with one entry per row, or neither."
                )
        if self.G is None and self.A is None:
            raise BilevelError("Polyhedron() has no rows. Pass G and h for inequalities, A and b for equations.")

    def project(self, lam: Tree) -> Tree:
        leaves, spec = trees.flatten(lam)
        x = trees.to_vector(leaves)
        rows, limits, equations = self._rows(x)
        active = _active_rows(x.detach(), rows.detach(), limits.detach(), equations)
        if not len(active):
            return trees.map(torch.clone, lam)
        chosen, bounds = rows[active], limits[active]
        multipliers = torch.linalg.solve(chosen @ chosen.T, chosen @ x - bounds)
        return spec.unflatten(trees.from_vector(x - multipliers @ chosen, leaves))

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """All rows, the equations first, and how many equations there are."""
        pairs = [(m, v) for m, v in ((self.A, self.b), (self.G, self.h)) if m is not None]
        rows, limits = (torch.cat([part.to(x) for part in column]) for column in zip(*pairs, strict=True))
        if rows.shape[1] != x.numel():
            raise BilevelError(
                f"Polyhedron has rows of {rows.shape[1]} numbers, but w or λ has {x.numel()}. Pass one column "
                "per number."
            )
        return rows, limits, 0 if self.A is None else len(self.A)

    @classmethod
    def examples(cls) -> list[tuple[Self, Tree]]:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        vector = torch.zeros(5, dtype=torch.float64)
        ones = torch.ones(1, 5, dtype=torch.float64)
        return [
            (cls(rows, torch.full((6,), 0.3, dtype=torch.float64)), vector),
            (cls(rows[:3], torch.ones(3, dtype=torch.float64), ones, torch.ones(1, dtype=torch.float64)), vector),
        ]


def _active_rows(x: Tensor, rows: Tensor, limits: Tensor, equations: int) -> Tensor:
    """The rows that hold with equality at the nearest point and have a positive multiplier, and all equations.

    The least distance u = z − x subject to rows u ≤ limits − rows x is a non-negative least squares problem in the
    multipliers (Lawson and Hanson, chapter 23). An equation is two inequalities.
    """
    matrix, excess = rows.double().cpu().numpy(), (rows @ x - limits).double().cpu().numpy()
    if not equations and bool((excess <= 0).all()):
        return torch.zeros(0, dtype=torch.long, device=x.device)
    inequalities = np.concatenate([matrix, -matrix[:equations]])
    violation = np.concatenate([excess, -excess[:equations]])
    # min ‖u‖ subject to −inequalities u ≥ violation.
    system = np.concatenate([-inequalities.T, violation[None]])
    target = np.zeros(len(system))
    target[-1] = 1.0
    nnls = extras.load("scipy.optimize", extra="table", purpose="Polyhedron").nnls
    multipliers, residual = nnls(system, target)
    if residual <= 1e-10:
        raise BilevelError(
            "Polyhedron is an empty set: no point satisfies all its rows G x ≤ h and A x = b. Relax a limit."
        )
    used = multipliers[: len(matrix)] > 1e-12 * max(1.0, float(multipliers.max()))
    used[:equations] = True
    chosen = torch.as_tensor(np.flatnonzero(used), device=x.device)
    if int(torch.linalg.matrix_rank(rows[chosen])) < len(chosen):
        raise BilevelError(
            f"Polyhedron has {len(chosen)} active rows at the nearest point, and they are linearly dependent: the "
            "active set is degenerate and the projection has no derivative. Remove redundant rows."
        )
    return chosen
