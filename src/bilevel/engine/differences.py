"""Second derivatives of the inner objective by central differences of its gradients.

The steps of any dynamics can then be differentiated although the inner objective is differentiated once only. The
Hessian of L in (w, λ) is symmetric, so its product with a cotangent u of ∇_w L is the derivative of ∇L along u:

    ∇²L (u, 0) ≈ (∇L(w + h u, λ) − ∇L(w − h u, λ)) / (2 h),   with an error of order h².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bilevel import trees
from bilevel.engine.process import Bound, Process
from bilevel.trees import Tree

Tensors = tuple[Tensor, ...]


class BoundByDifferences(Bound):
    """The maps of a process, in which the gradient of L is differentiated by differences of this relative width."""

    def __init__(self, process: Process, width: float | None) -> None:
        super().__init__(process, process.bound.lam, process.bound.task)
        self.variables, self.width = process.variables, width

    def loss(self, t: int) -> Callable[[Tree], Tensor]:
        plain = super().loss(t)

        def loss(w: Tree) -> Tensor:
            leaves, spec = trees.flatten(w)
            call = _DifferencedCall(lambda parts: plain(spec.unflatten(parts)), self.variables, self.width)
            value: Tensor = _Value.apply(call, *leaves, *self.variables)  # type: ignore[no-untyped-call]
            return value

        return loss


class _DifferencedCall:
    """L as a function of the leaves of w, and its gradients in them and in the variables."""

    def __init__(self, loss: Callable[[Sequence[Tensor]], Tensor], variables: list[Tensor], width: float | None):
        self.loss, self.variables, self.width = loss, variables, width

    def value(self, w: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return self.loss([leaf.detach() for leaf in w])

    def slope(self, w: Sequence[Tensor]) -> Tensors:
        """∇L in the leaves of w, then in the variables; zero where there is none."""
        live = [leaf.detach().requires_grad_() for leaf in w]
        inputs = [*live, *self.variables]
        with torch.enable_grad():
            value = self.loss(live)
        parts = torch.autograd.grad(value, inputs, allow_unused=True)
        return tuple(torch.zeros_like(x) if part is None else part for x, part in zip(inputs, parts, strict=True))

    def product(self, w: Sequence[Tensor], u: Sequence[Tensor]) -> Tensors:
        """∇²L (u, 0), by two gradients."""
        size = float(trees.norm(list(u)))
        if not size > 0:
            return tuple(torch.zeros_like(x) for x in (*w, *self.variables))
        width = self.width if self.width is not None else torch.finfo(w[0].dtype).eps ** (1 / 3)
        h = width * (1 + float(trees.norm(list(w)))) / size
        with torch.no_grad():
            above, below = (self.slope([x + sign * h * v for x, v in zip(w, u, strict=True)]) for sign in (1, -1))
            return tuple((a - b) / (2 * h) for a, b in zip(above, below, strict=True))


class _Value(Function):
    """`_Value.apply(call, *w, *variables)` is L; its derivative is `_Slope`."""

    @staticmethod
    def forward(ctx: Any, call: _DifferencedCall, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.value(tensors[: len(tensors) - len(call.variables)])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        slopes = _Slope.apply(ctx.call, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, *(cotangent * slope for slope in slopes)


class _Slope(Function):
    """`_Slope.apply(call, *w, *variables)` is ∇L in all of them; the part in w can be differentiated once more."""

    @staticmethod
    def forward(ctx: Any, call: _DifferencedCall, *tensors: Tensor) -> Tensors:
        ctx.call, ctx.count = call, len(tensors) - len(call.variables)
        ctx.save_for_backward(*tensors[: ctx.count])
        slopes = call.slope(tensors[: ctx.count])
        ctx.mark_non_differentiable(*slopes[ctx.count :])
        return slopes

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return None, *ctx.call.product(ctx.saved_tensors, cotangents[: ctx.count])
