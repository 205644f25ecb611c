"""The base class of the additive regressor and classifier: from a table to terms, penalties and coefficients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import is_classifier
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_y, check_consistent_length, check_is_fitted

from bilevel.algorithms.lbfgsb import LBFGSB
from bilevel.errors import BilevelError
from bilevel.estimators.additive.columns import as_trained, position, read_columns
from bilevel.estimators.additive.criteria import PENALTY_UNIT, Criterion, FoldByFold, RowByRow, TunedPenalties
from bilevel.estimators.additive.design import WIDE, Design, Piece, candidates, feature_limit, relevance
from bilevel.estimators.additive.monotone import FINE, POINTS, constrained, increments, lift, signs
from bilevel.estimators.additive.reduction import Reduction
from bilevel.estimators.additive.terms import REACH, NumericTerm, PairTerm
from bilevel.estimators.additive.tuning import KindLevels, grouped, tune_each, tune_kinds
from bilevel.estimators.base import TunedEstimator
from bilevel.estimators.folds import Array, Folds, split
from bilevel.estimators.scaling import centred
from bilevel.estimators.search import SearchRecord
from bilevel.estimators.tables import HeldOutScores
from bilevel.estimators.tensors import as_numpy, on_cpu
from bilevel.methods.linear_models.newton_linear import PenalisedRows
from bilevel.progress import heartbeat
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.losses import RowLoss, SquaredError
from bilevel.thread_pool import threads

# Pairs of this number of terms are tried. They are kept if they multiply the criterion by less than `MAX_RATIO`.
PAIRED_TERMS, MAX_RATIO = 12, 0.995
# The first step of the search over log penalties. It is short because the search starts close to a minimum.
FIRST_STEP = 0.3
# The penalties are tuned on at most this number of rows, and on more if they are needed for this number of rows of
# every class.
TUNING_ROWS, CLASS_ROWS = 2000, 20
# Up to this number of numeric columns, every slope has a penalty, for squared errors. The inverse Hessian is kept, a
# matrix of features × features.
MAX_OWN_SLOPES = 1500
# The strength of the tether is multiplied by this factor if a table is wide, because many of its columns may be noise.
WIDE_TETHER = 0.3

ARGUMENTS = """Args:
        pairs: "auto" for all pairs of the most important columns, kept if they lower the criterion; 0 for none; or a
            list of pairs of column names or positions.
        categorical: "auto" for columns of text, categories or booleans; or names or positions of further columns.
        monotone: a dict from columns to 1 or -1, for effects that may only rise or only fall. These columns are in no
            pair. The penalties are those of the model without the constraint.
        tether: how strongly penalties of one kind (slopes, curves, categories, …) are pulled towards one value, in
            units of a prior density 1/cosh of each log penalty. 0 means no pull, inf gives each kind one penalty. In
            regression on more than 60 numeric columns the pull is 0.3 times as strong.
        cv: how rows are held out for tuning: None for each row in turn, which takes one fit; or a number of folds, the
            fraction of rows to hold out, a scikit-learn splitter, or an iterable of (train, test) indices. Rows that
            are not independent need folds: pass `groups` to `fit`, or `cv=TimeSeriesSplit()`.
        max_iter: the most iterations of L-BFGS over the penalties.
        tol: stop when an iteration improves the criterion by less than this, relatively.
        random_state: the seed of the choice of rows that tune the penalties, for tables of more than 2,000 rows, and of
            the assignment of rows to folds.
        scoring: a scorer of scikit-learn or its name, such as "roc_auc", "balanced_accuracy" or "r2". `score` returns
            it and `cv_score_` holds it. It does not tune the penalties.
        n_jobs: the number of threads for the linear algebra. -1 means all processors, None as many as torch uses.
        verbose: None writes progress lines to standard error if a fit takes more than two seconds. False writes none.
