"""Hold-out and K-fold splits as weights of rows, so that every subset of a cross-validation is one mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from sklearn.model_selection import KFold, ShuffleSplit, StratifiedKFold, StratifiedShuffleSplit, check_cv

from bilevel.errors import BilevelError

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

    def merged(self) -> Folds:
        """Folds that train on the same rows as one, judged on all that they are judged on: the two halves of a hold-out
        set have one minimiser between them."""
        train, owner = np.unique(self.train, axis=0, return_inverse=True)
        counts = np.zeros(train.shape, dtype=int)
        np.add.at(counts, owner.reshape(-1), self.val)
        # A row that is judged on twice counts twice, which a mask cannot say.
        return replace(self, train=train, val=counts > 0) if len(train) < self.count and counts.max() == 1 else self

    def only(self, k: int) -> Folds:
        return replace(self, train=self.train[k : k + 1], val=self.val[k : k + 1])

    def without(self, k: int) -> Folds:
        """The other folds, with everything that fold k is judged on taken out of them: what nested cross-validation
        tunes on before it is judged on fold k."""
        others = np.arange(self.count) != k
        train, val = self.train[others] & ~self.val[k], self.val[others] & ~self.val[k]
        filled = np.array([self._weighs(t) and self._weighs(v) for t, v in zip(train, val, strict=True)], dtype=bool)
        return replace(self, train=train[filled], val=val[filled])

    def _weighs(self, cells: Array) -> bool:
        return bool(self.weight[cells[self.cell]].sum() > 0)


def split(
    cv: Any, X: Any, y: Array, weight: Array, *, classes: bool, random_state: Any, halve_holdout: bool = False
) -> Folds:
    """The folds that `cv` means.

    Args:
        cv: a number of folds, the fraction of rows to hold out, a scikit-learn splitter, an iterable of (train, val)
            indices, or None for 5 folds.
        classes: stratify by y.
        halve_holdout: turn a hold-out set into two folds with the same training rows, each judged on one half. The
            mean of both is the hold-out criterion itself, and nested cross-validation gets something to leave out.
    """
    splitter = _splitter(cv, classes, random_state)
    pairs = list(check_cv(splitter, y, classifier=classes).split(X, y))
    if not pairs:
        raise BilevelError(f"cv={cv!r} gives no split; pass a number of folds, or the fraction to hold out.")
    if halve_holdout and len(pairs) == 1:
        train, val = (_as_indices(rows, len(y)) for rows in pairs[0])
        order = np.random.default_rng(0).permutation(val)
        if len(val) > 1:
            pairs = [(train, order[: len(val) // 2]), (train, order[len(val) // 2 :])]
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


def _splitter(cv: Any, classes: bool, random_state: Any) -> Any:
    if cv is None:
        cv = 5
    if isinstance(cv, (float, np.floating)):
        if not 0 < cv < 1:
            raise BilevelError(f"cv={cv} is not a fraction of rows to hold out; pass one between 0 and 1, or an int.")
        shuffled = StratifiedShuffleSplit if classes else ShuffleSplit
        return shuffled(1, test_size=float(cv), random_state=random_state)
    if isinstance(cv, (int, np.integer)) and not isinstance(cv, bool):
        if cv < 2:
            raise BilevelError(f"cv={cv} folds leave nothing to train on; pass 2 or more, or a fraction such as 0.25.")
        # Shuffled, unlike scikit-learn's: tables often come sorted, and a fold of one kind of row says nothing.
        dealt = StratifiedKFold if classes else KFold
        return dealt(int(cv), shuffle=True, random_state=random_state)
    return cv


def _as_indices(rows: Any, count: int) -> Array:
    rows = np.asarray(rows)
    return np.flatnonzero(rows) if rows.dtype == bool and len(rows) == count else rows
