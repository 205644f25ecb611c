"""Losses of a linear model's scores, with the derivatives that methods for linear models need.

Scores have the shape folds × outputs × rows, targets outputs × rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class RowLoss(ABC):
    """A convex function of the scores of one row.

    Attributes:
        steepest: an upper bound on its curvature; where there is none, the curvature for targets of mean 1.
        only_differences: adding one number to all scores of a row with several outputs changes nothing.
    """

    steepest: ClassVar[float]
    only_differences: ClassVar[bool] = False

    @abstractmethod
    def values(self, scores: Tensor, y: Tensor) -> Tensor:
        """The loss of every row, of shape folds × rows."""

    @abstractmethod
    def slopes(self, scores: Tensor, y: Tensor) -> Tensor:
        """The derivatives in the scores."""

    @abstractmethod
    def hessian_times(self, scores: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The second derivative in the scores, times v, which has the shape of the scores."""


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
    """−log p(y | scores): logistic for one output with y in {0, 1}, softmax for several with y an indicator."""

    steepest: ClassVar[float] = 0.25
    only_differences: ClassVar[bool] = True

    def values(self, scores: Tensor, y: Tensor) -> Tensor:
        if y.shape[-2] > 1:
            return scores.logsumexp(-2) - (y * scores).sum(-2)
        return -logsigmoid((2 * y - 1) * scores).squeeze(-2)

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


def _probabilities(scores: Tensor) -> Tensor:
    """The probability of every class, or of the second of two."""
    return scores.softmax(-2) if scores.shape[-2] > 1 else torch.sigmoid(scores)
