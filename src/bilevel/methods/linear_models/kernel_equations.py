"""Penalised least squares by its kernel equations, for tables with more features than rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._at_minimiser import (
    LinearModelMethod,
    Minimum,
    declared_leave_one_out,
    flattened,
    solver_by_fold,
)
from bilevel.methods.linear_models._shared_work import row_blocks
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import SquaredError
from bilevel.structures.outer_objectives import LeaveOneOutSlopes
from bilevel.structures.rows import feature_sums, row_kernel, row_scores


@dataclass(frozen=True)
class KernelEquations(LinearModelMethod):
    """w_k = u_k X diag(1/α) with a system of rows × rows, for `LinearModels` with squared errors.

    With S the weights of fold k, X_c the rows about their mean (where there is an intercept) and
    K = X_c diag(1/α) X_cᵀ, the system is (S⁻¹ + K) u = y − ȳ. The adjoint follows by Woodbury's identity from the same
    Cholesky factor. Every penalty must be positive.
    """

    structure: ClassVar[type | None] = LinearModels

    def check(self, process: Process) -> None:
        super().check(process)
        inner = process.problem.inner
        if not isinstance(inner, LinearModels) or not isinstance(inner.loss, SquaredError):
            raise BilevelError("KernelEquations is for squared errors only. Use NewtonLinear().")

    def minimum(self, process: Process) -> Minimum:
        equations, (_, y, weight) = self._equations(process), process.bound.task.train
        memory = (len(weight) + 2) * equations.bytes
        return Minimum(equations.fit(y), flattened(equations.adjoint), bytes=memory)

    def at_minimiser(self, process: Process) -> Hypergradient:
        inner, bound, outer = process.problem.inner, process.bound, declared_leave_one_out(process)
        assert isinstance(inner, LinearModels)
        if outer is None or inner.intercept or len(bound.task.train[2]) > 1:
            return super().at_minimiser(process)
        _, y, weight, of_intercept, _ = bound.task.val
        equations = self._equations(process, of_intercept)
        found = equations.left_out(y, weight, of_intercept, outer.freedom)
        return self.left_out(process, found, equations.alpha, peak_memory=3 * equations.bytes)

    def _equations(self, process: Process, of_intercept: Tensor | None = None) -> _Equations:
        inner, (X, _, weight) = process.problem.inner, process.bound.task.train
        assert isinstance(inner, LinearModels)
        return _Equations(X, weight, self.positive_penalties(process), inner.intercept, of_intercept)


class _Equations:
    """The system of every fold.

    Args:
        of_intercept: the leverages o of an intercept, if X and y are about their means and there is one fold. Then
            √o is an eigenvector of I + S^½ K S^½ with the eigenvalue 1, and the solutions do not depend on it. Where
            all other eigenvalues are large, as in an almost exact fit, small numbers would be lost beside it. So its
            eigenvalue is raised by `raised`.
    """

    def __init__(
        self, X: Any, weight: Tensor, alpha: Tensor, intercept: bool, of_intercept: Tensor | None = None
    ) -> None:
        self.X, self.alpha, self.intercept = X, alpha, intercept
        kernel = _kernel(X, 1 / alpha)
        self.bytes = kernel.nbytes
        self.total = weight.sum(1)
        self.share = weight / self.total[:, None] if intercept else torch.zeros_like(weight)
        self.mean = feature_sums(self.share[:, None], X)
        # The rows that each fold trains on, filled up with rows of weight zero to equal numbers.
        count = int((weight > 0).sum(1).max())
        self.rows = torch.argsort((weight <= 0).to(torch.int8), dim=1, stable=True)[:, :count]
        self.root = weight.gather(1, self.rows).sqrt()
        middles = self.share @ kernel if intercept else None
        self.raised = 0.0 if of_intercept is None else float((weight[0] * kernel.diagonal()).mean())

        def matrices(folds: slice) -> Tensor:
            """I + S^½ K S^½ of some folds."""
            rows, root = self.rows[folds], self.root[folds]
            # One flat index is much faster than an index for each of two axes.
            places = rows[:, :, None] * len(kernel) + rows[:, None, :]
            block = kernel.reshape(-1).index_select(0, places.reshape(-1)).reshape(places.shape)
            if middles is not None:
                middle = middles[folds]
                offset, middle = (middle * self.share[folds]).sum(1, keepdim=True), middle.gather(1, rows)
                block.sub_(middle[:, :, None]).sub_((middle - offset)[:, None, :])
            block *= root[:, :, None] * root[:, None, :]
            if of_intercept is not None:
                direction = of_intercept.sqrt()[rows]
                block += self.raised * direction[:, :, None] * direction[:, None, :]
            block.diagonal(dim1=1, dim2=2).add_(1)
            return block

        self._solve = solver_by_fold(len(weight), count, matrices)

    def _dual(self, right: Tensor) -> Tensor:
        """(S⁻¹ + K)⁻¹ times `right`, folds × outputs × rows; zero for the rows that are held out."""
        index = self.rows[:, None].expand(-1, right.shape[1], -1)
        root = self.root[:, None]
        found = root * self._solve(root * right.gather(2, index))
        return torch.zeros_like(right).scatter_add_(2, index, found)

    def fit(self, y: Tensor) -> Tensor:
        mean = self.share @ y.mT
        w = feature_sums(self._dual(y - mean[:, :, None]), self.X) / self.alpha
        return torch.cat([w, mean[:, :, None] - w @ self.mean.mT], -1) if self.intercept else w

    def adjoint(self, slope: Tensor) -> Tensor:
        """H⁻¹ times the slope, intercepts eliminated first."""
        if not self.intercept:
            return self._woodbury(slope)
        last = slope[..., -1:]
        q = self._woodbury(slope[..., :-1] - last * self.mean)
        return torch.cat([q, last / self.total[:, None, None] - q @ self.mean.mT], -1)

    def left_out(self, y: Tensor, weight: Tensor, of_intercept: Tensor, freedom: float) -> LeaveOneOutSlopes:
        """With B = I + S^½ K S^½: X A⁻¹ = S^−½ B⁻¹ S^½ X diag(1/α), and 1 − h is the diagonal of B⁻¹.

        Of an eigenvalue that was raised to 1 + r, the diagonal of the inverse has o / (1 + r) in place of o.

        Any other form would compute the residuals of an almost exact fit as differences of large numbers.
        """
        root = weight.sqrt()
        inverse = self._solve(torch.eye(len(root), dtype=root.dtype, device=root.device)[None])[0]
        smoother = root * inverse / root[:, None]
        residuals = y @ smoother.mT
        w = feature_sums((weight * residuals)[None], self.X)[0] / self.alpha
        Z = feature_sums(smoother[None], self.X)[0] / self.alpha
        kept = inverse.diagonal() - of_intercept / (1 + self.raised)
        return LeaveOneOutSlopes.of(w, Z, residuals, kept, of_intercept, weight, freedom)

    def _woodbury(self, slope: Tensor) -> Tensor:
        scaled = slope / self.alpha
        image = row_scores(scaled, self.X) - scaled @ self.mean.mT
        return scaled - feature_sums(self._dual(image), self.X) / self.alpha


def _kernel(X: Any, scale: Tensor) -> Tensor:
    """X diag(scale) Xᵀ, in blocks of rows where it is large."""
    rows, features = X.shape
    blocks = row_blocks(rows, 2.0 * rows**2 * features if isinstance(X, Tensor) else 0)
    if len(blocks.slices) == 1:
        return row_kernel(X, scale)
    scaled, size = X * scale.sqrt(), blocks.slices[0].stop

    def block(number: int) -> Tensor:
        found = scaled[blocks.slices[number]] @ scaled.mT
        return torch.nn.functional.pad(found, (0, 0, 0, size - len(found)))

    return torch.cat(blocks.each(block, scaled.new_empty(size, rows)))[:rows]
