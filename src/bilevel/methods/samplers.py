"""Checks of a task and of a `train` that is a function of t."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import numpy as np
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.methods.process import Process, call_user, reached, what_is
from bilevel.methods.verdicts import remember
from bilevel.problem import Task
from bilevel.trees import Tree


def check_task(task: Any) -> None:
    if not isinstance(task, Task):
        raise BilevelError(f"A task must be a bilevel.Task(train, val), but it is {what_is(task)}.")
    if callable(task.val):
        raise BilevelError(
            "task.val is a function, and the outer objective is evaluated on one batch. Pass the validation batch "
            "itself."
        )
    for name, tree in (("train", task.train), ("val", task.val)):
        for index, leaf in enumerate(trees.leaves(tree)):
            if isinstance(leaf, Tensor) and leaf.numel() == 0:
                where = trees.paths(tree)[index]
                raise BilevelError(
                    f"The task is empty: task.{name}{where} has shape {list(leaf.shape)}, with no examples. Pass at "
                    "least one."
                )


def check_sampler(process: Process) -> None:
    """`train(t)` must give the same batch whenever it is called; asked once per sampler."""
    task, sampler, memory = process.bound.task, process.task.train, process.problem.checked
    if not callable(task.train) or not process.steps:
        return
    known = memory.get(("sampler", id(sampler)))
    if known is not None and known["itself"]() is sampler:
        return
    first, last = process.times[0], process.times[-1]
    # An odd and an even number of calls apart, so that a sampler that cycles through two batches is noticed too.
    one, _, again, once_more = (call_user("task.train", task.batch, t) for t in (first, last, first, first))
    check_task(Task(one, task.val))
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
        # Weakly, because a sampler may hold a whole data set; what cannot be referred to weakly is checked every time.
        remember(memory, ("sampler", id(sampler)), {"itself": weakref.ref(sampler)})


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
