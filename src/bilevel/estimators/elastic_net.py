"""The elastic net with as many penalties as features."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import RegressorMixin

from bilevel.algorithms.lbfgsb import LBFGSB
from bilevel.constraints.box import Box
from bilevel.distributed import current_world
from bilevel.errors import BilevelError
from bilevel.estimators.base import ScoringMixin
from bilevel.estimators.folds import Array, Folds
from bilevel.estimators.hyperparameters import Grouping
from bilevel.estimators.regressor_base import BilevelRegressor
from bilevel.estimators.scaling import centred, curvatures
from bilevel.estimators.search import PenaltySearch, SearchRecord
from bilevel.estimators.sums_of_table import SumsOfTable
from bilevel.estimators.tables import FoldedTable
from bilevel.outer_loop import solve
from bilevel.thread_pool import map_in_threads, thread_count

# The ratios that are tried first, and the bound on |log ρ/(1 − ρ)|: ρ from 0.001 to 0.999.
RATIOS, MAX_LOGIT = (0.1, 0.5, 0.9), 6.9


@dataclass(eq=False, repr=False)
class BilevelElasticNet(ScoringMixin, RegressorMixin, BilevelRegressor):
    """The elastic net, and with `l1_ratio=1` the lasso, whose penalties are tuned by hypergradients.

    min over w of (1/2N) Σ_i s_i (y_i − x_i w − b)² + Σ_j α_j (ρ |w_j| + ½(1 − ρ) w_j²), with N = Σ s_i and
    ρ = `l1_ratio`: the objective of scikit-learn's `ElasticNet` where all α_j are equal. The inner problem is solved on
    its active set, and the penalties are tuned for the squared error on held-out rows.

    {arguments}
        l1_ratio: ρ, between 0 (ridge) and 1 (lasso). From a list, the ratio with the least criterion at one shared
            penalty is chosen. "tuned" tunes ρ together with one shared penalty, by hypergradients. Penalties of
            features are then tuned from there, with this ρ.
        positive: whether to constrain the coefficients to be ≥ 0.

    {attributes}
        l1_ratio_: the ρ that was used.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(60, 30))
    >>> y = X[:, 0] - X[:, 1] + 0.1 * rng.normal(size=60)
    >>> model = BilevelElasticNet(l1_ratio=0.9).fit(X, y)
    >>> sorted(np.argsort(-np.abs(model.coef_))[:2].tolist())
    [0, 1]
    """

    # The two parts of the penalty scale differently with the unit of a feature.
    _rescales_features = False

    _: KW_ONLY
    l1_ratio: Any = 0.5
    positive: bool = False

    def _check_settings(self) -> None:
        super()._check_settings()
        try:
            ratios = np.atleast_1d(np.asarray(0.5 if self._tunes_ratio() else self.l1_ratio, dtype=float))
        except (TypeError, ValueError):
            ratios = np.array([])
        if ratios.ndim != 1 or not len(ratios) or not ((ratios >= 0) & (ratios <= 1)).all():
            raise BilevelError(
                f"l1_ratio={self.l1_ratio!r} is not a ratio. Pass a number from 0 (ridge) to 1 (lasso), a list of "
                "them, or 'tuned'."
            )
        self.l1_ratio_ = float(ratios[0])

    def _table(self, X: Any, y: Array, folds: Folds, groups: Grouping) -> FoldedTable:
        def table(ratio: float | str) -> SumsOfTable:
            return SumsOfTable(X, y, folds, groups, bool(self.fit_intercept), ratio, bool(self.positive))

        def tune_shared(ratio: float) -> tuple[float, float, float]:
            # Dense rows are centred already.
            variance = centred(X, folds.weight, sparse.issparse(X) and bool(self.fit_intercept))[2]
            box = _penalty_range(X, y, folds.weight, variance, ratio)
            search = PenaltySearch(table(ratio), folds, 1, box, int(self.max_iter), 1e-4)
            lam, value, _ = search.shared(SearchRecord())
            return value, ratio, float(lam[0])

        tuned = self._tunes_ratio()
        ratios = RATIOS if tuned else np.unique(np.asarray(self.l1_ratio, dtype=float)).tolist()
        if len(ratios) == 1:
            self.l1_ratio_ = ratios[0]
        else:
            # Several processes share the folds of one ratio after the other.
            threads = thread_count(self.n_jobs) if current_world().size == 1 else 1
            results = map_in_threads(tune_shared, ratios, threads)
            _, self.l1_ratio_, log_penalty = min(results, key=lambda result: result[0])
            if tuned:
                self.l1_ratio_ = self._tuned_ratio(table("tuned"), folds, self.l1_ratio_, log_penalty)
        return table(self.l1_ratio_)

    def _tunes_ratio(self) -> bool:
        return isinstance(self.l1_ratio, str) and self.l1_ratio == "tuned"

    def _tuned_ratio(self, table: SumsOfTable, folds: Folds, ratio: float, log_penalty: float) -> float:
        """The ρ that minimises the criterion over ρ and one shared penalty, from a starting point."""
        task = table.task(folds)
        solution = solve(
            table.problem,
            torch.tensor([log_penalty, math.log(ratio / (1 - ratio))], dtype=torch.float64),
            task,
            method=table.method(0.0),
            algorithm=LBFGSB(max_iter=int(self.max_iter), tol=float(self.tol)),
            constraint=Box(torch.tensor([log_penalty - 8.0, -MAX_LOGIT]), torch.tensor([log_penalty + 8.0, MAX_LOGIT])),
            iterations=10**9,
            start=table.start(task),
            progress=False,
            dynamics=table.dynamics(task),
            steps=0,
        )
        # ρ is rounded to four decimals, so that rounding errors of the search do not change the result.
        return round(float(torch.sigmoid(solution.outer[1])), 4)

    def _box(self, X: Any, y: Array, weight: Array, variance: Array) -> tuple[float, float]:
        return _penalty_range(X, y, weight, variance, self.l1_ratio_)


def _penalty_range(X: Any, y: Array, weight: Array, variance: Array, ratio: float) -> tuple[float, float]:
    """The range of the log penalty, from one without effect to one at which all coefficients are zero.

    The penalty of |w| is relative to the smallest one at which all coefficients are zero, that of w² to the variances
    of the features. In a large unit of y the first is large and the second is not, so a penalty without effect must be
    small for both.
    """
    slope = float(np.abs(X.T @ (weight[:, None] / weight.sum() * y)).max()) or 1.0
    smallest, largest = curvatures(variance)
    ends = [(1e-5 * slope / ratio, 1e2 * slope / ratio)] if ratio > 0 else []
    if ratio < 1:
        ends.append((4e-6 * smallest / (1 - ratio), 1e6 * largest / (1 - ratio)))
    return math.log(min(low for low, _ in ends)), math.log(min(high for _, high in ends))


@dataclass(eq=False, repr=False)
class BilevelLasso(BilevelElasticNet):
    """The lasso whose penalties are tuned by hypergradients: `BilevelElasticNet` with `l1_ratio=1`.

    min over w of (1/2N) Σ_i s_i (y_i − x_i w − b)² + Σ_j α_j |w_j|, with N = Σ s_i: the objective of scikit-learn's
    `Lasso` where all α_j are equal.

    {arguments}
        positive: whether to constrain the coefficients to be ≥ 0.

    {attributes}

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(60, 30))
    >>> y = X[:, 0] - X[:, 1] + 0.1 * rng.normal(size=60)
    >>> model = BilevelLasso("shared").fit(X, y)
    >>> sorted(np.argsort(-np.abs(model.coef_))[:2].tolist()), bool((model.coef_ == 0).any())
    ([0, 1], True)
    """

    l1_ratio: Any = field(default=1.0, init=False)
