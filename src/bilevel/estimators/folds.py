"""Hold-out and K-fold splits as weights of rows, so that every subset of a cross-validation is one mask."""

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

# How many features decide the order of rows with equal y.
COMPARED = 32

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Folds:
    """Which rows each fold trains on and which it is judged on.

    Rows that every fold treats alike form a cell (the folds themselves, in K-fold cross-validation). Masks are kept for
    cells, because sums over rows, such as XᵀX, need be taken only once for each of them.

    Attributes:
        cell: the cell of every row.
        train: whether fold k trains on a cell, of shape (K, cells).
        val: whether fold k is judged on it.
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
        """The weight of all rows that are judged on, counted once for each fold."""
        return float((self.val_weights()).sum())

    def train_weights(self) -> Array:
        """Of shape (K, rows)."""
        return self.train[:, self.cell] * self.weight

    def val_weights(self) -> Array:
        return self.val[:, self.cell] * self.weight

    def _weighs(self, cells: Array) -> bool:
        return bool(self.weight[cells[self.cell]].sum() > 0)


def whole(weight: Array) -> Folds:
    """One fold, which trains on all rows and is judged on all of them: each is left out singly, or none is."""
    cells = np.ones((1, 1), dtype=bool)
    return Folds(np.zeros(len(weight), dtype=int), cells, cells, weight)


def split(
    cv: Any,
    X: Any,
    y: Array,
    weight: Array,
    *,
    classes: bool,
    random_state: Any,
    groups: Any = None,
) -> Folds:
    """The folds that `cv` means.

    Args:
        cv: a number of folds, the fraction of rows to hold out, a scikit-learn splitter, an iterable of (train, val)
            indices, or None for 5 folds.
        classes: y holds classes.
        groups: the group of every row. Rows of one group are never on both sides of a fold; a splitter gets them too.
    """
    splitter = _splitter(cv, classes, random_state, groups)
    even = isinstance(splitter, EvenFolds)
    pairs = splitter.split(X, y) if even else list(check_cv(splitter, y, classifier=classes).split(X, y, groups))
    if not pairs:
        raise BilevelError(f"cv={cv!r} gives no split; pass a number of folds, or the fraction to hold out.")
    train_mask = np.zeros((len(pairs), len(y)), dtype=bool)
    val_mask = np.zeros_like(train_mask)
    for k, (train, val) in enumerate(pairs):
        train_mask[k, _as_indices(train, len(y))] = True
        val_mask[k, _as_indices(val, len(y))] = True
    signatures, cell = np.unique(np.vstack([train_mask, val_mask]).T, axis=0, return_inverse=True)
    folds = Folds(cell.reshape(-1), signatures.T[: len(pairs)], signatures.T[len(pairs) :], weight)
    empty = [k for k in range(folds.count) if not folds._weighs(folds.train[k]) or not folds._weighs(folds.val[k])]
    if empty:
        raise BilevelError(
            f"Fold {empty[0]} of cv={cv!r} has no row with a positive sample weight to train on or to be judged on. "
            "Pass fewer folds, or weights that reach every fold."
        )
    return folds


def _splitter(cv: Any, classes: bool, random_state: Any, groups: Any = None) -> Any:
    if cv is None:
        cv = 5
    if groups is not None and isinstance(cv, (int, float, np.integer, np.floating)) and not isinstance(cv, bool):
        return _grouped_splitter(cv, classes, random_state, len(np.unique(groups)))
    if isinstance(cv, (float, np.floating)):
        if not 0 < cv < 1:
            raise BilevelError(f"cv={cv} is not a fraction of rows to hold out; pass one between 0 and 1, or an int.")
        shuffled = StratifiedShuffleSplit if classes else ShuffleSplit
        return shuffled(1, test_size=float(cv), random_state=random_state)
    if isinstance(cv, (int, np.integer)) and not isinstance(cv, bool):
        if cv < 2:
            raise BilevelError(f"cv={cv} folds leave nothing to train on; pass 2 or more, or a fraction such as 0.25.")
        return EvenFolds(int(cv), classes, random_state)
    return cv


def _grouped_splitter(cv: Any, classes: bool, random_state: Any, count: int) -> Any:
    if isinstance(cv, (float, np.floating)):
        return GroupShuffleSplit(1, test_size=float(cv), random_state=random_state)
    if count < 2:
        raise BilevelError(f"groups has {count} group; folds need two or more. Leave groups= out, or pass others.")
    kind = StratifiedGroupKFold if classes else GroupKFold
    return kind(min(int(cv), count), shuffle=True, random_state=random_state)


@dataclass(frozen=True)
class EvenFolds:
    """K folds that do not depend on the order of the rows, each with all classes or the whole range of y in it.

    Rows are sorted by y, then by their first features, in any unit. Each K rows that follow each other are dealt to
    the K folds at random; the rows of a class are shuffled and dealt in turns. Folds of `KFold` change when a table is
    sorted, and may have few rows with large y.
    """

    count: int
    classes: bool
    random_state: Any = 0

    def split(self, X: Any, y: Array) -> list[tuple[Array, Array]]:
        if self.count > len(y):
            raise BilevelError(f"cv={self.count} folds are more than the {len(y)} rows; pass fewer folds.")
        random, fold = check_random_state(self.random_state), np.empty(len(y), dtype=int)
        few = X[:, :COMPARED].toarray() if sparse.issparse(X) else X[:, :COMPARED]
        order = np.lexsort((*few.T[::-1], *y.reshape(len(y), -1).T[::-1]))
        if self.classes:
            shuffled = order[random.permutation(len(y))]
            fold[shuffled[np.argsort(y[shuffled], kind="stable")]] = np.arange(len(y)) % self.count
        else:
            deals = [random.permutation(self.count) for _ in range(-(-len(y) // self.count))]
            fold[order] = np.concatenate(deals)[: len(y)]
        return [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(self.count)]


def _as_indices(rows: Any, count: int) -> Array:
    rows = np.asarray(rows)
    return np.flatnonzero(rows) if rows.dtype == bool and len(rows) == count else rows
