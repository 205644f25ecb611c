"""What surrounds a call: its arguments for each task, the result that it continues, data that must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel import trees
from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.engine.user_functions import what_is
from bilevel.errors import BilevelError
from bilevel.problem import Task
from bilevel.trees import Tree


def one_each(value: Any, tasks: list[Task], given: Any, name: str) -> list[Any]:
    """The value of an argument for each task, where `given` is what was passed as the task or tasks."""
    if not isinstance(given, (list, tuple)):
        if isinstance(value, Hypergradient) and value.tasks:
            raise BilevelError(
                f"{name} is a result for a list of tasks, but one task was passed. Pass one of its `.tasks`."
            )
        return [value]
    if value is None:
        return [None] * len(tasks)
    if isinstance(value, Hypergradient):
        value = value.tasks
    if not isinstance(value, (list, tuple)) or len(value) != len(tasks):
        raise BilevelError(f"{name} must be a list with one entry for each of the {len(tasks)} tasks.")
    return list(value)


def check_adjoint(adjoint: Any) -> None:
    """Refuse what no result has as its adjoint. Besides tensors, some methods keep objects of their own there."""
    if isinstance(adjoint, (int, float, complex, str, list, tuple, dict, np.ndarray, Hypergradient)):
        raise BilevelError(
            f"adjoint is {what_is(adjoint)}, and no start of a linear solver. Pass the `.adjoint` of an earlier result "
            "for one task, a list of these for a list of tasks, or leave it out."
        )


def check_continued(process: Process) -> None:
    """Refuse to continue a result without auxiliary variables, or with those of another dynamics."""
    previous, dynamics = process.previous, process.bound.dynamics
    if previous is None:
        return
    if previous.state is None:
        raise BilevelError(
            f"A result of {previous.stats.method} cannot be continued: it has no velocities. Compute it with Reverse() "
            "or Forward()."
        )
    # Older checkpoints do not say what dynamics their results are of.
    if previous.dynamics not in (None, dynamics.kind) and trees.leaves(previous.state[1]):
        raise BilevelError(
            f"start= is a result of {previous.dynamics}, and its auxiliary variables mean something else to "
            f"{dynamics.kind}. Pass its w_T, start=result.inner, or continue with the dynamics that it came from."
        )


def continued(process: Process) -> AbstractContextManager[None]:
    """The context in which a process runs that may continue an earlier result."""
    return contextlib.nullcontext() if process.previous is None else _explain_other_dynamics(process)


@contextlib.contextmanager
def _explain_other_dynamics(process: Process) -> Iterator[None]:
    """Explain an error in a run that continues with the auxiliary variables of another dynamics.

    They are not compared before the run: some dynamics add to them in the first step.
    """
    try:
        yield
    except BilevelError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        assert process.previous is not None and process.previous.state is not None
        w, state = process.previous.state
        dynamics = process.bound.dynamics
        if trees.flatten(state)[1] == trees.flatten(dynamics.init(w))[1]:
            raise
        raise BilevelError(
            f"start= is the result of another dynamics: its auxiliary variables are {trees.describe(state)}, which do "
            f"not fit {dynamics}. Pass its w_T, start=result.inner, or continue with the dynamics that it came from."
        ) from error


def own_saved_tensors() -> AbstractContextManager[Any]:
    """Inside this context, an enclosing `torch.utils.checkpoint` does not see the tensors that autograd saves.

    It counts them, and would compute its whole function again for the gradient of every inner step.
    """
    # There is no public way to ask for hooks. Those of others, such as save_on_cpu, are left in place.
    asked = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if asked is None else asked(False)
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def versions(tasks: Tree) -> tuple[int, ...]:
    """How often each tensor of the tasks has been changed in place. Tensors of inference mode cannot be changed."""
    return tuple(0 if leaf.is_inference() else leaf._version for leaf in trees.tensors(tasks))


def refuse_changed_data(tasks: Tree, before: tuple[int, ...]) -> None:
    """Refuse to compute derivatives on other data than the value was computed on."""
    if versions(tasks) != before:
        raise BilevelError(
            "A tensor of the task was changed in place between the call and its backward pass, which runs the steps "
            "again and would see the new numbers. Call backward() before the change, or pass a clone() of the tensor."
        )


def refuse_other_result(before: Sequence[Tensor], now: Sequence[Tensor]) -> None:
    """Refuse derivatives of a run that gave another result in the call."""
    for one, two in zip(before, now, strict=True):
        eps = torch.finfo(one.dtype).eps
        # Another method or another order of sums may round differently, and long runs amplify it.
        if not one.numel():
            continue
        gap, size = float((two.detach() - one).abs().max()), float(one.abs().max())
        if gap > eps**0.25 * size + 100 * eps:
            raise BilevelError(
                "The backward pass runs the steps again, and their result was different: the largest difference is "
                f"{gap:.3g}, in numbers up to {size:.3g}. Something that the functions or the data read besides their "
                "arguments has changed since the call: a number in a closure, an array, a sampler's data, a module. "
                "Call backward() before the change, or compute again."
            )
