"""Compare the derivatives of init, of encode, and of a dynamics that is a function of λ, with differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bilevel import trees
from bilevel.dynamics import Dynamics
from bilevel.dynamics.step_function import StepFunction
from bilevel.engine.derivatives import (
    FAILURES,
    Disagreement,
    Noise,
    Objectives,
    Tensors,
    Undefined,
    cast,
    find_disagreement,
    points,
    weights,
)
from bilevel.engine.double_backward import eagerly
from bilevel.engine.limits import trial_loss
from bilevel.engine.process import Process, State
from bilevel.errors import BilevelError

Part = Callable[[Tensors], Tensors]


def check_part(
    process: Process,
    state: State,
    after: State,
    name: str,
    derived: Callable[[Part], Part] | None = None,
    detach_in_steps: bool = True,
) -> None:
    """Refuse a problem whose init, encode, or function of λ for the dynamics hides a derivative.

    It costs one recorded call of that function, and two calls for each of up to four leaves of λ. A step size may be
    computed from a detached λ, as it often is from curvatures. But then λ must have another effect.

    Args:
        process: what will be differentiated.
        state, after: its start, and the state after one step.
        name: "init", "encode" or "dynamics".
        derived: from that function to the one whose derivatives are compared: its gradient, for second derivatives.
        detach_in_steps: whether a step that the user wrote may call `detach()` on what depends on w, as first-order
            MAML does. The derivatives are then those of the steps with a constant in its place.
    """
    objectives = Objectives(process, state[0])
    function: Part = partial({"init": _start, "encode": _encoded, "dynamics": _settings}[name], objectives)
    ends = trees.leaves(state[0]), trees.leaves(trees.detach(after[0]))

    def compare(function: Part) -> Disagreement | None:
        compared = function if derived is None else derived(function)
        return find_disagreement(objectives, compared, lambda x: _sum(function(x)), ends)

    def of_other_entries(function: Part) -> Part:
        """The settings as a function of the entries of λ that have no other effect."""
        used = _used_entries(objectives, ends, derived is not None)
        held = [None] * objectives.count + [x.detach() for x in process.variables]

        def of_tensors(tensors: Tensors) -> Tensors:
            rest = zip(tensors, held, used, strict=True)
            return function([x if y is None else torch.where(mask, y.to(x), x) for x, y, mask in rest])

        return of_tensors

    def of_w(tensors: Tensors) -> Tensors:
        """The steps as a function of w, with a `detach()` that does nothing."""
        held = [x.detach().to(tensors[0].dtype) for x in process.variables]
        return _settings(objectives, tensors[: objectives.count] + held, detached=False)

    try:
        disagreement = compare(function)
        if disagreement is not None and name == "dynamics":
            disagreement = compare(of_other_entries(function))
        if disagreement is not None and name == "dynamics" and detach_in_steps:
            of_lam = of_other_entries(partial(_settings, objectives, moved=False))
            disagreement = compare(of_lam) or compare(of_w)
    except Undefined as error:
        raise BilevelError(f"{name} cannot be differentiated. torch says: {str(error).rstrip('.')}.") from error
    if disagreement is not None:
        raise BilevelError(
            f"The {'' if derived is None else 'second '}derivatives of {name} are not what autograd says: with respect "
            f"to {disagreement.group}, along a random direction, the derivative is {disagreement.by_autograd:.6g} by "
            f"autograd and {disagreement.found:.6g} by differences. Something in {name} hides it: float(…), .item(), "
            ".detach() or torch.no_grad() around what depends on w or λ, torch.autograd.grad without "
            "create_graph=True, or a custom autograd.Function with an incomplete backward. Write it in differentiable "
            "operations; for ∇L in a step use bilevel.gradient(loss, w). If you mean it, pass check_derivatives=False "
            "to Problem or tune."
        )


def _start(objectives: Objectives, tensors: Tensors) -> Tensors:
    """init(λ)."""
    return trees.tensors(objectives.process.bind(tensors[objectives.count :]).start()[0])


def _encoded(objectives: Objectives, tensors: Tensors) -> Tensors:
    """The floating tensors of encode(λ, task)."""
    process, first = objectives.process, objectives.count
    assert process.problem.encode is not None
    lam = process.lam_spec.unflatten(tensors[first : first + process.outer_count])
    with eagerly():  # compiled code would be compiled again for tensors of another precision
        task = process.problem.encode(lam, cast(process.task, tensors[0].dtype))
    return [leaf for leaf in trees.tensors(task) if trees.is_variable(leaf)]


def _settings(objectives: Objectives, tensors: Tensors, moved: bool = True, detached: bool = True) -> Tensors:
    """The numbers among the settings of the dynamics at λ, and where its first and last step lead from a fixed state.

    The steps take the place of the functions among the settings. Their loss does not depend on λ. If the user wrote the
    step and `moved`, the state depends on w. Without `detached`, a `detach()` in the steps does nothing.
    """
    process, variables = objectives.process, tensors[objectives.count :]
    dynamics = process.bind(variables).dynamics
    try:
        with torch.no_grad():
            fixed = process.bind([x.detach().to(tensors[0].dtype) for x in process.variables]).dynamics
            noise = Noise(2)
            w = trees.map(lambda x: noise(x.to(tensors[0].dtype)), process.bound.start()[0])
            loss, state = trial_loss(w, [noise(x) for x in trees.leaves(w)]), (w, fixed.init(w))
            # Some settings have no effect on the first steps: a momentum on no velocity.
            for _ in range(2):
                state = fixed.step(loss, *state, process.times[0])
        if moved and has_code_of_the_user(dynamics):
            state = _moved(state, tensors[: objectives.count])
        with nullcontext() if detached else NoDetach():
            after = [dynamics.step(loss, *state, t) for t in {process.times[0], process.times[-1]}]
    except (*FAILURES, AttributeError, KeyError):
        if not detached:  # numpy() needs a detached tensor
            return _settings(objectives, tensors, moved)
        after = []  # the step needs another loss
    return _numbers(dynamics) + [leaf for leaf in trees.tensors(after) if trees.is_variable(leaf)]


class NoDetach(TorchFunctionMode):
    """Inside the block `Tensor.detach` returns the tensor with its graph, where a graph is recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach and torch.is_grad_enabled():
            return args[0]
        return func(*args, **(kwargs or {}))


