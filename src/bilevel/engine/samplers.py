"""Checks of a task and of a `train` that is a function of t."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from inspect import isroutine
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bilevel import trees
from bilevel.engine.graphs import reached
from bilevel.engine.process import Process
from bilevel.engine.user_functions import call_user, what_is
from bilevel.errors import BilevelError
from bilevel.problem import Task
from bilevel.trees import Tree


def check_task(task: Any) -> None:
    if not isinstance(task, Task):
        raise BilevelError(f"A task must be a bilevel.Task(train, val), but it is {what_is(task)}.")
    if callable(task.val):
        raise BilevelError(
            "task.val is a function, and the outer objective is evaluated on one batch here. Pass one of its batches, "
            "such as task.val(1); solve(...) draws another batch in every hyperiteration."
        )
    for name, tree in (("train", task.train), ("val", task.val)):
        refuse_loader(name, tree)
        for index, leaf in enumerate(trees.leaves(tree)):
            if isinstance(leaf, Tensor) and leaf.numel() == 0:
                where = trees.paths(tree)[index]
                raise BilevelError(
                    f"The task is empty: task.{name}{where} has shape {list(leaf.shape)}, with no examples. Pass at "
                    "least one."
                )


def refuse_loader(name: str, given: Any) -> None:
    """Refuse a loader, a data set or an iterator in the place of a batch or of a function."""
    if isinstance(given, (DataLoader, Dataset, Iterator)) and not callable(given):
        raise BilevelError(
            f"task.{name} is a {type(given).__name__}, but steps are replayed, so that batches must be drawn by their "
            "number. Pass all the data as tensors, bilevel.Minibatches((inputs, targets), size), or a pure function "
            "of the number that returns a batch. tune(...) takes loaders and data sets."
        )


def check_sampler(process: Process) -> None:
    """Check that `train(t)` gives the same batch whenever it is called; once per sampler."""
    task, sampler, known = process.bound.task, process.task.train, process.memory.samplers
    if not callable(task.train) or not process.steps:
        return
    if id(sampler) in known and known[id(sampler)]() is sampler:
        return
    first, last = process.times[0], process.times[-1]
    one = call_user("task.train", task.batch, first)
    check_task(Task(one, task.val))
    before = trees.map(_copied, one)
    call_user("task.train", task.batch, last)
    if not same(before, one):
        raise BilevelError(
            f"task.train writes every batch into the same memory: train({last}) changed the batch that train({first}) "
            "had returned. Steps keep their batches for the derivative, which would be computed with the numbers of "
            "later ones. Return new tensors: X[index] instead of np.take(X, index, out=buffer)."
        )
    # Two and three calls after the first one, so that a sampler that alternates between two batches is refused too.
    again, once_more = (call_user("task.train", task.batch, first) for _ in range(2))
    if not (same(one, again) and same(one, once_more)):
        raise BilevelError(
            f"task.train is not a pure function of t: train({first}) gave two different batches. Hypergradients replay "
            "steps, so a sampler with hidden state makes them wrong. Draw the batch from t, for example with "
            "torch.Generator().manual_seed(t), or use bilevel.Minibatches(data, size)."
        )
    if reached(trees.leaves(one), process.variables[: process.outer_count]):
        raise BilevelError(
            "encode returned a task whose `train` is a function that closes over tensors made from λ; their gradient "
            "would be lost. Let train be a bilevel.Minibatches over the encoded data, or a batch."
        )
    with contextlib.suppress(TypeError):
        # A weak reference, because a sampler may hold a whole data set. A sampler without one is checked every time.
        known[id(sampler)] = weakref.ref(sampler)


def check_draws(name: str, sampler: Any, count: int | None = None, last: int = 13) -> None:
    """Check that `task.train` or `task.val`, if it is a function, is a pure function of its argument, and uses it.

    `count` is the number of different batches, where it is known, and `last` the largest argument that will be used.
    """
    if not callable(sampler):
        refuse_loader(name, sampler)
        return
    numbers = [number for number in (1, 2, 3, 5, 8, 13) if number <= max(last, 1)]
    drawn = [call_user(f"task.{name}", sampler, number) for number in numbers]
    for batch in drawn[:1]:
        check_task(Task(batch, batch))
    if not all(same(batch, sampler(number)) for number, batch in zip(numbers[:2], drawn, strict=False)):
        raise BilevelError(
            f"task.{name} is not a pure function of its argument: {name}(1) gave two different batches. Draw the batch "
            "from the argument, for example with torch.Generator().manual_seed(k), or use bilevel.Minibatches(data, "
            "size). A run could not be resumed or repeated otherwise."
        )
    if count != 1 and len(numbers) > 2 and all(same(drawn[0], other) for other in drawn[1:]):
        *most, final = map(str, numbers)
        raise BilevelError(
            f"task.{name} is a biased sampler: it gave the same batch for the arguments {', '.join(most)} and {final}, "
            "so the other data would never be seen. Use its argument, as bilevel.Minibatches(data, size) does; or, if "
            f"this batch is all the data, pass the batch itself as {name}."
        )


def refuse_one_batch(sampler: Any, steps: int) -> None:
    """Refuse a function or a method that gives the same batch for all of the first steps; objects are trusted."""
    if not (isroutine(sampler) or isinstance(sampler, partial)) or steps < 3:
        return
    first, *others = (call_user("task.train", sampler, t) for t in (1, 2, 3))
    if all(same(first, other) for other in others):
        raise BilevelError(
            "task.train is a biased sampler: it gave the same batch for t = 1, 2 and 3, so the other data would never "
            "be seen. Use its argument, as bilevel.Minibatches(data, size) does; or, if this batch is all the data, "
            "pass the batch itself as train."
        )


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def same(one: Tree, two: Tree) -> bool:
    """Whether two batches hold the same numbers."""
    left, right = trees.flatten(one), trees.flatten(two)
    if left[1] != right[1]:
        return False
    for a, b in zip(left[0], right[0], strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or not bool(((a == b) | ((a != a) & (b != b))).all()):
                return False
        elif a is not b and not bool(np.all(np.asarray(a == b))):
            return False
    return True
