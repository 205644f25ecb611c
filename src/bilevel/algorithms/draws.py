"""The batches and random integers of one iteration of a single-loop algorithm, as pure functions of its number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bilevel.engine.diagnosis import refuse_non_finite_data
from bilevel.tasks.fixed_batches import FixedBatches
from bilevel.tasks.shards import ShardedSampler
from bilevel.trees import Tree


class BatchSource:
    """One side of a task: a sampler, batches that stay the same, or one batch for all draws.

    Args:
        given: a sampler, or a batch.
        name: what errors call it.

    Attributes:
        count: the number of batches in a fixed set; None if new batches are drawn without end.
    """

    def __init__(self, given: Any, name: str) -> None:
        self.given, self.name, self.sampler = given, name, callable(given)
        self.whole = given.source if isinstance(given, ShardedSampler) else given
        self.fixed = isinstance(self.whole, FixedBatches)
        self.count: int | None = len(self.whole) if self.fixed else None if self.sampler else 1

    def index(self, t: int) -> int:
        """The number of the batch, out of `count`, that draw t = 1, 2, … gives."""
        return int(self.whole.index(t)) if self.fixed else 0

    def __getitem__(self, index: int) -> Tree:
        return self.given[index] if self.fixed else self.given

    def __call__(self, t: int) -> Tree:
        return self.given(t) if self.sampler else self.given

    def some(self, most: int) -> list[Tree]:
        """All batches, or the first `most` draws. Entries that are NaN or infinite are refused."""
        if self.count is None:
            return [self.finite(t) for t in range(1, most + 1)]
        return [self.numbered(index) for index in range(min(self.count, most))]

    def numbered(self, index: int) -> Tree:
        """Batch number `index` of a fixed set. Entries that are NaN or infinite are refused."""
        refuse_non_finite_data(f"{self.name}, batch {index}", self[index])
        return self[index]

    def numbers_of_largest(self, measure: Callable[[Iterator[Tree]], list[float]], first: int, most: int) -> list[int]:
        """The numbers of the `most` batches of a fixed set, after the first ones, for which a measure is largest."""
        numbers = range(first, self.count or 0)
        sizes = measure(self[index] for index in numbers)
        return [index for _, index in sorted(zip(sizes, numbers, strict=True), reverse=True)[:most]]

    def finite(self, t: int) -> Tree:
        """The batch of draw t. Entries that are NaN or infinite are refused."""
        refuse_non_finite_data(f"{self.name}, draw {t}", self(t))
        return self(t)

    def all(self) -> list[Tree]:
        return [self[index] for index in range(self.count or 0)]


@dataclass
class Draws:
    """The batches and integers that iteration k draws, in order. Two objects with equal arguments draw the same.

    Args:
        train, val: the data of both levels.
        k: the iteration.
        per_iteration: the most batches of train and of val that an iteration draws.
        seed: of the random integers.
    """

    train: BatchSource
    val: BatchSource
    k: int
    per_iteration: tuple[int, int]
    seed: int = 0

    def __post_init__(self) -> None:
        self._inner, self._outer = (self.k * count for count in self.per_iteration)
        self._integers = 0

    def refuse_non_finite(self) -> None:
        """Raise an error if one of the batches has an entry that is NaN or infinite."""
        for source, count in zip((self.train, self.val), self.per_iteration, strict=True):
            for t in range(self.k * count + 1, (self.k + 1) * count + 1):
                source.finite(t)

    def inner(self) -> Tree:
        """The next batch of training data."""
        self._inner += 1
        return self.train(self._inner)

    def outer(self) -> Tree:
        """The next batch of validation data."""
        self._outer += 1
        return self.val(self._outer)

    def inner_index(self) -> int:
        """The number of the next batch of training data, for a finite sum."""
        self._inner += 1
        return self.train.index(self._inner)

    def outer_index(self) -> int:
        """The number of the next batch of validation data, for a finite sum."""
        self._outer += 1
        return self.val.index(self._outer)

    def integer(self, below: int) -> int:
        """A random integer in 0, …, below − 1."""
        self._integers += 1
        return random.Random(f"{self.seed} {self.k} {self._integers}").randrange(below)
