"""One split into training and validation data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.problem import Task
from bilevel.trees import Tree


def holdout(data: Tree, fraction: float = 0.5, seed: int | None = 0) -> Task:
    """Hold out a `fraction` of the examples for the outer objective (Section 2.1).

    Args:
        data: a tree of tensors whose first axis counts examples.
        fraction: the share that goes to `task.val`.
        seed: the seed of the shuffle before the split; None keeps the order.

    >>> task = holdout((torch.arange(10),), fraction=0.3)
    >>> len(task.train[0]), len(task.val[0])
    (7, 3)
    """
    count = number_of_examples(data)
    held = round(count * fraction)
    if not 0 < held < count:
        raise BilevelError(
            f"holdout(fraction={fraction}) of {count} examples leaves {count - held} for training and {held} for "
            "validation; both need one."
        )
    order = shuffled(count, seed)
    return Task(train=take(data, order[held:]), val=take(data, order[:held]))


def number_of_examples(data: Tree) -> int:
    """The length of the first axis, which all tensors of `data` must share."""
    lengths = {len(leaf) if leaf.ndim else 0 for leaf in trees.tensors(data)}
    if len(lengths) != 1 or 0 in lengths:
        raise BilevelError(
            "Every tensor of the data must have one entry per example along its first axis, but these are "
            f"{trees.describe(data)}."
        )
    return lengths.pop()


def shuffled(count: int, seed: int | None) -> Tensor:
    """0…count − 1 in a random order, or in their own order without a seed."""
    # On the CPU, where the generator is, also if the user's default device is another.
    if seed is None:
        return torch.arange(count, device="cpu")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")


def take(data: Tree, rows: Any) -> Tree:
    return trees.map(lambda leaf: leaf[rows.to(leaf.device)], data)
