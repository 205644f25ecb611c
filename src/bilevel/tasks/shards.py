"""Batches cut into parts that several processes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.tasks.holdout import number_of_examples
from bilevel.tasks.minibatches import Minibatches
from bilevel.trees import Tree


@dataclass(frozen=True)
class Shards:
    """A batch in parts of equal size. An objective on it is the mean over the parts.

    A part is made when it is first asked for: a process that computes some of the parts does not gather the others.

    Args:
        count: the number of parts.
        make: part i = 0, 1, …, count − 1.
    """

    count: int
    make: Callable[[int], Tree]

    def __getitem__(self, index: int) -> Tree:
        # A tree that was mapped holds the parts themselves.
        return self.parts[index] if "parts" in vars(self) else self.make(index)

    @cached_property
    def parts(self) -> list[Tree]:
        """All of them."""
        return [self.make(index) for index in range(self.count)]


trees.register(Shards, ["parts"])


@dataclass(frozen=True)
class ShardedSampler:
    """A sampler whose batches are cut into `count` parts."""

    source: Any
    count: int

    def __call__(self, t: int) -> Shards:
        if not isinstance(self.source, Minibatches):
            return cut(self.source(t), self.count)
        rows, take, size = self.source.rows(t), self.source.take, _size(self.source.size, self.count)
        return Shards(self.count, cache(lambda index: take(rows[index * size : (index + 1) * size])))

    def __getitem__(self, index: int) -> Shards:
        return cut(self.source[index], self.count)


trees.register(ShardedSampler, ["source"])


def shards(source: Any, count: int) -> Shards | ShardedSampler:
    """A batch, or every batch of a sampler, cut into `count` parts along the first axis, for single-loop algorithms.

    In a script that torchrun started, the processes share the parts of every batch. The means over the parts are added
    in a fixed order, so that a run gives the same bits for any number of processes; `count` is part of the problem,
    not of the machine. For an objective that is a mean over examples, plus terms that do not depend on them, the mean
    over the parts is the objective on the whole batch.

    Args:
        source: a batch (a tree of tensors whose first axis counts examples), or a sampler, such as `Minibatches`.
        count: the number of parts; it divides the number of examples of a batch. At least the number of processes.

    >>> import torch
    >>> shards(torch.arange(6), 3).parts
    [tensor([0, 1]), tensor([2, 3]), tensor([4, 5])]
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BilevelError(f"shards(…, count={count!r}) is not a number of parts; pass an int ≥ 1.")
    return ShardedSampler(source, count) if callable(source) else cut(source, count)


def cut(batch: Tree, count: int) -> Shards:
    size = _size(number_of_examples(batch), count)
    return Shards(count, lambda i: trees.map(lambda leaf: leaf[i * size : (i + 1) * size], batch))


def _size(examples: int, count: int) -> int:
    """The number of examples in a part."""
    if examples % count:
        raise BilevelError(
            f"A batch of {examples} examples cannot be cut into {count} parts of equal size, and with others the mean "
            f"over the parts is not the mean over the batch. Pass a batch size that {count} divides."
        )
    return examples // count


def number_of_parts(batch: Tree) -> int:
    """1 where the batch is not cut."""
    return batch.count if isinstance(batch, Shards) else 1


def part(batch: Tree, index: int) -> Tree:
    """A part of a batch; the batch itself where it is not cut."""
    return batch[index] if isinstance(batch, Shards) else batch
