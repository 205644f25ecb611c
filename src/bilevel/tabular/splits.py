"""How rows are split: the folds that models are compared on, and the folds inside them that models are tuned on."""

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
    """Folds of a table's rows, and of any part of them.

    Args:
        y: the target, classes or numbers.
        classes: keep the shares of the classes alike in all folds.
        together: labels of rows; rows with one label are in one fold.
        in_time: rows are in order of time; a fold is tested on rows that come after those it is trained on.
        count: how many folds.
        seed: of the shuffle.

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
        """Whether rows may be split in any way."""
        return self.together is None and not self.in_time

    def of(self, rows: Rows, seed: int) -> list[Pair]:
        """(train, test) pairs of positions in `rows`."""
        y = self.y[rows] if self.classes else np.zeros(len(rows))
        if self.in_time:
            found = TimeSeriesSplit(self.count).split(rows)
        elif self.together is not None:
            split = StratifiedGroupKFold(self.count, shuffle=True, random_state=seed)
            found = split.split(rows, y, self.together[rows])
        else:
            kind = StratifiedKFold if self.classes else KFold
            found = kind(self.count, shuffle=True, random_state=seed).split(rows, y)
        return list(found)

    def inner(self, rows: Rows) -> list[Pair]:
        """The folds that models are tuned on, inside these rows."""
        return self.of(rows, self.seed)

    def outer(self, repeats: int) -> Iterator[list[Pair]]:
        """The folds that models are compared on, once for each repeat; in time there is one way to split."""
        every = np.arange(len(self.y))
        for repeat in range(1 if self.in_time else repeats):
            yield self.of(every, self.seed + 1 + repeat)

    def check(self, repeats: int) -> None:
        """Refuse a split whose training rows, or those of a fold inside it, lack a class or vary in nothing."""
        needed = len(np.unique(self.y)) if self.classes else 2
        for pairs in self.outer(repeats):
            for train, test in pairs:
                parts = [train, *(train[inside] for inside, _ in self.inner(train))]
                if not len(test) or any(len(np.unique(self.y[part])) < needed for part in parts):
                    what = "lacks a class" if self.classes else "has one value of the target alone"
                    how = (
                        "--time" if self.in_time else "--groups" if self.together is not None else f"--cv {self.count}"
                    )
                    raise BilevelError(
                        f"With {how}, the training part of a fold {what}. Write fewer folds (--cv), or bring more rows."
                    )