"""

ATTRIBUTES = """Attributes:
        terms_: the name of every term, such as "age" and "age × income".
        penalties_: for every term, the penalty of each of its parts: "linear" (shrinkage of the slope), "curve"
            (roughness), "category", "missing", "product" and "surface" (of a pair).
        importance_: the standard deviation of every term's effect over the training rows.
        intercept_: the prediction if all effects are zero.
        criterion_: the loss of the tuned model on rows that it was not fitted to, per row: leave-one-out, or of the
            folds of `cv`.
        cv_score_: with `scoring`, the score on the held-out rows of each fold, at the tuned penalties. Without folds it
            is one score of all rows, each predicted without it. These scores are optimistic, because the penalties were
            tuned on the same rows.
        history_: arrays "value", "gradient_norm" and "seconds", one entry per evaluation of the criterion with its
            hypergradient.
        method_: how hypergradients were computed.
        outcome_: a sentence that says how the search ended.
"""


@dataclass(eq=False, repr=False)
class BilevelAdditive(TunedEstimator):
    """An additive model whose penalties are tuned by hypergradients of its loss on held-out rows."""

    _: KW_ONLY
    pairs: Any = "auto"
    categorical: Any = "auto"
    monotone: Any = None
    tether: float = 10.0
    cv: Any = None
    max_iter: int = 30
    tol: float = 1e-3
    random_state: Any = 0
    scoring: Any = None
    n_jobs: int | None = None
    verbose: bool | None = None

    _descriptions: ClassVar[dict[str, str]] = {"{arguments}": ARGUMENTS, "{attributes}": ATTRIBUTES}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = tags.input_tags.string = True
        return tags

    def _target(self, y: Any, columns: list[Array]) -> Array:
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        y = _check_y(y, estimator=self)
        check_consistent_length(columns[0], y)
        return y

    def _folds(self, columns: list[Array], y: Array, weight: Array, groups: Any) -> Folds | None:
        """The folds of `cv` and of the rows' groups. None if single rows are left out."""
        if groups is not None:
            check_consistent_length(y, groups)
            groups = np.asarray(as_numpy(groups))
        elif self.cv is None:
            return None
        numeric = [column for column in columns if column.dtype == np.float64]
        table = np.column_stack(numeric) if numeric else np.zeros((len(y), 0))
        classes = is_classifier(self)
        return split(self.cv, table, y, weight, classes=classes, random_state=self.random_state, groups=groups)

    def _tune(
        self,
        names: list[str],
        columns: list[Array],
        outputs: Array,
        weight: Array,
        loss: RowLoss,
        folds: Folds | None = None,
    ) -> HeldOutScores:
        """Choose terms and penalties, and fit the coefficients to all rows.

        Args:
            outputs: the targets, of shape rows × outputs. For squared errors they are centred.
            folds: the rows that are held out. None holds out each row in turn.

        Returns:
            The scores of held-out rows. Empty if `scoring` is None.
        """
        self._check_settings()
        with on_cpu(), threads(self.n_jobs), heartbeat(quiet=self.verbose is False) as show:
            return self._tune_and_fit(names, columns, outputs, weight, loss, folds, show)

    def _tune_and_fit(
        self,
        names: list[str],
        columns: list[Array],
        outputs: Array,
        weight: Array,
        loss: RowLoss,
        folds: Folds | None,
        show: Callable[[str], None],
    ) -> HeldOutScores:
        model_name = type(self).__name__
        show(f"{model_name}: preparing")
        used = weight > 0
        columns, outputs, weight = [column[used] for column in columns], outputs[used], weight[used]
        self._refuse_extreme_targets(outputs)
        self._warn_of_small_weights(weight)
        for name, column in zip(names, columns, strict=True):
            if column.dtype == np.float64 and (known := ~np.isnan(column)).any():
                centred(column[known, None], weight[known], True, [name])
        sample = self._tuning_rows(outputs)
        rows = np.arange(len(weight)) if sample is None else sample
        given_rows = np.flatnonzero(used)[rows]
        if folds is not None:
            folds = folds.of_rows(given_rows)
            self._check_folds(folds, outputs[rows])
        self._names = names
        self._signs = signs(self.monotone, names)
        squares = isinstance(loss, SquaredError)
        max_features = feature_limit(len(rows), outputs.shape[1], squares)
        max_slopes = max(WIDE, min(MAX_OWN_SLOPES, max_features) if squares else 0)
        design = Design(columns, weight, relevance(columns, outputs, weight), max_features, max_slopes)
        blocks = design.blocks(columns)
        record = SearchRecord(lambda n, value: show(f"{model_name}: {n} hypergradients, criterion {value:.6g}"))
        search = LBFGSB(max_iter=int(self.max_iter), tol=float(self.tol), first_step=FIRST_STEP)

        def tune_levels(X: Array, smaller: KindLevels | None = None) -> tuple[Reduction, Criterion, KindLevels]:
            reduction = Reduction(X, design.pieces(), weight)
            features = reduction.features(X)[rows]
            criterion: Criterion
            if folds is None:
                criterion = RowByRow(features, outputs[rows], weight[rows], loss, record)
            else:
                criterion = FoldByFold(features, outputs[rows], folds, loss, record)
            return reduction, criterion, tune_kinds(criterion, reduction.pieces, search, smaller)

        X = design.matrix(blocks)
        if X.shape[1] == 0:
            raise BilevelError(
                "Every column is constant, so there is nothing to fit. Pass columns with at least two values."
            )
        reduction, criterion, levels = tune_levels(X)
        importance = self._importance(design, X, reduction.expand(levels.tuned.w, X.shape[1]), weight)
        chosen = self._chosen_pairs(design, importance[: len(design.terms)], max_features - reduction.size)
        if chosen:
            design.pairs = [PairTerm(i, j, design.terms, blocks, weight) for i, j in chosen]
            X_pairs = design.matrix(blocks)
            with_pairs = tune_levels(X_pairs, levels)
            if self.pairs != "auto" or with_pairs[2].tuned.value < MAX_RATIO * levels.tuned.value:
                X, (reduction, criterion, levels) = X_pairs, with_pairs
            else:
                design.pairs = []
        strength = float(self.tether) * (WIDE_TETHER if design.own_slopes > WIDE else 1.0)
        tuned = tune_each(criterion, reduction.pieces, strength, search, levels)
        self._design, self._pieces = design, design.pieces()
        all_rows = RowByRow(reduction.features(X), outputs, weight, loss)
        by_part = grouped(reduction.pieces)[0]
        problem = all_rows.problem(by_part)
        self.outcome_, self.criterion_ = tuned.outcome, tuned.value
        self.history_, self.n_iter_ = record.arrays(), len(record.rows)
        self.method_ = (
            f"{type(criterion.method).__name__} on {X.shape[1]} features of {len(rows)} rows, {criterion.description}"
        )
        held_out: HeldOutScores = []
        if folds is not None or self.scoring is not None:
            held_out = criterion.held_out_scores(tuned, by_part)
        if folds is not None or sample is not None:
            tuned = all_rows.evaluate(problem, tuned.lam)
            if folds is None:
                self.criterion_ = tuned.value
        if self._signs:
            tuned.inner = self._constrained(all_rows, tuned, reduction, problem)
        self._training_columns = [column if column.dtype == np.float64 else None for column in columns]
        self._finish(all_rows, tuned, reduction, X)
        if folds is not None:
            self._widen_intervals(all_rows.outputs[rows], reduction.features(X)[rows], weight[rows], held_out)
        return [(given_rows[part], scores) for part, scores in held_out]

    def _check_folds(self, folds: Folds, outputs: Array) -> None:
        """Refuse folds that cannot be evaluated."""

    def _widen_intervals(self, outputs: Array, features: Array, weight: Array, held_out: HeldOutScores) -> None:
        """Set the size of the errors from rows that folds hold out.

        Rows of one group may have similar errors, which leaving out single rows does not show.
        """

    def _constrained(self, all_rows: RowByRow, tuned: TunedPenalties, reduction: Reduction, problem: Any) -> Any:
        """The coefficients under the constraints of `monotone`."""
        if all_rows.outputs.shape[1] > 1:
            raise BilevelError(
                "monotone= needs a numeric target or two classes: with more classes, not all their effects can rise. "
                "Leave monotone= out."
            )
        grids: list[list[Array]] = [[], []]
        for index, sign in self._signs.items():
            term = self._design.terms[index]
            if not isinstance(term, NumericTerm):
                raise BilevelError(
                    f"Column {self._names[index]!r} holds categories, which have no order. Leave it out of monotone=."
                )
            if term.varies:
                rows = reduction.rows(term_slices(self._pieces)[index])
                for grid, points in zip(grids, (POINTS, FINE), strict=True):
                    grid.append(increments(term, sign, points) @ rows)
        if not grids[0]:
            return tuned.inner
        model = LinearModels(all_rows.loss, problem.inner.penalty, not all_rows.squares)
        batch = tuple(torch.from_numpy(part) for part in (all_rows.X, all_rows.outputs.T.copy(), all_rows.weight[None]))
        intercept_column = np.zeros((1, int(not all_rows.squares)))
        coarse, fine = (
            np.vstack([np.hstack([part, intercept_column.repeat(len(part), 0)]) for part in grid]) for grid in grids
        )
        w = constrained(PenalisedRows(model, batch, tuned.lam), tuned.w[0].numpy(), coarse, fine)  # type: ignore[arg-type]
        for index, sign in self._signs.items():
            lift(w, self._design.terms[index], sign, reduction, term_slices(self._pieces).get(index))
        return torch.from_numpy(w)[None, None]

    def _finish(self, all_rows: RowByRow, tuned: TunedPenalties, reduction: Reduction, X: Array) -> None:
        """Set the coefficients, the penalties, the importances and the covariance of the coefficients."""
        size = X.shape[1]
        self._coef = reduction.expand(tuned.w, size)
        self._reduction = reduction
        self.intercept_ = np.zeros(len(self._coef)) if all_rows.squares else tuned.w[:, -1].numpy().copy()
        alpha = PENALTY_UNIT * all_rows.total * np.exp(tuned.lam.numpy())
        labels = [*self._names, *(f"{self._names[p.first]} × {self._names[p.second]}" for p in self._design.pairs)]
        self.terms_ = labels
        self.penalties_: dict[str, dict[str, float]] = {label: {} for label in labels}
        for piece in self._pieces:
            self.penalties_[labels[piece.term]][piece.kind] = float(alpha[piece.penalty])
        importance = self._importance(self._design, X, self._coef, all_rows.weight)
        self.importance_ = dict(zip(labels, importance.tolist(), strict=True))
        self._penalty_of_feature = alpha[grouped(reduction.pieces)[0].of]
        self._keep_covariance(all_rows, tuned, reduction, self._penalty_of_feature)

    def _keep_covariance(self, all_rows: RowByRow, tuned: TunedPenalties, reduction: Reduction, alpha: Array) -> None:
        raise NotImplementedError

    def _importance(self, design: Design, X: Array, coef: Array, weight: Array) -> Array:
        """The standard deviation of every term's effect, the largest over the outputs."""
        share = weight / weight.sum()
        deviations = np.zeros(len(design.terms) + len(design.pairs))
        for index, where in term_slices(design.pieces()).items():
            effect = X[:, where] @ coef[:, where].T
            effect = effect - share @ effect
            deviations[index] = np.sqrt(share @ effect**2).max()
        return deviations

    def _chosen_pairs(self, design: Design, importance: Array, room: int) -> list[tuple[int, int]]:
        if isinstance(self.pairs, str):
            return candidates(design, importance, PAIRED_TERMS, set(self._signs), room)
        if isinstance(self.pairs, (int, np.integer)):
            return []

        def paired(key: Any) -> int:
            k = position(key, "pairs", self._names)
            if k in self._signs:
                raise BilevelError(
                    f"Column {self._names[k]!r} is in monotone= and in pairs=. Leave it out of one of them."
                )
            if not design.terms[k].parts:
                raise BilevelError(f"Column {self._names[k]!r} is constant. Leave it out of pairs=.")
            return k

        pairs = [(paired(one), paired(two)) for one, two in self.pairs]
        for at, (one, two) in enumerate(pairs):
            if one == two or {one, two} in [{*pair} for pair in pairs[:at]]:
                raise BilevelError(
                    f"pairs= has {self._names[one]!r} with {self._names[two]!r}, a column with itself or a pair that "
                    "is there twice. Leave it out."
                )
        return pairs

    def _tuning_rows(self, outputs: Array) -> Array | None:
        """The rows that tune the penalties, or None for all. They have at least `CLASS_ROWS` rows of every class."""
        if len(outputs) <= TUNING_ROWS:
            return None
        order = check_random_state(self.random_state).permutation(len(outputs))
        chosen = [order[:TUNING_ROWS]]
        if is_classifier(self):
            codes = np.unique(outputs, axis=0, return_inverse=True)[1].reshape(-1)[order]
            chosen += [order[codes == code][:CLASS_ROWS] for code in range(codes.max() + 1)]
        return np.unique(np.concatenate(chosen))

    def _check_settings(self) -> None:
        super()._check_settings()
        if not isinstance(self.tether, Real) or not float(self.tether) >= 0:
            raise BilevelError(
                f"tether={self.tether!r} is not possible. Pass a number ≥ 0 (inf for one penalty per kind)."
            )
        auto = isinstance(self.pairs, str) and self.pairs == "auto"
        none = isinstance(self.pairs, (int, np.integer)) and self.pairs == 0
        listed = isinstance(self.pairs, (list, tuple)) and all(
            isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in self.pairs
        )
        if not auto and not none and not listed:
            raise BilevelError(f"pairs={self.pairs!r} is not possible. Pass 'auto', 0, or a list of pairs of columns.")

    def _features(self, X: Any, reach: float = REACH) -> Array:
        """The features of new rows, about the means of the training rows; `reach` as for `NumericTerm.features`."""
        check_is_fitted(self)
        names, columns = read_columns(self, X, "auto", reset=False)
        for j, (column, term) in enumerate(zip(columns, self._design.terms, strict=True)):
            columns[j] = as_trained(column, None if isinstance(term, NumericTerm) else term.levels, names[j])
        return self._design.matrix(self._design.blocks(columns, reach)) - self._reduction.mean

    def _scores(self, X: Any) -> Array:
        return self._features(X) @ self._coef.T + self.intercept_

    def _contributions(self, X: Any) -> Array:
        """The effect of every term on every row and output, of shape rows × terms × outputs."""
        features = self._features(X)
        contributions = np.zeros((len(features), len(self.terms_), len(self._coef)))
        for index, where in term_slices(self._pieces).items():
            contributions[:, index] = features[:, where] @ self._coef[:, where].T
        return contributions


def term_slices(pieces: list[Piece]) -> dict[int, slice]:
    """The slice of every term's features in the matrix, by the index of the term."""
    slices: dict[int, slice] = {}
    for piece in pieces:
        begin = slices[piece.term].start if piece.term in slices else piece.where.start
        slices[piece.term] = slice(begin, piece.where.stop)
    return slices


def inverse_hessian(X: Array, weight: Array, alpha: Array) -> Array:
    """(XᵀSX + diag(α))⁻¹, by a system of the smaller size: rows or features."""
    if len(X) < X.shape[1]:
        scaled = X / alpha
        solved: Array = np.linalg.solve(scaled @ X.T + np.diag(1 / weight), scaled)
        return np.diag(1 / alpha) - scaled.T @ solved
    matrix = torch.from_numpy(X.T @ (weight[:, None] * X) + np.diag(alpha))
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix)).numpy()
