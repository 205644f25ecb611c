"""Derivatives beyond the second: operations whose third derivative is wrong in torch, and a check of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bilevel import trees
from bilevel.dynamics import Dynamics
from bilevel.engine.derivatives import Noise, Objectives, Tensors, compare_with_differences
from bilevel.engine.double_backward import TwiceDifferentiable, eagerly
from bilevel.engine.hidden_derivatives import check_part
from bilevel.engine.memory import kind_of
from bilevel.engine.process import Process


class AnyOrder(TorchFunctionMode):
    """Inside this mode, normalisations have correct derivatives of every order.

    torch saves the mean and the variance of a batch for the backward pass and treats them as constants in the formula
    of the second derivative. The third one, which a Hessian of f_T is made of, then misses their part, without an error
    (torch 2.13: batch, instance and layer norm).
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written_out = WRITTEN_OUT.get(func)
        result = None if written_out is None else written_out(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Running averages are not updated: the step that is differentiated has been run before."""
    if not training:
        return None
    return _normalised(x, [i for i in range(x.ndim) if i != 1], eps, 1, weight, bias)


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    return _normalised(x, range(2, x.ndim), eps, 1, weight, bias) if use_input_stats else None


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    first = x.ndim - len(normalized_shape)
    return _normalised(x, range(first, x.ndim), eps, first, weight, bias)


def _normalised(
    x: Tensor, axes: Sequence[int], eps: float, first: int, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """(x − mean)/√(variance + ε) over the axes; weight and bias begin at the axis `first`."""
    axes = list(axes)
    centred = x - x.mean(axes, keepdim=True)
    y = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()

    def shaped(values: Tensor) -> Tensor:
        return values.reshape(values.shape + (1,) * (x.ndim - first - values.ndim))

    if weight is not None:
        y = y * shaped(weight)
    return y if bias is None else y + shaped(bias)


WRITTEN_OUT: dict[Any, Callable[..., Tensor | None]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.layer_norm: _layer_norm,
}


@contextmanager
def any_order() -> Iterator[None]:
    """The context in which functions of a problem are recorded, to be differentiated any number of times."""
    # `encode` too, which otherwise runs outside of `TwiceDifferentiable`, because it is differentiated once.
    with eagerly(), TwiceDifferentiable(), AnyOrder():
        yield


def check_higher_derivatives(process: Process) -> None:
    """Refuse a problem whose third derivatives of L, or second ones of E, of init, of encode or of the dynamics as a
    function of λ, are not what autograd says.

    They are compared with differences like the lower ones (`derivatives.py`), once for each kind of call.
    """
    task = process.bound.task
    key = ("any order", kind_of(process.variables), kind_of([task.train, task.val]))
    if not process.problem.check_derivatives or key in process.memory.derivatives:
        return
    with any_order():
        _check(process)
    process.memory.derivatives[key] = True


def _check(process: Process) -> None:
    with torch.no_grad():
        state = process.bound.start()
        after = process.bound.step(state, process.times[0]) if process.steps else state
    objectives = Objectives(process, state[0])
    ends = trees.leaves(state[0]), trees.leaves(trees.detach(after[0]))
    if process.steps and process.problem.fixed_point is None:
        products = _gradients(lambda tensors: _paired(objectives.slope(tensors)))
        compare_with_differences("inner", "third", products, objectives.loss, objectives, ends)
    slopes = _gradients(lambda tensors: objectives.value(tensors)[0])
    compare_with_differences("outer", "second", slopes, lambda tensors: objectives.value(tensors)[0], objectives, ends)
    used = {"init": True, "encode": bool(process.encoded), "dynamics": not isinstance(process.source, Dynamics)}
    for name in used:
        if used[name]:
            check_part(process, state, after, name, lambda part: _gradients(lambda tensors: _paired(part(tensors))))


def _paired(outputs: Tensors) -> Tensor:
    """The outputs times fixed random numbers."""
    noise = Noise(1)
    return sum(((x * noise(x)).sum() for x in outputs), torch.zeros(()))


def _gradients(scalar: Callable[[Tensors], Tensor]) -> Callable[[Tensors], Tensors]:
    """The gradient of a function of tensors in all of them, with a graph if gradients are enabled."""

    def slopes(tensors: Tensors) -> Tensors:
        recorded = torch.is_grad_enabled()
        points = tensors if recorded else [x.detach().requires_grad_() for x in tensors]
        with torch.enable_grad():
            value = scalar(points)
            if not value.requires_grad:
                return [torch.zeros_like(x) for x in tensors]
            parts = torch.autograd.grad(value, points, create_graph=recorded, allow_unused=True)
        return [torch.zeros_like(x) if part is None else part for part, x in zip(parts, points, strict=True)]

    return slopes
