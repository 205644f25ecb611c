"""Batches cut into parts that several processes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.tasks.holdout import number_of_examples
from bilevel.trees import Tree


@dataclass(frozen=True)
class Shards:
    """A batch in parts of equal size. An objective on it is the mean over the parts."""

    parts: list[Tree]


trees.register(Shards, ["parts"])


@dataclass(frozen=True)
class ShardedSampler:
    """A sampler whose batches are cut into `count` parts."""

    source: Any
    count: int

    def __call__(self, t: int) -> Shards:
        return cut(self.source(t), self.count)

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
        count: of parts; it divides the number of examples of a batch. At least the number of processes.

    >>> import torch
    >>> shards(torch.arange(6), 3).parts
    [tensor([0, 1]), tensor([2, 3]), tensor([4, 5])]
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BilevelError(f"shards(…, count={count!r}) is not a number of parts; pass an int ≥ 1.")
    return ShardedSampler(source, count) if callable(source) else cut(source, count)


def cut(batch: Tree, count: int) -> Shards:
    examples = number_of_examples(batch)
    if examples % count:
        raise BilevelError(
            f"A batch of {examples} examples cannot be cut into {count} parts of equal size, and with others the mean "
            f"over the parts is not the mean over the batch. Pass a batch size that {count} divides."
        )
    size = examples // count
    return Shards([trees.map(lambda leaf, i=i: leaf[i * size : (i + 1) * size], batch) for i in range(count)])


def parts_of(batch: Tree) -> list[Tree]:
    """The parts of a batch; the batch itself where it is not cut."""
    return batch.parts if isinstance(batch, Shards) else [batch]
