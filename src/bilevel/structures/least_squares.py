"""Penalised least squares given by sums over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.structures.data_checks import refuse_asymmetric
from bilevel.structures.penalties import code_of
from bilevel.structures.rows import GramOfRows
from bilevel.trees import Tree


@dataclass(frozen=True)
class LeastSquares:
    """L(w) = Σ_k ½⟨w_k, w_k G_k⟩ − ⟨b_k, w_k⟩ + ½ Σ_j α_j ‖w_kj‖², one linear model w_k for each fold k.

    The batch is (G, b) with the sums G_k = XᵀSX and b_k = yᵀSX over the rows of fold k, weighted by S: G has the shape
    folds × features × features (or is a `GramOfRows`), b and w have the shape folds × outputs × features. Sums about
    the mean of the rows stand for a model with an intercept.

    Args:
        penalty: α as a function of λ, one number for every feature. A symmetric matrix of features × features stands
            for the penalty ½⟨w_k, w_k α⟩.

    >>> gram, moments = torch.eye(2)[None], torch.ones(1, 1, 2)
    >>> float(LeastSquares()(torch.ones(1, 1, 2), torch.zeros(2), (gram, moments)))
    0.0
    """

    intercept: ClassVar[bool] = False

    penalty: Callable[[Tree], Tensor] = torch.exp

    def __call__(self, w: Tensor, lam: Tree, batch: tuple[Any, Tensor]) -> Tensor:
        return 0.5 * (w * (self._slope(w, self.penalty(lam), batch) - batch[1])).sum()

    def check(self, batch: tuple[Any, Tensor]) -> None:
        """Refuse a G that is not symmetric: then `slope` is not the derivative of L."""
        if isinstance(batch[0], Tensor):
            refuse_asymmetric(batch[0], "The matrix G of a LeastSquares")

    def code(self) -> tuple[Any, ...] | None:
        return code_of(self, self.penalty)

    def slope(self, w: Tensor, lam: Tree, batch: tuple[Any, Tensor]) -> Tensor:
        """∇L(w), for symmetric matrices. Its derivatives in them are symmetric too."""
        gram, moments = batch
        alpha = self.penalty(lam)
        return self._slope(w, _symmetrised(alpha) if alpha.ndim == 2 else alpha, (_symmetrised(gram), moments))

    def _slope(self, w: Tensor, alpha: Tensor, batch: tuple[Any, Tensor]) -> Tensor:
        gram, moments = batch
        image = gram.times(w) if isinstance(gram, GramOfRows) else w @ gram
        return image - moments + (alpha * w if alpha.ndim == 1 else w @ alpha)


def _symmetrised(matrix: Any) -> Any:
    """The symmetric part, where derivatives will be taken; elsewhere a symmetric matrix is its own."""
    return 0.5 * (matrix + matrix.mT) if isinstance(matrix, Tensor) and matrix.requires_grad else matrix
