"""Errors of predictions, whether the difference between two models is significant, and shares of the variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import roc_auc_score

from bilevel.tabular.values import Floats

MIN_PROBABILITY = 1e-15  # smaller probabilities are raised to this, so that the log loss is finite
NUMBERS = {"r2": "R²", "rmse": "RMSE"}
CLASSES = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "auc": "AUC", "log_loss": "log loss"}


def measures(classes: Sequence[str]) -> dict[str, str]:
    """The measures and their names. Models are compared by the last one, of which less is better."""
    return CLASSES if len(classes) else NUMBERS


def row_losses(y: NDArray[Any], predicted: Floats, classes: Sequence[str] = ()) -> Floats:
    """Each row's squared error, or its −log p(true class)."""
    if not len(classes):
        return (y - predicted) ** 2
    codes = np.searchsorted(classes, y)
    return -np.log(np.clip(predicted[np.arange(len(y)), codes], MIN_PROBABILITY, None))


def table_score(
    y: NDArray[Any], predicted: Floats, weights: Floats | None = None, classes: Sequence[str] = ()
) -> dict[str, float]:
    """The measures of predicted numbers, or of probabilities of shape rows × classes.

    A measure that is not defined is NaN, for example R² if all y are equal. The AUC of several classes is the mean of
    one class against the rest.

    >>> table_score(np.array([1.0, 3.0]), np.array([1.0, 2.0]))["r2"]
    0.5
    >>> scores = table_score(np.array(["a", "b"]), np.array([[0.6, 0.4], [0.5, 0.5]]), classes=["a", "b"])
    >>> {name: round(score, 4) for name, score in scores.items()}
    {'accuracy': 0.5, 'balanced_accuracy': 0.5, 'auc': 1.0, 'log_loss': 0.602}
    """
    weights = np.ones(len(y)) if weights is None else weights
    loss = float(np.average(row_losses(y, predicted, classes), weights=weights))
    if not len(classes):
        variance = np.average((y - np.average(y, weights=weights)) ** 2, weights=weights)
        return {"r2": float(1 - loss / variance) if variance > 0 else float("nan"), "rmse": loss**0.5}
    codes, chosen = np.searchsorted(classes, y), predicted.argmax(1)
    present, auc = np.unique(codes[weights > 0]), float("nan")
    if len(present) == len(classes):
        scores = predicted[:, 1] if len(classes) == 2 else predicted / predicted.sum(1, keepdims=True)
        auc = float(roc_auc_score(codes, scores, multi_class="ovr", sample_weight=weights))
    return {
        "accuracy": float(np.average(chosen == codes, weights=weights)),
        "balanced_accuracy": float(
            np.mean([np.average((chosen == k)[codes == k], weights=weights[codes == k]) for k in present])
        ),
        "auc": auc,
        "log_loss": loss,
    }


@dataclass(frozen=True)
class PairedTest:
    """The result of a test of two models on the same folds.

    Args:
        difference: the mean over folds of the first model's loss minus the second's.
        error: the standard error of the difference.
        p: the two-sided probability of a difference at least as large if the models were equally good.
    """

    difference: float
    error: float
    p: float


def corrected_test(first: Floats, second: Floats, ratio: float) -> PairedTest:
    """Nadeau and Bengio's corrected resampled t-test of the folds' losses.

    t = mean(d) / √((1/J + ratio) var(d)) with J − 1 degrees of freedom, where d are the differences on J folds and
    `ratio` is test rows over training rows. The training sets overlap. With 1/J alone, as usual, random
    differences would be called significant (Machine Learning 52, 2003).

    >>> test = corrected_test(np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.0, 3.0]), 0.5)
    >>> round(test.difference, 3), round(test.error, 4), round(test.p, 3)
    (1.0, 0.9129, 0.388)
    """
    d = first - second
    count, mean = len(d), float(d.mean())
    error = float(np.sqrt((1 / count + ratio) * d.var(ddof=1))) if count > 1 else float("inf")
    if mean == 0 or not np.isfinite(error):
        return PairedTest(mean, error, 1.0)
    return PairedTest(mean, error, float(2 * stats.t.sf(abs(mean) / error, count - 1)) if error > 0 else 0.0)


def explained_shares(contributions: Floats, y: Floats, predicted: Floats, weights: Floats | None = None) -> Floats:
    """The parts of R² = Σ s ŷ(2ỹ − ŷ) / Σ s ỹ², with ŷ = Σ_g c_g: part g is Σ s c_g (2ỹ − ŷ) / Σ s ỹ².

    ỹ and ŷ are y and the prediction minus the intercept, so the parts sum to 1 − Σ s (y − prediction)² / Σ s ỹ². A part
    is negative if its group makes predictions worse.

    >>> c = np.array([[1.0, 0.0], [-1.0, 0.0]])
    >>> explained_shares(c, np.array([3.0, 1.0]), np.array([3.0, 1.0])).tolist()
    [1.0, 0.0]
    """
    weights = np.ones(len(y)) if weights is None else weights
    total = contributions.sum(1)
    centred = y - (predicted - total)
    scale = float(weights @ centred**2)
    return (weights * (2 * centred - total)) @ contributions / scale if scale > 0 else np.zeros(contributions.shape[1])


def score_shares(contributions: Floats) -> Floats:
    """For classes: the share in the variance of the linear score η = Σ_g c_g, Σ cov(c_g, η) / Σ var(η) over outputs.

    >>> score_shares(np.array([[[1.0, 0.0]], [[-1.0, 0.0]]])).tolist()
    [1.0, 0.0]
    """
    centred = contributions - contributions.mean(0)
    total = centred.sum(2)
    scale = float((total**2).sum())
    return np.einsum("ikg,ik->g", centred, total) / scale if scale > 0 else np.zeros(contributions.shape[2])
