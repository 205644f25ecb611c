"""What the estimators share: parameters, the search for the penalties, and what is known afterwards."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.metrics import check_scoring
from sklearn.utils import check_consistent_length
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor
from typing_extensions import Self

from bilevel.certificate import Certificate, certify
from bilevel.distributed import world
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.errors import BilevelError
from bilevel.estimators.folds import Array, Folds, split
from bilevel.estimators.hyperparameters import Grouping, grouping, is_shared
from bilevel.estimators.scaling import centred, divided, units
from bilevel.estimators.search import TETHERS, UNCHOSEN, PenaltySearch, SearchRecord, choose_tether
from bilevel.estimators.tables import FoldedTable, HeldOutScores
from bilevel.estimators.tensors import as_numpy, like
from bilevel.progress import bar, heartbeat
from bilevel.thread_pool import threads

# The accuracy at which w is left to the certificate.
CERTIFIED = 1e-10
# Bytes of a table up to which it waits for the certificate and the deviations, until one of them is asked for: on small
# tables they take longer than the fit.
KEPT = 3e7

ARGUMENTS = """Args:
        penalty: "shared" for one penalty, "per-feature" for one per feature, or an array with the group of every
            feature for one per group.
        cv: the criterion: a number of folds, the fraction of rows to hold out, a scikit-learn splitter, or an iterable
            of (train, test) indices. None means the leave-one-out error for a ridge, in closed form, and 5 folds
            otherwise. Folds are dealt out evenly over the range of y, whatever the order of the rows.
        tether: what keeps penalties that are tuned on few rows from following chance: their distance from each other,
            times this strength, is added to the criterion (relative to its value, per row). 0 lets them go, inf makes
            them equal. "auto" chooses the strength with the least criterion once each row is left out of the tuning
            as well, in closed form: nothing is drawn at random for it.
        fit_intercept: whether to add an intercept, which is not penalised.
        max_iter: the most iterations of L-BFGS over the penalties.
        tol: stop when an iteration improves the criterion by less than this, relatively.
        warm_start: begin at the penalties of the last fit, and keep its tether, if features are grouped as they were.
        random_state: of the shuffle before rows are dealt into folds.
        scoring: a scorer of scikit-learn or its name, such as "roc_auc", "balanced_accuracy" or "r2": what `score`
            returns and `cv_score_` holds. It does not tune the penalties: what is tuned needs a derivative, which a
            count or a ranking of rows lacks.
        n_jobs: threads of the linear algebra, and of ratios or targets that are tuned beside each other; -1 for all
            processors, None for as many as torch has. Folds are solved together, as one batch, in any case.
        verbose: None writes a line to standard error about a fit of more than two seconds, at intervals, also in a
            pipe; True shows a progress bar, False nothing.
"""

ATTRIBUTES = """Attributes:
        alpha_: the tuned penalty: a number for "shared", an array with one per feature otherwise.
        tether_: the strength that was used.
        coef_: coefficients, trained on all rows with these penalties.
        intercept_: the intercept that belongs to them.
        history_: arrays "value", "gradient_norm" and "seconds", one entry per evaluation of the criterion with its
            hypergradient.
        method_: a sentence that says how hypergradients were computed, and why so.
        outcome_: a sentence that says how the search ended.
        certificate_: how far the folds' weights and the criterion are from those of the exact inner solution. Of a
            small table it is computed when it is first read, or when the estimator is copied or pickled.
        n_iter_: how many evaluations history_ has.
        cv_score_: with `scoring`, the score of the rows that each fold holds out, at the tuned penalties; of all rows,
            each left out singly, in a ridge without folds. The penalties were tuned on these rows, so it flatters.
"""


@dataclass(frozen=True, eq=False)
class TunedModel:
    """Coefficients (features × outputs) and intercepts for the features as given, and scores of held-out rows."""

    coef: Array
    intercept: Array
    held: HeldOutScores


class Scored:
    """`score` by `scoring`, and without it as the next class has it."""

    scoring: Any

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The score of the predictions for X; without `scoring`, R² of numbers and accuracy of classes."""
        if self.scoring is None:
            return float(super().score(X, y, sample_weight=sample_weight))  # type: ignore[misc]
        more = {} if sample_weight is None else {"sample_weight": sample_weight}
        return float(check_scoring(self, scoring=self.scoring)(self, X, y, **more))


