"""A strided convolution, its batch norm and its ReLU as one function of several sets of images.

torch's batch norm takes one set in a call. Here the convolution sees all images at once, and batch norm and ReLU go
through its result together, in the order of memory: channels last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.models._layers import Gradients, aten, by_pixel, is_plain, normalised_sets, suits, to_images, with_graph
from bilevel.models._sets import Sets
from bilevel.models.batch_norm import BatchNorm, refuse_single_values


def applies(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether a convolution has a stride and is a plain one."""
    return is_plain(conv) and max(conv.stride) > 1 and suits(x)


def layer(x: Tensor, conv: nn.Conv2d, norm: BatchNorm, sets: Sets) -> Tensor:
    """ReLU(batch norm(convolution(x))), channels last."""
    settings = list(conv.stride), list(conv.padding), norm.eps
    last = x.contiguous(memory_format=torch.channels_last)
    y, means, variances = _Layer.apply(last, conv.weight, *norm.scale_and_shift(conv.weight), sets, settings)  # type: ignore[no-untyped-call]
    refuse_single_values(min(sets.sizes) * y[0, 0].numel())
    norm.note(means, variances)
    return y


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, sets: Sets, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        stride, padding, eps = settings
        raw = F.conv2d(x, weight, None, stride, padding)
        centred = by_pixel(raw)
        counts = sets.counts(centred)
        means = sets.sums(centred) / counts
        centred -= sets.spread(means)
        variances = sets.sums(centred * centred) / counts
        y = torch.addcmul(shift, centred, sets.spread(scale * torch.rsqrt(variances + eps))).relu_()
        ctx.save_for_backward(x, weight, scale, shift, centred, variances, y)
        ctx.sets, ctx.settings, ctx.height = sets, settings, raw.shape[2]
        ctx.mark_non_differentiable(means, variances)
        return to_images(y, raw.shape[2]), means, variances

    @staticmethod
    def backward(ctx: Any, g: Tensor, *of_statistics: Tensor) -> Gradients:
        x, weight, scale, shift, centred, variances, y = ctx.saved_tensors
        stride, padding, eps = ctx.settings
        sets: Sets = ctx.sets
        if torch.is_grad_enabled():

            def plain(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
                raw = F.conv2d(x, weight, None, stride, padding)
                return normalised_sets(raw, sets.sizes, scale, shift, eps).relu()

            return *with_graph(plain, (x, weight, scale, shift), g), None, None

        delta = aten.threshold_backward(by_pixel(g), y, 0)
        inverse, counts = torch.rsqrt(variances + eps), sets.counts(centred)
        sums, along = sets.sums(delta), sets.sums(delta * centred) * inverse
        # The gradient of batch norm: subtract the mean and the part along the normalised values.
        factors = scale * inverse
        delta.addcmul_(centred, sets.spread(-along * inverse / counts))
        torch.addcmul(sets.spread(-sums * factors / counts), delta, sets.spread(factors), out=delta)
        images, wanted = to_images(delta, ctx.height), [*ctx.needs_input_grad[:2], False]
        of_x, of_weight, _ = aten.convolution_backward(
            images, x, weight, None, stride, padding, [1, 1], False, [0, 0], 1, wanted
        )
        return of_x, of_weight, along.sum(0), sums.sum(0), None, None
