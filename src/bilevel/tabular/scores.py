"""How good predictions are, and whether a difference means anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.tabular.values import Floats

SURE = 0.975  # of Student's t: the 95 % interval of the mean difference
TINY = 1e-15  # a probability below it counts as it: scikit-learn clips at the resolution of the type too


@dataclass(frozen=True)
class Score:
    """Errors on one set of rows.

    Args:
        main: the root mean squared error, or the log loss: what is compared; smaller is better.
        share: R² = 1 − Σ(y − ŷ)² / Σ(y − ȳ)², or the accuracy; larger is better. NaN where R² has no meaning.
        losses: each row's squared error, or its −log p(true class).
        weights: of the rows.
    """

    main: float
    share: float
    losses: Floats
    weights: Floats


def regression_score(y: Floats, predicted: Floats, weights: Floats) -> Score:
    """
    >>> score = regression_score(np.array([1.0, 3.0]), np.array([1.0, 2.0]), np.ones(2))
    >>> round(score.main, 4), score.share
    (0.7071, 0.5)
    """
    losses = (y - predicted) ** 2
    mean = np.average(losses, weights=weights)
    spread = np.average((y - np.average(y, weights=weights)) ** 2, weights=weights)
    return Score(float(mean**0.5), float(1 - mean / spread) if spread > 0 else float("nan"), losses, weights)


def class_score(y: NDArray[Any], probabilities: Floats, weights: Floats) -> Score:
    """
    >>> score = class_score(np.array([0, 1]), np.array([[0.5, 0.5], [0.5, 0.5]]), np.ones(2))
    >>> round(score.main, 4), score.share
    (0.6931, 0.5)
    """
    losses = -np.log(np.clip(probabilities[np.arange(len(y)), y], TINY, None))
    right = probabilities.argmax(1) == y
    return Score(float(np.average(losses, weights=weights)), float(np.average(right, weights=weights)), losses, weights)


def verdict(ours: Score, theirs: Score, rival: str, measure: str, alike: bool) -> str:
    """One honest sentence: whether tuning was worth it on the test rows, and how sure that is.

    `alike` says that all penalties are equal already. Where the 95 % interval of the mean difference of the losses
    holds zero, the difference is called none.
    """
    from scipy import stats

    share = ours.weights / ours.weights.sum()
    differences = theirs.losses - ours.losses
    gain = float(share @ differences)
    rows = len(differences)
    error = float(np.sqrt(share**2 @ (differences - gain) ** 2 * rows / max(rows - 1, 1)))
    relative = (theirs.main - ours.main) / theirs.main if theirs.main else 0.0
    told = f"{measure} {ours.main:.4g} against {theirs.main:.4g} of {rival}"
    if abs(relative) >= 5e-4:
        told += f", {abs(relative):.1%} {'less' if relative > 0 else 'more'}"
    if error > 0:
        told += f" (the gap is {abs(gain) / error:.1f} standard errors)"
    if abs(gain) <= stats.t.ppf(SURE, max(rows - 1, 1)) * error or gain == 0:
        return f"No difference that {rows:,} test rows could show: {told}."
    if gain > 0:
        return f"Better than {rival}: {told}."
    return f"Worse than {rival}: {told}." + (
        "" if alike else " One shared penalty may serve this table better: --penalty shared."
    )
