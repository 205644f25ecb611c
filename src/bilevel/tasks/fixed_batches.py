"""A data set cut once into batches, in a random order that is a pure function of the number of the draw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.tasks.holdout import number_of_examples, shuffled
from bilevel.trees import Tree


@dataclass(frozen=True)
class FixedBatches:
    """`FixedBatches(data, size)(t)`: one of the same n/size batches, drawn in a new random order in every epoch.

    The mean over all batches is the mean over the data, so the objectives are finite sums over `len(batches)` terms.
    Algorithms that remember a gradient for each term (`SABA`, `SRBA`) need that. A batch is a view: nothing is copied.

    Args:
        data: a tree of tensors whose first axis counts examples. They are cut in the order that they have: shuffle them
            first if the order means something.
        size: examples in a batch; it divides the number of examples.
        seed: the seed of the orders.

    >>> import torch
    >>> batches = FixedBatches(torch.arange(6), size=2)
    >>> len(batches), batches[2], sorted(batches.index(t) for t in (1, 2, 3))
    (3, tensor([4, 5]), [0, 1, 2])
    """

    data: Tree
    size: int
    seed: int = 0

    def __len__(self) -> int:
        return _count(number_of_examples(self.data), self.size)

    @cached_property
    def _length(self) -> int:
        return len(self)

    def __getitem__(self, index: int) -> Tree:
        """Batch number 0, 1, …, len − 1."""
        first = index * self.size
        return trees.map(lambda leaf: leaf[first : first + self.size], self.data)

    def index(self, t: int) -> int:
        """Which batch draw t = 1, 2, … gives."""
        epoch, offset = divmod(t - 1, self._length)
        return _order(self._length, self.seed, epoch)[offset]

    def __call__(self, t: int) -> Tree:
        return self[self.index(t)]


trees.register(FixedBatches, ["data"])


@lru_cache(maxsize=64)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    order: list[int] = shuffled(count, seed * 1_000_003 + epoch).tolist()
    return order


def _count(examples: int, size: int) -> int:
    if isinstance(size, int) and 1 <= size <= examples and examples % size == 0:
        return examples // size
    divisors = [d for d in range(1, examples + 1) if examples % d == 0]
    near = sorted(sorted(divisors, key=lambda d: abs(d - size))[:3])
    raise BilevelError(
        f"FixedBatches(size={size}) does not divide {examples} examples, and with a smaller last batch the mean over "
        f"the batches is not the mean over the data. Pass a divisor of {examples}, such as {near}, or leave some "
        "examples out."
    )
