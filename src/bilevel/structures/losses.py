"""Losses of a linear model's scores, with the derivatives that methods for linear models need.

Scores have the shape folds × outputs × rows, targets outputs × rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bilevel.errors import BilevelError
from bilevel.structures.data_checks import remembered


@dataclass(frozen=True)
class RowLoss(ABC):
    """A convex function of the scores of one row.

    Attributes:
        steepest: an upper bound on its second derivative in one score; where there is none, the second derivative for
            targets of mean 1.
        only_differences: adding one number to all scores of a row with several outputs changes nothing.
    """

    steepest: ClassVar[float]
    only_differences: ClassVar[bool] = False

    def check(self, y: Tensor) -> None:  # noqa: B027 - most losses take all finite targets
        """Refuse targets that this loss is not meant for. A tensor is read once, so calls in a loop are cheap."""

    @abstractmethod
    def values(self, scores: Tensor, y: Tensor) -> Tensor:
        """The loss of every row, of shape folds × rows."""

    @abstractmethod
    def slopes(self, scores: Tensor, y: Tensor) -> Tensor:
        """The derivatives in the scores."""

    @abstractmethod
    def hessian_times(self, scores: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The second derivative in the scores, times v, which has the shape of the scores."""

    def hessian_column(self, scores: Tensor, y: Tensor, output: int) -> Tensor:
        """The column of the second derivative that belongs to an output, in the shape of the scores."""
        unit = scores.new_zeros(scores.shape[-2], 1)
        unit[output] = 1
        return self.hessian_times(scores, y, unit.expand_as(scores))

    def hessians(self, scores: Tensor, y: Tensor) -> Tensor:
        """The second derivative for every row of the first fold, of shape rows × outputs × outputs."""
        columns = [self.hessian_column(scores, y, output)[0] for output in range(scores.shape[-2])]
        return torch.stack(columns).permute(2, 0, 1)


@dataclass(frozen=True)
class SquaredError(RowLoss):
    """½ ‖score − y‖²."""

    steepest: ClassVar[float] = 1.0

    def values(self, scores: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (scores - y).square().sum(-2)

    def slopes(self, scores: Tensor, y: Tensor) -> Tensor:
        return scores - y

    def hessian_times(self, scores: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return v


@dataclass(frozen=True)
class LogLoss(RowLoss):
    """−log p(y | scores): logistic for one output with y in {0, 1}, softmax for several with y an indicator.

    Targets between 0 and 1 are probabilities of classes; the loss is then the cross-entropy.
    """

    steepest: ClassVar[float] = 0.25
    only_differences: ClassVar[bool] = True

    def check(self, y: Tensor) -> None:
        # Compiled code cannot depend on numbers; the code that it is compiled from has been checked.
        if torch.compiler.is_compiling() or remembered(_are_probabilities, y):
            return
        wanted = "from 0 to 1, with the sum 1 in every row" if _has_several(y) else "from 0 to 1"
        raise BilevelError(
            f"LogLoss takes targets y {wanted}, and some are not. Write two classes as 0 and 1, not as −1 and 1, and "
            "more classes as indicators (one-hot)."
        )

    def values(self, scores: Tensor, y: Tensor) -> Tensor:
        if scores.shape[-2] > 1:
            return scores.logsumexp(-2) - (y * scores).sum(-2)
        return (softplus(scores) - y * scores).squeeze(-2)

    def slopes(self, scores: Tensor, y: Tensor) -> Tensor:
        return _probabilities(scores) - y

    def hessian_times(self, scores: Tensor, y: Tensor, v: Tensor) -> Tensor:
        p = _probabilities(scores)
        return p * (v - (p * v).sum(-2, keepdim=True)) if p.shape[-2] > 1 else p * (1 - p) * v


@dataclass(frozen=True)
class PoissonDeviance(RowLoss):
    """e^score − y·score + y log y − y, half the deviance of counts y ≥ 0 with the mean e^score."""

    steepest: ClassVar[float] = 1.0

    def values(self, scores: Tensor, y: Tensor) -> Tensor:
        return (_mean(scores) - y * scores + torch.xlogy(y, y) - y).sum(-2)

    def slopes(self, scores: Tensor, y: Tensor) -> Tensor:
        return _mean(scores) - y

    def hessian_times(self, scores: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return _mean(scores) * v


@dataclass(frozen=True)
class GammaDeviance(RowLoss):
    """y·e^−score + score − log y − 1, half the deviance of y > 0 with the mean e^score."""

    steepest: ClassVar[float] = 1.0

    def values(self, scores: Tensor, y: Tensor) -> Tensor:
        return (y * _mean(-scores) + scores - y.log() - 1).sum(-2)

    def slopes(self, scores: Tensor, y: Tensor) -> Tensor:
        return 1 - y * _mean(-scores)

    def hessian_times(self, scores: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return y * _mean(-scores) * v


def _mean(scores: Tensor) -> Tensor:
    """e^score, bounded: a trial step may give huge scores, and a row of weight zero must not give 0 · ∞."""
    return scores.clamp(max=300.0).exp()


def _has_several(y: Tensor) -> bool:
    """Whether the targets are those of several outputs."""
    return y.ndim > 1 and y.shape[-2] > 1


def _are_probabilities(y: Tensor) -> bool:
    """Whether the entries are from 0 to 1 and, if there are several outputs, add up to 1 in every row."""
    with torch.no_grad():
        fine = ((y >= 0) & (y <= 1)).all()
        if _has_several(y):
            fine = fine & ((y.sum(-2) - 1).abs() <= 1e-3).all()
    try:
        return bool(fine)
    except RuntimeError:  # under torch.vmap, where numbers cannot be read
        return True


def _probabilities(scores: Tensor) -> Tensor:
    """The probability of every class, or of the second of two."""
    return scores.softmax(-2) if scores.shape[-2] > 1 else torch.sigmoid(scores)
