"""Splits of the rows: the folds that models are compared on, and the folds inside them that models are tuned on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import KFold, StratifiedGroupKFold, StratifiedKFold, TimeSeriesSplit

from bilevel.errors import BilevelError

Rows: TypeAlias = NDArray[np.int64]
Pair: TypeAlias = tuple[Rows, Rows]


class Splits:
    """Folds of all rows of a table, and of subsets of them.

    Args:
        y: the target, classes or numbers.
        classes: whether y holds classes. Folds are then stratified.
        together: the label of every row. Rows with the same label are in the same fold.
        in_time: whether rows are in order of time. A fold is then tested on rows after its training rows.
        count: the number of folds.
        seed: the seed of the shuffle.

    >>> splits = Splits(np.arange(6.0), classes=False, in_time=True, count=2)
    >>> [(train.tolist(), test.tolist()) for train, test in splits.of(np.arange(6), seed=0)]
    [([0, 1], [2, 3]), ([0, 1, 2, 3], [4, 5])]
    """

    def __init__(
        self,
        y: NDArray[Any],
        *,
        classes: bool,
        together: NDArray[Any] | None = None,
        in_time: bool = False,
        count: int = 5,
        seed: int = 0,
    ) -> None:
        self.y, self.classes, self.together, self.in_time = y, classes, together, in_time
        self.count, self.seed = count, seed

    @property
    def exchangeable(self) -> bool:
        """Whether single rows may be put into any fold."""
        return self.together is None and not self.in_time

    def of(self, rows: Rows, seed: int) -> list[Pair]:
        """(train, test) pairs of positions in `rows`."""
        y = self.y[rows] if self.classes else np.zeros(len(rows))
        if self.in_time:
            folds = TimeSeriesSplit(self.count).split(rows)
        elif self.together is not None:
            split = StratifiedGroupKFold(self.count, shuffle=True, random_state=seed)
            folds = split.split(rows, y, self.together[rows])
        else:
            kind = StratifiedKFold if self.classes else KFold
            folds = kind(self.count, shuffle=True, random_state=seed).split(rows, y)
        return list(folds)

    def inner(self, rows: Rows) -> list[Pair]:
        """The folds that models are tuned on, inside these rows."""
        return self.of(rows, self.seed)

    def outer(self, repeats: int) -> Iterator[list[Pair]]:
        """The folds that models are compared on, for each repeat. A split by time has one repeat."""
        rows = np.arange(len(self.y))
        for repeat in range(1 if self.in_time else repeats):
            yield self.of(rows, self.seed + 1 + repeat)

    def check(self, repeats: int) -> None:
        """Refuse splits whose training rows, or those of an inner fold, lack a class or have a constant target."""
        needed = len(np.unique(self.y)) if self.classes else 2
        for pairs in self.outer(repeats):
            for train, test in pairs:
                parts = [train, *(train[inside] for inside, _ in self.inner(train))]
                if not len(test) or any(len(np.unique(self.y[part])) < needed for part in parts):
                    what = "lacks a class" if self.classes else "has a constant target"
                    how = (
                        "--time" if self.in_time else "--groups" if self.together is not None else f"--cv {self.count}"
                    )
                    raise BilevelError(
                        f"With {how}, the training part of a fold {what}. Write fewer folds (--cv), or add rows."
                    )
