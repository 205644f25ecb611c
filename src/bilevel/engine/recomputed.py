"""Functions with a given value and gradient, whose further derivatives are computed when they are needed.

torch differentiates an `autograd.Function` as often as its backward pass can be differentiated. Here the backward pass
is a `Recomputed` function, whose backward pass is one again: derivatives of every order exist, and cost nothing until
they are used. The functions themselves are called with plain tensors, also under `torch.func.grad` and `vmap`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import TorchFunctionMode

from bilevel import trees
from bilevel.engine.calls import refuse_other_result
from bilevel.errors import BilevelError

Tensors = tuple[Tensor, ...]


class Evaluated(Protocol):
    """A scalar function of tensors, of which the first ones are data and the others variables."""

    def evaluate(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Its value and its gradient in the variables."""

    def record(self, *tensors: Tensor) -> Tensor:
        """Its value with a graph that torch can differentiate any number of times."""


@dataclass(frozen=True)
class PullBack:
    """(data, x, c) ↦ c · ∂function/∂x, by running the function; with a graph if gradients are enabled.

    Args:
        function: from tensors to a tuple of tensors.
        data: how many of its inputs, the first ones, are not differentiated.
        variables: how many follow them.
    """

    function: Callable[..., Tensors]
    data: int
    variables: int

    def __call__(self, *tensors: Tensor) -> Tensors:
        end = self.data + self.variables
        points, cotangents = tensors[self.data : end], tensors[end:]
        recorded = torch.is_grad_enabled()
        if not recorded:
            # One input may be computed from another in the caller's graph. That path must not count here.
            points = tuple(point.detach().requires_grad_() for point in points)
        with torch.enable_grad():
            outputs = self.function(*tensors[: self.data], *points)
        pairs = [(out, c) for out, c in zip(outputs, cotangents, strict=True) if out.requires_grad]
        if not pairs:
            return tuple(torch.zeros_like(point) for point in points)
        heads, given = zip(*pairs, strict=True)
        parts = torch.autograd.grad(heads, points, given, create_graph=recorded, allow_unused=True)
        return tuple(torch.zeros_like(x) if part is None else part for x, part in zip(points, parts, strict=True))


class WithKnownGradient(Function):
    """`WithKnownGradient.apply(function, data, *tensors)` returns the value of an `Evaluated` function and its
    gradient. The first `data` tensors are data.

    The gradient has no derivatives here. It is an output only because torch requires it.
    """

    @staticmethod
    def forward(function: Evaluated, data: int, *tensors: Tensor) -> Tensors:
        value, slopes = function.evaluate(*tensors)
        return value, *slopes

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.function, ctx.data, *tensors = inputs
        ctx.value, ctx.slopes = output[0].detach(), output[1:]
        ctx.mark_non_differentiable(*ctx.slopes)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *ctx.slopes)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, *_: None) -> tuple[Any, ...]:
        no_gradients = [None] * (2 + ctx.data)
        if cotangent is None:
            return *no_gradients, *[None] * len(ctx.slopes)
        if not torch.is_grad_enabled():
            # The inputs are not used: the caller may have changed them in place since.
            return *no_gradients, *(cotangent * slope for slope in ctx.slopes)
        saved, function = ctx.saved_tensors, ctx.function  # inside torch.utils.checkpoint they can be read once
        count = len(saved) - len(ctx.slopes)
        tensors, slopes = saved[:count], saved[count:]
        known = None if torch.func.debug_unwrap(ctx.value, recurse=False) is not ctx.value else ctx.value

        def record(*inputs: Tensor) -> Tensors:
            value = function.record(*inputs)
            if known is not None:
                refuse_other_result([known], [value])
            return (value,)

        pull_back = PullBack(record, ctx.data, count - ctx.data)
        pulled = [cotangent * slope for slope in slopes]
        return *no_gradients, *recomputed(pull_back, ctx.data, len(pulled), *tensors, cotangent, *pulled)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensors, tuple[int, ...]]:
        return _one_by_one(WithKnownGradient, info, in_dims, inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _no_forward_mode()


class Recomputed(Function):
    """`Recomputed.apply(function, data, known, *tensors)` is function(*tensors), a tuple of tensors that is computed
    again when its derivatives are needed.

    If the outputs are known already, they are passed as the last `known` tensors.
    """

    @staticmethod
    def forward(function: Callable[..., Tensors], data: int, known: int, *tensors: Tensor) -> Tensors:
        return tuple(tensor.clone() for tensor in tensors[-known:]) if known else function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.function, ctx.data, ctx.known, *tensors = inputs
        ctx.save_for_backward(*tensors[: len(tensors) - ctx.known])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        pull_back = PullBack(ctx.function, ctx.data, len(tensors) - ctx.data)
        slopes = recomputed(pull_back, ctx.data, 0, *tensors, *cotangents)
        return *[None] * (3 + ctx.data), *slopes, *[None] * ctx.known

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensors, tuple[int, ...]]:
        return _one_by_one(Recomputed, info, in_dims, inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _no_forward_mode()


# torch binds arguments to this signature at every call. Without this line Python builds it each time (40 µs).
WithKnownGradient.forward.__signature__ = inspect.signature(WithKnownGradient.forward)  # type: ignore[attr-defined]


def recomputed(*inputs: Any) -> Tensors:
    return Recomputed.apply(*inputs)  # type: ignore[no-untyped-call]


def _one_by_one(
    function: type[Function], info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]
) -> tuple[Tensors, tuple[int, ...]]:
    """`torch.func.vmap` as a loop, because the code that runs may depend on the numbers."""
    apply: Any = function.apply
    rows = [
        apply(*(x if dim is None else x.select(dim, index) for x, dim in zip(inputs, in_dims, strict=True)))
        for index in range(info.batch_size)
    ]
    outputs = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    return outputs, (0,) * len(outputs)


def refuse_forward_mode(tree: trees.Tree) -> None:
    """Refuse tensors with tangents of `torch.autograd.forward_ad`, which would be lost."""
    unpack: Any = unpack_dual
    if any(unpack(leaf).tangent is not None for leaf in trees.tensors(tree)):
        _no_forward_mode()


def _no_forward_mode() -> NoReturn:
    # torch has hooks for forward mode, but silently drops the second of two nested forward derivatives.
    raise BilevelError(
        "objective(…) was differentiated in forward mode (torch.func.jvp, jacfwd, hessian), which it does not have. "
        "Use reverse mode: torch.func.grad or jacrev, and for a Hessian torch.func.jacrev(torch.func.jacrev(f)) or "
        "torch.autograd.functional.hessian(f, lam)."
    )


def under_torch_func() -> bool:
    """Whether this is called within `torch.func.grad`, `vmap` or another of torch's transforms.

    There, `requires_grad_` raises an error, which is the only public sign of a transform.
    """
    try:
        torch.empty(0).requires_grad_()
    except RuntimeError:
        return True
    return False


class NoOtherTensors(TorchFunctionMode):
    """Refuse tensors that `torch.func` differentiates and that are not inputs of the function.

    The function runs below torch's transforms, where such a tensor is a constant: its gradient would silently be zero.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in trees.tensors((args, kwargs)):
            if torch.func.debug_unwrap(leaf, recurse=False) is not leaf:
                raise BilevelError(
                    "A tensor that torch.func.grad or vmap hands to your function reaches objective(…) through a "
                    "closure, where it has no gradient. Make it a leaf of λ, or for vmap part of the task."
                )
        return func(*args, **(kwargs or {}))
