"""Compare the derivatives of init, of encode, and of a dynamics that is a function of λ, with differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
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


def check_part(process: Process, state: State, after: State, name: str) -> None:
    """Refuse a problem whose init, encode, or function of λ for the dynamics hides a derivative.

    It costs one recorded call of that function, and two calls for each of up to four leaves of λ. A step size may be
    computed from a detached λ, as it often is from curvatures. But then λ must have another effect.

    Args:
        process: what will be differentiated.
        state, after: its start, and the state after one step.
        name: "init", "encode" or "dynamics".
    """
    objectives = Objectives(process, state[0])
    function = partial({"init": _start, "encode": _encoded, "dynamics": _settings}[name], objectives)
    ends = trees.leaves(state[0]), trees.leaves(trees.detach(after[0]))

    def compare(function: Callable[[Tensors], Tensors]) -> Disagreement | None:
        return find_disagreement(objectives, function, lambda x: _sum(function(x)), ends)

    try:
        disagreement = compare(function)
        if disagreement is not None and name == "dynamics":
            used = _used_entries(objectives, ends)
            held = [None] * objectives.count + [x.detach() for x in process.variables]

            def of_the_others(tensors: Tensors) -> Tensors:
                """The settings as functions of the entries of λ that have no other effect."""
                rest = zip(tensors, held, used, strict=True)
                return function([x if y is None else torch.where(mask, y.to(x), x) for x, y, mask in rest])

            disagreement = compare(of_the_others)
    except Undefined as error:
        raise BilevelError(f"{name} cannot be differentiated. torch says: {str(error).rstrip('.')}.") from error
    if disagreement is not None:
        raise BilevelError(
            f"The derivatives of {name} are not what autograd says: with respect to {disagreement.group}, along a "
            f"random direction, the derivative is {disagreement.by_autograd:.6g} by autograd and "
            f"{disagreement.found:.6g} by differences. Something in {name} hides it: float(…), .item(), .detach() or "
            "torch.no_grad() around what depends on λ, or a custom autograd.Function with an incomplete backward. "
            "Write it in differentiable operations. If you mean it, pass check_derivatives=False to Problem or tune."
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


def _settings(objectives: Objectives, tensors: Tensors) -> Tensors:
    """The numbers among the settings of the dynamics at λ, and where its first and last step lead from a fixed state.

    The steps take the place of the functions among the settings. Their loss does not depend on λ.
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
        after = [dynamics.step(loss, *state, t) for t in {process.times[0], process.times[-1]}]
    except (*FAILURES, AttributeError, KeyError):
        after = []  # the step needs another loss
    return _numbers(dynamics) + [leaf for leaf in trees.tensors(after) if trees.is_variable(leaf)]


def _sum(outputs: Tensors) -> Tensor:
    return torch.stack([out.sum() for out in outputs]).sum()


def _used_entries(objectives: Objectives, ends: tuple[Tensors, Tensors]) -> list[Tensor]:
    """Which entries of w and of the variables have a derivative in ∇_w L, E, the start or the settings."""
    point = next(points(objectives.process, ends, None))
    live = [x.detach().requires_grad_() for x in point.tensors]
    functions = objectives.slope, objectives.value, partial(_start, objectives), partial(_settings, objectives)
    used = [torch.zeros_like(x, dtype=torch.bool) for x in live]
    for function in functions:
        with torch.enable_grad():
            outputs = function(live)
            total = sum((u * out).sum() for u, out in zip(weights(outputs, point), outputs, strict=True))
        if isinstance(total, Tensor) and total.requires_grad:
            grads = torch.autograd.grad(total, live, allow_unused=True, materialize_grads=True)
            used = [mask | (grad != 0) for mask, grad in zip(used, grads, strict=True)]
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