class BilevelEstimator(BaseEstimator):
    """A linear model whose penalties are tuned by hypergradients of a hold-out or cross-validation criterion."""

    coef_: Any
    intercept_: Any
    _classes = False
    # Whether a feature in another unit is the same feature with another penalty.
    _units_do_not_matter = True
    # What the penalties of the inner problem are multiplied with, to be those of the estimator's objective.
    _alpha_unit = 1.0

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        # The parameters mean the same for every estimator and are explained once.
        for place, text in (("{arguments}", ARGUMENTS), ("{attributes}", ATTRIBUTES)):
            cls.__doc__ = (cls.__doc__ or "").replace(place, text.strip())

    def __init__(
        self,
        penalty: Any = "per-feature",
        *,
        cv: Any = None,
        tether: Any = "auto",
        fit_intercept: bool = True,
        max_iter: int = 100,
        tol: float = 1e-5,
        warm_start: bool = False,
        random_state: Any = 0,
        scoring: Any = None,
        n_jobs: int | None = None,
        verbose: bool | None = None,
    ) -> None:
        self.penalty = penalty
        self.cv = cv
        self.tether = tether
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.warm_start = warm_start
        self.random_state = random_state
        self.scoring = scoring
        self.n_jobs = n_jobs
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _folds(self, X: Any, y: Array, weight: Array, groups: Grouping, rows: Any) -> Folds:
        """The folds that `cv` means."""
        return split(self.cv, X, y, weight, classes=self._classes, random_state=self.random_state, groups=rows)

    @abstractmethod
    def _table(self, X: Any, y: Array, folds: Folds, groups: Grouping) -> FoldedTable:
        """The bilevel problem of this data; X is scaled already, y has shape (rows, outputs)."""

    def _box(self, X: Any, y: Array, weight: Array, variance: Array) -> tuple[float, float]:
        """The range of λ: from penalties that do not matter to penalties that leave nothing of a feature.

        The curvature of the loss that a feature can have is the scale of both: the smallest of any feature below, where
        an exact fit has errors of about (4e-6)² of y's own (below that, rounding error dominates), and the largest
        above.
        """
        largest = float(variance.max()) or 1.0
        smallest = max(float(variance.min(where=variance > 0, initial=largest)), 1e-8 * largest)
        total = float(weight.sum())
        return math.log(4e-6 * total * smallest), math.log(1e6 * total * largest)

    def _tune(self, X: Any, y: Array, weight: Array, outputs: Array, rows: Any = None) -> TunedModel:
        """Tune the penalties, and train on all rows with them.

        Args:
            y: what the folds are dealt out by.
            outputs: what is fitted, of shape (rows, outputs).
            rows: the group of every row, or None.
        """
        self._check_settings()
        self._settled: dict[str, Any] = {}
        if rows is not None:
            check_consistent_length(X, rows)
            rows = np.asarray(rows)
        with threads(self.n_jobs), self._progress() as advance:
            return self._tuned(X, y, weight, outputs, rows, advance)

    def _tuned(
        self, X: Any, y: Array, weight: Array, outputs: Array, rows: Any, advance: Callable[[int, float], None]
    ) -> TunedModel:
        groups = grouping(self.penalty, X.shape[1])
        shared = is_shared(self.penalty)
        folds = self._folds(X, y, weight, groups, rows)
        # A penalty of a feature or a group means the same in any unit, and is sought in units in which they are alike.
        # A shared one means what it means in scikit-learn: the same number for the features as given.
        X, centre, variance = centred(X, weight, bool(self.fit_intercept))
        own = not shared and self._units_do_not_matter
        scale = units(variance, groups) if own else np.ones(X.shape[1])
        X = divided(X, scale, own=bool(self.fit_intercept))
        table = self._table(X, outputs, folds, groups)
        box = self._box(X, outputs, weight, variance / scale**2)
        search = PenaltySearch(table, folds, groups.count, box, int(self.max_iter), float(self.tol))
        # Processes that torchrun started return what one would.
        with world():
            lam = self._search(search, groups, 2 * np.log(scale), SearchRecord(advance))
        # Four decimals of a logarithm: rounding errors of so many steps must not show in the result.
        lam = lam.mul(1e4).round().div(1e4)
        alpha = table.penalties(lam).numpy() * scale**2 * self._alpha_unit
        self.alpha_ = float(alpha[0]) if shared else alpha
        self.method_ = table.reason
        w = search.evaluate(lam, CERTIFIED).inner
        fit = search
        if folds.count > 1 or not folds.train.all():
            cells = np.ones((1, folds.train.shape[1]), dtype=bool)
            fit = search.on(replace(folds, train=cells, val=cells), search.max_iter, search.tol)
            fit.evaluate(lam)
        coef, intercept = table.coefficients(fit.w, fit.folds)
        self._waiting: dict[str, Callable[[], Any]] = {
            "certificate": lambda: self._certify(search, lam, w),
            "spread": lambda: self._spread(fit, lam, X, outputs - X @ coef - intercept, centre, scale),
        }
        if (table.X.nbytes if isinstance(table.X, Tensor) else table.X.data.nbytes) > KEPT:
            self._settle()
        held = [] if self.scoring is None else table.held_out_scores(w, search.folds, lam)
        given = coef / scale[:, None]
        return TunedModel(given, intercept - centre @ given, held)

    def _spread(self, fit: PenaltySearch, lam: Tensor, X: Any, residual: Array, centre: Array, scale: Array) -> Any:
        """What standard deviations of predictions need.

        Args:
            fit: to all rows, at λ.
            X: the table that was fitted, of which `scale` X + `centre` was given.
        """

    def _settle(self) -> None:
        """Compute what waits, and let go of the data."""
        for name in list(self._waiting):
            self._settled[name] = self._waiting[name]()
            del self._waiting[name]

    def __getstate__(self) -> Any:
        if "_waiting" in self.__dict__:
            self._settle()
        return super().__getstate__()

    @property
    def certificate_(self) -> Certificate:
        if not hasattr(self, "_waiting"):
            raise AttributeError("certificate_ is known after a fit; call fit first.")
        self._settle()
        return self._settled["certificate"]

    def _search(self, search: PenaltySearch, groups: Grouping, log_scale: Array, record: SearchRecord) -> Tensor:
        """λ, found from one penalty for all towards penalties that differ, or from the last fit's penalties."""
        last, level = getattr(self, "_last", (None, 0.0))
        # Penalties of other features or groups say nothing, and neither does the tether that held them.
        again = bool(self.warm_start) and last is not None and np.array_equal(last, groups.of)
        if again:
            # Each group begins at the mean of its features' penalties.
            known = np.log(np.broadcast_to(self.alpha_, log_scale.shape) / self._alpha_unit) - log_scale
            start = torch.from_numpy(groups.mean(known).clip(*search.box))
            search.level = level * search.value(start)
        else:
            start, search.level, self.outcome_ = search.shared(record)
        lam, chosen = start, False
        if is_shared(self.penalty) or groups.count == 1:
            self.tether_ = math.inf
        elif self.tether != "auto":
            self.tether_ = float(self.tether)
        elif not again:
            chosen = search.table.factorises
            if chosen:
                self.tether_, lam = choose_tether(search, start, record)
            else:
                self.tether_ = UNCHOSEN
        if not again and not chosen and math.isfinite(self.tether_):
            stages = tuple(strength for strength in TETHERS[1:] if strength > self.tether_)
            lam = search.path(start, stages, record)[-1] if stages else start
        # The best shared penalty is known already.
        if again or math.isfinite(self.tether_):
            lam, self.outcome_ = search.minimise(lam, self.tether_, record)
        self.history_, self.n_iter_ = record.arrays(), len(record.rows)
        # The tether's unit relative to what was reached: the next y may be in another unit.
        self._last = (groups.of, search.level / max(search.value(lam), 1e-300))
        return lam

    @contextmanager
    def _progress(self) -> Iterator[Callable[[int, float], None]]:
        """A function that is told the number of hypergradients and the criterion."""
        if self.verbose is None:
            with heartbeat() as say:
                say(f"{type(self).__name__}: preparing")
                yield lambda n, value: say(f"{type(self).__name__}: {n} hypergradients, criterion {value:.6g}")
        else:
            with bar("hypergradients", None, "criterion {task.fields[value]}", show=bool(self.verbose)) as advance:
                yield lambda n, value: advance(n, value=f"{value:.6g}")

    def _certify(self, search: PenaltySearch, lam: Tensor, w: Tensor) -> Certificate:
        table, task = search.table, search.task
        smallest, largest = table.curvature(lam, task, w)
        told = {"mu": smallest, "nu": largest, "products": 30, **search.settings}
        if isinstance(told["dynamics"], GradientDescent):
            told["dynamics"] = _no_step
        certificate = certify(table.problem, lam, task, start=w, **told)
        # Nothing of the data stays behind, and the estimator can be pickled.
        return replace(certificate, search=None)

    def _report(self, held: HeldOutScores, X: Any, y: Array, sample_weight: Any) -> None:
        """Set `cv_score_` from the scores of rows by models that did not see them."""
        if self.scoring is None:
            # An earlier fit may have had a scorer.
            self.__dict__.pop("cv_score_", None)
            return
        scorer, found = check_scoring(self, scoring=self.scoring), []
        for rows, scores in held:
            # This estimator, whose predictions for the rows are known.
            fold = object.__new__(type(self))
            fold.__dict__.update(self.__dict__)
            fold._scores = lambda X, scores=scores: scores  # type: ignore[method-assign, misc]
            more = {} if sample_weight is None else {"sample_weight": np.asarray(sample_weight)[rows]}
            found.append(scorer(fold, X[rows], y[rows], **more))
        self.cv_score_ = np.array(found)

    def _check_settings(self) -> None:
        number = isinstance(self.tether, Real) and float(self.tether) >= 0
        if not number and not (isinstance(self.tether, str) and self.tether == "auto"):
            raise BilevelError(
                f"tether={self.tether!r} is not known; pass 'auto' or a number ≥ 0 (inf for one penalty)."
            )
        if not isinstance(self.max_iter, Integral) or self.max_iter < 1:
            raise BilevelError(f"max_iter={self.max_iter!r} is not a number of iterations; pass an int ≥ 1.")
        if not isinstance(self.tol, Real) or not self.tol >= 0:
            raise BilevelError(f"tol={self.tol!r} is not a tolerance; pass a number ≥ 0.")

    def _scores(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, as_numpy(X), accept_sparse="csr", dtype=np.float64, reset=False)
        coef, intercept = as_numpy(self.coef_), as_numpy(self.intercept_)
        return safe_sparse_dot(X, np.asarray(coef).T, dense_output=True) + intercept

    def _weights(self, sample_weight: Any, X: Any) -> Array:
        weight = _check_sample_weight(as_numpy(sample_weight), X, dtype=np.float64, ensure_non_negative=True)
        if not weight.sum() > 0:
            raise BilevelError("All sample weights are zero, so there is nothing to fit; pass a positive one.")
        return weight


