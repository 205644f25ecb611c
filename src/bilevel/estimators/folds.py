"""Hold-out and K-fold splits as masks of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import sparse
from sklearn.model_selection import (
    GroupKFold,
    GroupShuffleSplit,
    ShuffleSplit,
    StratifiedGroupKFold,
    StratifiedShuffleSplit,
    check_cv,
)
from sklearn.utils import check_random_state

from bilevel.errors import BilevelError

# Rows with equal y are sorted by this many features.
SORTING_FEATURES = 32

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Folds:
    """The rows that each fold trains on, and those that it is evaluated on.

    Rows that are in the same sets of all folds form a cell. In K-fold cross-validation there are K cells. Masks are
    kept per cell, because sums over rows, such as XᵀX, are then computed once per cell.

    Attributes:
        cell: the cell of every row.
        train: whether fold k trains on a cell, of shape (K, cells).
        val: whether fold k is evaluated on a cell, of the same shape.
        weight: the sample weight of every row.
    """

    cell: Array
    train: Array
    val: Array
    weight: Array

    @property
    def count(self) -> int:
        return len(self.train)

    @property
    def total(self) -> float:
        """The weight of the validation rows of all folds. A row of two folds counts twice."""
        return float(self.val_weights().sum())

    def of_rows(self, rows: Array) -> Folds:
        """The folds of some of the rows. Refuses folds that none of these rows train or evaluate."""
        part = Folds(self.cell[rows], self.train, self.val, self.weight[rows])
        part.refuse_empty()
        return part

    def refuse_empty(self) -> None:
        for empty in np.flatnonzero((self.train_weights().sum(1) <= 0) | (self.val_weights().sum(1) <= 0)):
            raise BilevelError(
                f"Fold {empty} of cv has no row with a positive sample weight to train on, or none to be evaluated on. "
                "Pass fewer folds, or positive weights for more rows."
            )

    def train_weights(self) -> Array:
        """The weight of every row in the training of each fold, of shape (K, rows)."""
        return self.train[:, self.cell] * self.weight

    def val_weights(self) -> Array:
        return self.val[:, self.cell] * self.weight


def single_fold(weight: Array) -> Folds:
    """One fold that trains on all rows and is evaluated on all of them, for the leave-one-out error."""
    cells = np.ones((1, 1), dtype=bool)
    return Folds(np.zeros(len(weight), dtype=int), cells, cells, weight)


def split(cv: Any, X: Any, y: Array, weight: Array, *, classes: bool, random_state: Any, groups: Any = None) -> Folds:
    """The folds of the estimator's argument `cv`.

    Args:
        cv: a number of folds, the fraction of rows to hold out, a scikit-learn splitter, an iterable of (train, val)
            indices, or None for 5 folds.
        classes: whether y holds classes.
        groups: the group of every row. A fold never trains on one row of a group and is evaluated on another. A
            splitter receives the groups too.
    """
    try:
        splitter = check_cv(_splitter(cv, classes, random_state, groups), y, classifier=classes)
        pairs = list(splitter.split(X, y, groups))
    except BilevelError:
        raise
    except (TypeError, ValueError) as error:
        raise BilevelError(
            f"cv={cv!r} gives no folds ({error}). Pass a number of folds, the fraction of rows to hold out, a splitter "
            "of scikit-learn, with fit(…, groups=…) if it needs groups, or a list of (train, val) indices."
        ) from error
    if not pairs:
        raise BilevelError(
            f"cv={cv!r} gives no split. Pass a number of folds, or the fraction of rows to hold out. A generator gives "
            "its splits only once; pass a list."
        )
    train_mask = np.zeros((len(pairs), len(y)), dtype=bool)
    val_mask = np.zeros_like(train_mask)
    for k, (train, val) in enumerate(pairs):
        train_mask[k, _as_indices(train, len(y), k)] = True
        val_mask[k, _as_indices(val, len(y), k)] = True
    for k, row in np.argwhere(train_mask & val_mask):
        raise BilevelError(
            f"Fold {k} of cv trains on row {row} and is evaluated on it. The penalties would be tuned to overfit. Pass "
            "(train, val) indices without common rows."
        )
    signatures, cell = _unique_rows(np.vstack([train_mask, val_mask]).T)
    folds = Folds(cell, signatures.T[: len(pairs)], signatures.T[len(pairs) :], weight)
    folds.refuse_empty()
    return folds


def _splitter(cv: Any, classes: bool, random_state: Any, groups: Any) -> Any:
    if cv is None:
        cv = 5
    if isinstance(cv, (float, np.floating)):
        if not 0 < cv < 1:
            raise BilevelError(f"cv={cv} is not a fraction of rows to hold out. Pass one between 0 and 1, or an int.")
        if groups is not None:
            return GroupShuffleSplit(1, test_size=float(cv), random_state=random_state)
        shuffled = StratifiedShuffleSplit if classes else ShuffleSplit
        return shuffled(1, test_size=float(cv), random_state=random_state)
    if isinstance(cv, (int, np.integer)) and not isinstance(cv, bool):
        if cv < 2:
            raise BilevelError(f"cv={cv} leaves no rows to train on. Pass 2 or more, or a fraction such as 0.25.")
        if groups is not None:
            return _group_folds(int(cv), classes, random_state, int(codes(groups, "groups").max()) + 1)
        return EvenFolds(int(cv), classes, random_state)
    return cv


def _group_folds(cv: int, classes: bool, random_state: Any, count: int) -> Any:
    if count < 2:
        raise BilevelError(
            f"groups holds {count} group, and folds need at least two. Leave groups= out, or pass others."
        )
    kind = StratifiedGroupKFold if classes else GroupKFold
    return kind(min(cv, count), shuffle=True, random_state=random_state)


@dataclass(frozen=True)
class EvenFolds:
    """K folds that do not depend on the order of the rows, each with all classes or the whole range of y.

    Rows are sorted by y, then by their first features. Of each K consecutive rows, every fold gets one, at random. The
    rows of a class are shuffled and assigned to the folds in turn. The folds of `KFold`, in contrast, change when the
    table is sorted, and one of them may have few rows with large y.
    """

    count: int
    classes: bool
    random_state: Any = 0

    def split(self, X: Any, y: Array, groups: None) -> list[tuple[Array, Array]]:
        if self.count > len(y):
            raise BilevelError(
                f"{self.count} folds are more than the {len(y)} rows. Pass fewer folds as cv=, or more rows."
            )
        random, fold = check_random_state(self.random_state), np.empty(len(y), dtype=int)
        first_features = X[:, :SORTING_FEATURES].toarray() if sparse.issparse(X) else X[:, :SORTING_FEATURES]
        order = np.lexsort((*first_features.T[::-1], *y.reshape(len(y), -1).T[::-1]))
        if self.classes:
            shuffled = order[random.permutation(len(y))]
            fold[shuffled[np.argsort(y[shuffled], kind="stable")]] = np.arange(len(y)) % self.count
        else:
            permutations = [random.permutation(self.count) for _ in range(-(-len(y) // self.count))]
            fold[order] = np.concatenate(permutations)[: len(y)]
        return [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(self.count)]


def _as_indices(rows: Any, count: int, fold: int) -> Array:
    rows = np.asarray(rows)
    if rows.dtype == bool and len(rows) == count:
        return np.flatnonzero(rows)
    if rows.dtype.kind not in "iu" or rows.ndim != 1 or ((rows < -count) | (rows >= count)).any():
        raise BilevelError(
            f"Fold {fold} of cv is given by {rows.dtype} numbers of shape {list(rows.shape)} that are not positions of "
            f"the {count} rows. Pass integers from 0 to {count - 1}, or masks of {count} entries."
        )
    if (np.bincount(rows % count, minlength=count) > 1).any():
        raise BilevelError(
            f"Fold {fold} of cv has a row several times, and it would count once. Pass every row at most once; "
            "sample_weight in fit(…) lets rows count more."
        )
    return rows


def _unique_rows(masks: Array) -> tuple[Array, Array]:
    """The different rows, sorted, and for every row of `masks` its place among them."""
    width = masks.shape[1]
    if width > 64:
        found, place = np.unique(masks, axis=0, return_inverse=True)
        return found, place.reshape(-1)
    # The bits of a row as one number with the same order. Sorting numbers is many times faster than sorting rows.
    packed = np.zeros((len(masks), 8), np.uint8)
    packed[:, : -(-width // 8)] = np.packbits(masks, axis=1)
    numbers, place = np.unique(packed.view(">u8")[:, 0].astype(np.uint64), return_inverse=True)
    bits = np.unpackbits(numbers.astype(">u8").view(np.uint8).reshape(-1, 8), axis=1)
    return bits[:, :width].astype(bool), place.reshape(-1)


def codes(labels: Any, name: str) -> Array:
    """The number 0, 1, … of every label among the sorted labels.

    >>> codes(["b", "a", "b"], "groups")
    array([1, 0, 1])
    """
    try:
        return np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    except TypeError as error:
        raise BilevelError(
            f"{name} mixes labels that have no order ({error}). Pass all numbers, or all text."
        ) from error
