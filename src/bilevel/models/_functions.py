"""Layers as autograd functions that pass over memory less often than their parts would.

On a CPU a small convolutional network spends a quarter of its time outside its convolutions, reading and writing
activations. All functions are differentiable twice: where a graph of the gradient is asked for, it is made from the
same layer written in torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Gradients = tuple[Tensor | None, ...]


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, sizes: Sequence[int], rectify: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm of consecutive sets of examples, `sizes` of them, each by its own statistics; then max(0, ·) if asked.

    Returns the result, and the means and 1/√(variance + eps) of every set, which are without a graph.
    """
    # torch's kernel wants a weight wherever it is given a bias.
    weight = x.new_ones(x.shape[1]) if weight is None else weight
    bias = x.new_zeros(x.shape[1]) if bias is None else bias
    return _Normalise.apply(x, weight, bias, eps, tuple(sizes), rectify)  # type: ignore[no-untyped-call]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, sizes: tuple[int, ...], rectify: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.empty_like(x)
        means, scales = x.new_empty((2, len(sizes), x.shape[1]))
        for k, part in _parts(sizes):
            where = {"out": y[part], "save_mean": means[k], "save_invstd": scales[k]}
            aten.native_batch_norm.out(x[part], weight, bias, None, None, True, 0.0, eps, **where)
        if rectify:
            y.relu_()
        ctx.save_for_backward(x, weight, bias, means, scales, *([y] if rectify else []))
        ctx.settings = eps, sizes, rectify
        ctx.mark_non_differentiable(means, scales)
        return y, means, scales

    @staticmethod
    def backward(ctx: Any, g: Tensor, *of_statistics: Tensor) -> Gradients:
        x, weight, bias, means, scales, *y = ctx.saved_tensors
        eps, sizes, rectify = ctx.settings
        if torch.is_grad_enabled():

            def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                parts = [F.batch_norm(part, None, None, weight, bias, True, 0.0, eps) for part in torch.split(x, sizes)]
                return torch.cat(parts).relu() if rectify else torch.cat(parts)

            return *with_graph(plain, (x, weight, bias), g), None, None, None
        if rectify:
            g = aten.threshold_backward(g, y[0], 0)
        of_x, of_weight, of_bias = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        for k, part in _parts(sizes):
            saved = None, None, means[k], scales[k], True, eps, [True, True, True]
            one, two, three = aten.native_batch_norm_backward(g[part], x[part], weight, *saved)
            of_x[part] = one
            of_weight += two
            of_bias += three
        return of_x, of_weight, of_bias, None, None, None


def _parts(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Where every set begins and ends.

    >>> list(_parts((2, 3)))
    [(0, slice(0, 2, None)), (1, slice(2, 5, None))]
    """
    end = 0
    for k, size in enumerate(sizes):
        yield k, slice(end, end := end + size)


def with_graph(plain: Callable[..., Tensor], inputs: tuple[Tensor, ...], g: Tensor) -> Gradients:
    """The gradient as a differentiable function of the inputs and of g."""
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(plain(*inputs), wanted, g, create_graph=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)