class BilevelRegressor(BilevelEstimator):
    """An estimator of numbers, one or several for each row."""

    _several_targets = True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output, tags.target_tags.multi_output = False, self._several_targets
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Tune the penalties, then train on all rows with them; a row of weight 2 counts as two rows.

        Args:
            groups: the group of every row: rows of one group are never on both sides of a fold.
        """
        given, sample_weight, groups = X, as_numpy(sample_weight), as_numpy(groups)
        X, y = validate_data(
            self,
            as_numpy(X),
            as_numpy(y),
            accept_sparse="csr",
            dtype=np.float64,
            y_numeric=True,
            multi_output=self._several_targets,
            ensure_min_samples=2,
        )
        self._fit(X, np.array(y, dtype=np.float64), sample_weight, groups)
        self.coef_, self.intercept_ = like(self.coef_, given), like(self.intercept_, given)
        return self

    def _fit(self, X: Any, y: Array, sample_weight: Any, groups: Any) -> None:
        weight, outputs = self._weights(sample_weight, X), y.reshape(len(y), -1)
        # Squares of y are added up as those of X are: about the mean, where an intercept makes up for it.
        middle = weight @ outputs / weight.sum() * bool(self.fit_intercept)
        tuned = self._tune(X, y, weight, outputs - middle, groups)
        several, intercept = y.ndim == 2, tuned.intercept + middle
        self.coef_ = tuned.coef.T if several else tuned.coef[:, 0]
        self.intercept_ = intercept if several else float(intercept[0])
        held = [(rows, scores + middle if several else scores[:, 0] + middle) for rows, scores in tuned.held]
        self._report(held, X, y, sample_weight)

    def predict(self, X: Any) -> Any:
        return like(self._scores(X), X)


def _no_step(loss: Any, w: Any, state: Any, t: int) -> tuple[Any, Any]:
    """The dynamics of a w that was found by other means: its step size says nothing."""
    return w, state
