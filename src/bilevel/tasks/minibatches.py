"""Minibatches as a pure function of the step number."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.tasks.holdout import number_of_examples, shuffled
from bilevel.trees import Tree


@dataclass(frozen=True)
class Minibatches:
    """`Minibatches(data, size)(t)`: the batch of step t = 1, 2, …, the same at every call; every epoch is shuffled.

    It is a tree whose leaves are the data, so `encode` can map all examples once and still feed minibatches:
    `trees.map(features, task.train)` is again a `Minibatches`.

    Args:
        data: a tree of tensors whose first axis counts examples.
        size: examples in a batch; the last batch of an epoch that does not divide evenly is filled from the next epoch.
        seed: the seed of the shuffles.

    >>> batches = Minibatches((torch.arange(6), torch.arange(6) * 10), size=4, seed=1)
    >>> bool((batches(2)[0] == batches(2)[0]).all()), tuple(batches(2)[1].shape)
    (True, (4,))
    """

    data: Tree
    size: int
    seed: int = 0

    def __call__(self, t: int) -> Tree:
        return self.take(self.rows(t))

    def take(self, rows: torch.Tensor) -> Tree:
        """The examples with these numbers."""
        return trees.map(lambda leaf: leaf[rows.to(leaf.device)], self.data)

    def rows(self, t: int) -> torch.Tensor:
        """The numbers of the examples in the batch of step t."""
        count = number_of_examples(self.data)
        if not (isinstance(self.size, Integral) and 1 <= self.size <= count):
            raise BilevelError(
                f"Minibatches(size={self.size!r}) cannot be drawn from {count} examples; pass an int, 1 ≤ size ≤ "
                f"{count}."
            )
        first = (t - 1) * self.size
        epoch, offset = divmod(first, count)
        order = self._order(epoch, count)[offset : offset + self.size]
        if len(order) < self.size:
            order = torch.cat([order, self._order(epoch + 1, count)[: self.size - len(order)]])
        return order

    def _order(self, epoch: int, count: int) -> torch.Tensor:
        # The factor keeps the seeds of one run's epochs apart from those of runs with other seeds.
        return shuffled(count, self.seed * 1_000_003 + epoch)


trees.register(Minibatches, ["data"])
