"""Linear models with a smooth convex loss on weighted rows, for many folds at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.structures.penalties import code_of
from bilevel.structures.rows import feature_sums, row_scores
from bilevel.trees import Tree

# X (rows × features, a tensor or a scipy sparse matrix), y (outputs × rows) and the weights (folds × rows).
RowBatch = tuple[Any, Tensor, Tensor]


@dataclass(frozen=True)
class LinearModels:
    """L(w) = Σ_k Σ_i s_ki ω_i loss(x_i w_k, y_i) + ½ Σ_j α_j ‖w_kj‖², one linear model w_k for each fold k.

    The batch is (X, y, s): features, targets of shape outputs × rows, and the weight of every row in every fold, 0 for
    rows that a fold holds out. w has the shape folds × outputs × features.

    Args:
        loss: `SquaredError()`, `LogLoss()` for logistic and multinomial regression, or `PoissonDeviance()` and
            `GammaDeviance()` for regression with a log link.
        penalty: α as a function of λ, one number for every feature or one for all of them.
        intercept: w has one more column, an intercept, which is not penalised. If only differences of scores matter,
            half the squared sum of the intercepts is added to L, so that the minimiser is unique.
        weight: ω as a function of λ, one number ≥ 0 for every row: data cleaning, with a weight per example. None for
            ω = 1.

    >>> batch = torch.ones(3, 2), torch.ones(1, 3), torch.ones(1, 3)
    >>> float(LinearModels()(torch.ones(1, 1, 2), torch.zeros(2), batch))  # 3·½(2 − 1)² + ½(1 + 1)
    2.5
    """

    loss: RowLoss = field(default_factory=SquaredError)
    penalty: Callable[[Tree], Tensor] = torch.exp
    intercept: bool = False
    weight: Callable[[Tree], Tensor] | None = None

    def __call__(self, w: Tensor, lam: Tree, batch: RowBatch) -> Tensor:
        self.check(batch)
        X, y, share = batch
        fit = (self.weights(lam, share) * self.loss.values(self.scores(w, X), y)).sum()
        return fit + 0.5 * (w * self.penalty_slope(w, lam)).sum()

    def check(self, batch: RowBatch) -> None:
        """Refuse targets that the loss is not meant for."""
        self.loss.check(batch[1])

    def code(self) -> tuple[Any, ...] | None:
        functions = [self.penalty] if self.weight is None else [self.penalty, self.weight]
        return code_of(self, *functions, loss=self.loss, intercept=self.intercept)

    def slope(self, w: Tensor, lam: Tree, batch: RowBatch) -> Tensor:
        """∇L(w)."""
        X, y, share = batch
        pulls = self.weights(lam, share)[:, None] * self.loss.slopes(self.scores(w, X), y)
        return self.transposed(pulls, X) + self.penalty_slope(w, lam)

    def weights(self, lam: Tree, share: Tensor) -> Tensor:
        """The factor of every row's loss in every fold, s_ki ω_i."""
        return share if self.weight is None else share * self.weight(lam)

    def penalty_slope(self, w: Tensor, lam: Tree) -> Tensor:
        """The derivative of the penalties alone."""
        return self.pulled(w, self.penalties(lam, w.shape[-1]))

    def pulled(self, w: Tensor, alpha: Tensor) -> Tensor:
        """The derivative of the penalties: α w, and for the intercepts their sum, if L penalises it."""
        slope = alpha * w
        if not self.gauge(w):
            return slope
        sums = w[..., -1:].sum(1, keepdim=True).expand(-1, w.shape[1], 1)
        return torch.cat([slope[..., :-1], sums], -1)

    def gauge(self, w: Tensor) -> bool:
        """Whether L penalises the sum of the intercepts, which makes it zero at the minimiser."""
        return self.intercept and self.loss.only_differences and w.shape[1] > 1

    def penalties(self, lam: Tree, columns: int) -> Tensor:
        """α for every column of w; zero for an intercept."""
        alpha = self.feature_penalties(lam, columns - self.intercept)
        return torch.cat([alpha, alpha.new_zeros(1)]) if self.intercept else alpha

    def feature_penalties(self, lam: Tree, features: int) -> Tensor:
        """α for every feature."""
        alpha = self.penalty(lam)
        return alpha if alpha.shape == (features,) else alpha.expand(features)

    def scores(self, w: Tensor, X: Any) -> Tensor:
        """x_i w_k of shape folds × outputs × rows, intercepts added."""
        return row_scores(w[..., :-1], X) + w[..., -1:] if self.intercept else row_scores(w, X)

    def transposed(self, v: Tensor, X: Any) -> Tensor:
        """The transpose of `scores`: from folds × outputs × rows to the shape of w."""
        image = feature_sums(v, X)
        return torch.cat([image, v.sum(-1, keepdim=True)], -1) if self.intercept else image
