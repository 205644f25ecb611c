"""Losses of scores: what a linear model's criterion needs to know of them, in numpy, and in torch for the engine.

Scores have the shape (rows, folds, outputs) and targets (rows, 1, outputs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from scipy.special import expit, log_expit, log_softmax, softmax
from torch import Tensor
from torch.nn.functional import logsigmoid

from bilevel.estimators.folds import Array


class Loss(ABC):
    """A convex function of a row's scores.

    Attributes:
        steepest: a bound on its curvature.
        only_differences: adding a number to all of several scores changes nothing.
    """

    steepest: float
    only_differences = False

    @abstractmethod
    def values(self, scores: Array, y: Array) -> Array:
        """One number for every row and fold."""

    @abstractmethod
    def slopes(self, scores: Array, y: Array) -> Array:
        """Derivatives in the scores."""

    @abstractmethod
    def curvatures(self, scores: Array) -> Array:
        """What `bend` needs to know of the scores."""

    @abstractmethod
    def bend(self, curvatures: Array, v: Array) -> Array:
        """The second derivative in the scores times v."""

    @abstractmethod
    def in_torch(self, scores: Tensor, y: Tensor) -> Tensor:
        """The same as `values` for scores (folds, rows, outputs) and targets (rows, outputs)."""


class SquaredError(Loss):
    """½ ‖score − y‖²."""

    steepest = 1.0

    def values(self, scores: Array, y: Array) -> Array:
        return 0.5 * ((scores - y) ** 2).sum(-1)

    def slopes(self, scores: Array, y: Array) -> Array:
        return scores - y

    def curvatures(self, scores: Array) -> Array:
        return scores

    def bend(self, curvatures: Array, v: Array) -> Array:
        return v

    def in_torch(self, scores: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((scores - y) ** 2).sum(-1)


class LogLoss(Loss):
    """−log p(y | scores): logistic for one output with y in {0, 1}, softmax for several with y an indicator."""

    steepest = 0.25
    only_differences = True

    def values(self, scores: Array, y: Array) -> Array:
        if scores.shape[-1] > 1:
            return -(y * log_softmax(scores, axis=-1)).sum(-1)
        return -log_expit((2 * y - 1) * scores)[..., 0]

    def slopes(self, scores: Array, y: Array) -> Array:
        return probabilities(scores) - y

    def curvatures(self, scores: Array) -> Array:
        return probabilities(scores)

    def bend(self, curvatures: Array, v: Array) -> Array:
        p = curvatures
        return p * (v - (p * v).sum(-1, keepdims=True)) if p.shape[-1] > 1 else p * (1 - p) * v

    def in_torch(self, scores: Tensor, y: Tensor) -> Tensor:
        if y.shape[-1] > 1:
            return -(y * scores.log_softmax(-1)).sum(-1)
        return -logsigmoid((2 * y - 1) * scores).sum(-1)


def probabilities(scores: Array) -> Array:
    """Of every class, or of the second of two."""
    return softmax(scores, axis=-1) if scores.shape[-1] > 1 else expit(scores)