def _moved(state: State, by: Tensors) -> State:
    """The state moved by tensors like w, so that every number in it depends on them."""
    mean = torch.stack([x.mean() for x in by if x.numel()]).mean()
    leaves, spec = trees.flatten(state[0])
    auxiliary = trees.map(lambda x: x * (1 + mean) if trees.is_variable(x) else x, state[1])
    return spec.unflatten(x + y for x, y in zip(leaves, by, strict=True)), auxiliary


def has_code_of_the_user(dynamics: Any) -> bool:
    """Whether a step runs code from outside of this package: a step function, a class, a penalty or a constraint.

    Of functions of t and of torch's optimisers nothing is asked: they cannot hide a derivative in w.
    """
    if isinstance(dynamics, StepFunction):
        return True
    parts = [
        x for x in vars(dynamics).values() if isinstance(x, Dynamics) or hasattr(x, "prox") or hasattr(x, "project")
    ]
    return not type(dynamics).__module__.startswith("bilevel.") or any(map(has_code_of_the_user, parts))


def _sum(outputs: Tensors) -> Tensor:
    return torch.stack([out.sum() for out in outputs]).sum()


def _used_entries(objectives: Objectives, ends: tuple[Tensors, Tensors], only_elsewhere: bool) -> list[Tensor]:
    """Which entries of w and of the variables have a derivative in ∇_w L, E, the start or the settings; with
    `only_elsewhere`, those that have none in the settings."""
    point = next(points(objectives.process, ends, None))
    live = [x.detach().requires_grad_() for x in point.tensors]
    settings = partial(_settings, objectives)
    functions: tuple[Part, ...] = objectives.slope, objectives.value, partial(_start, objectives), settings
    used = [torch.zeros_like(x, dtype=torch.bool) for x in live]
    for function in functions:
        with torch.enable_grad():
            outputs = function(live)
            total = sum((u * out).sum() for u, out in zip(weights(outputs, point), outputs, strict=True))
        if isinstance(total, Tensor) and total.requires_grad:
            grads = torch.autograd.grad(total, live, allow_unused=True, materialize_grads=True)
            used = [mask | (grad != 0) for mask, grad in zip(used, grads, strict=True)]
            if only_elsewhere and function is settings:
                used = [mask & (grad == 0) for mask, grad in zip(used, grads, strict=True)]
    return used


def _numbers(value: Any) -> Tensors:
    """The floating numbers in a dynamics and in the dynamics that it is made of, as tensors. Functions are left out."""
    if isinstance(value, Tensor):
        return [value] if trees.is_variable(value) else []
    if isinstance(value, float):
        return [torch.tensor(value, dtype=torch.float64, device="cpu")]
    if isinstance(value, Mapping):
        return [number for item in value.values() for number in _numbers(item)]
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in _numbers(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [number for f in fields(value) for number in _numbers(getattr(value, f.name))]
    return []
