"""Strided convolution, batch norm and ReLU, computed as matrix products of views, without copies of patches.

Between such layers the axes of images are (row, image, column, channel), with the rows sorted by their number modulo
the next stride. The rows that one row of the filter is applied to, for all images and all rows of the result, are then
one block, and the columns that one column of the result depends on are neighbours. So every pair (row of the filter,
column of the result) is one large matrix product, forwards and backwards, in which padding costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.models._layers import Gradients, aten, is_plain, normalised_sets, suits, with_graph
from bilevel.models._sets import Sets
from bilevel.models.batch_norm import BatchNorm, refuse_single_values


def layer(x: Tensor, conv: nn.Conv2d, norm: BatchNorm, sets: Sets, next_stride: int) -> Tensor:
    """ReLU(batch norm(convolution(x))) of rows sorted for this layer, to rows sorted for the next."""
    settings = conv.stride[0], conv.padding[0], norm.eps, next_stride
    y, means, variances = _Layer.apply(x.contiguous(), conv.weight, *norm.scale_and_shift(conv.weight), sets, settings)  # type: ignore[no-untyped-call]
    refuse_single_values(min(sets.sizes) * y.shape[0] * y.shape[2])
    norm.note(means, variances)
    return y


def applies(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether a convolution has a stride and is faster here than in torch."""
    return (
        is_plain(conv)
        and conv.stride[0] == conv.stride[1] > 1
        and conv.padding[0] == conv.padding[1] < conv.kernel_size[0] == conv.kernel_size[1]  # type: ignore[operator]
        and conv.kernel_size[0] >= conv.stride[0]
        # Few channels make narrow matrices.
        and min(conv.in_channels, conv.out_channels) >= 16
        and suits(x)
    )


def ranks(rows: int, stride: int) -> list[slice]:
    """The places of the rows 0, stride, 2·stride, … after sorting; then those with the remainder 1; and so on.

    >>> ranks(7, stride=2)
    [slice(0, 4, None), slice(4, 7, None)]
    """
    ends = [len(range(remainder, rows, stride)) for remainder in range(stride)]
    return [slice(sum(ends[:r]), sum(ends[: r + 1])) for r in range(stride)]


def to_rows(images: Tensor, stride: int) -> Tensor:
    """Images N×C×H×W as rows sorted for a layer with that stride."""
    natural = images.permute(2, 0, 3, 1)
    return torch.cat([natural[r::stride] for r in range(stride)])


def to_images(rows: Tensor, stride: int = 1) -> Tensor:
    """The inverse of `to_rows`."""
    natural = torch.empty_like(rows)
    for r, part in enumerate(ranks(len(rows), stride)):
        natural[r::stride] = rows[part]
    return natural.permute(1, 3, 0, 2)


@dataclass(frozen=True)
class RowOverlap:
    """The rows of the result for which one row of the filter lies inside the image: `count` of them from `first`.

    They depend on the image rows `start`, start + 1, … among those with the remainder `plane` modulo the stride.
    """

    plane: int
    start: int
    first: int
    count: int


def row_overlaps(size: int, filters: int, stride: int, padding: int) -> list[RowOverlap]:
    """One for every row of a filter with `filters` rows, over `size` rows of the image.

    Row i of the result depends on row 2i − 1 of the image here, which does not exist for i = 0:

    >>> row_overlaps(7, filters=3, stride=2, padding=1)[0]
    RowOverlap(plane=1, start=0, first=1, count=3)
    """
    outputs = outputs_of(size, filters, stride, padding)
    found = []
    for offset in range(filters):
        first = max(0, -((offset - padding) // stride))
        last = min(outputs - 1, (size - 1 + padding - offset) // stride)
        row = first * stride + offset - padding
        found.append(RowOverlap(row % stride, row // stride, first, max(0, last - first + 1)))
    return found


def outputs_of(size: int, filters: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - filters) // stride + 1


def windows(size: int, filters: int, stride: int, padding: int) -> list[tuple[slice, slice]]:
    """For every column of the result, the columns of the filter that are not over the padding, and those they see.

    >>> windows(4, filters=3, stride=2, padding=1)
    [(slice(1, 3, None), slice(0, 2, None)), (slice(0, 3, None), slice(1, 4, None))]
    """
    found = []
    for begin in range(-padding, size + padding - filters + 1, stride):
        left, right = max(0, begin), min(size, begin + filters)
        found.append((slice(left - begin, right - begin), slice(left, right)))
    return found


@dataclass(frozen=True)
class View:
    """A matrix within a contiguous tensor: its shape, the numbers from one row to the next, and where it begins."""

    shape: tuple[int, int]
    step: int
    begin: int

    def __call__(self, tensor: Tensor) -> Tensor:
        # One call instead of two slices, because hundreds of views are made.
        return torch.as_strided(tensor, self.shape, (self.step, 1), tensor.storage_offset() + self.begin)


Product = tuple[View, View, View]


@lru_cache(maxsize=256)
def products(shape: tuple[int, ...], filters: tuple[int, ...], stride: int, padding: int) -> list[Product]:
    """The factors of all matrix products, and their place in the result, for pixels of shape (row, image, column,
    channel) and filters of shape (row, column, input, output)."""
    height, images, width, channels = shape
    size, _, _, outputs = filters
    columns = windows(width, size, stride, padding)
    begins = [part.start for part in ranks(height, stride)]
    found = []
    for column, (offsets, seen) in enumerate(columns):
        for k, row in enumerate(row_overlaps(height, size, stride, padding)):
            count, inner = row.count * images, (seen.stop - seen.start) * channels
            if count > 0 and inner > 0:
                top = (begins[row.plane] + row.start) * images
                pixels = View((count, inner), width * channels, (top * width + seen.start) * channels)
                weights = View((inner, outputs), outputs, (k * size + offsets.start) * channels * outputs)
                place = (row.first * images * len(columns) + column) * outputs
                found.append((pixels, weights, View((count, outputs), len(columns) * outputs, place)))
    return found


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, sets: Sets, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        stride, padding, eps, next_stride = settings
        filters = weight.permute(2, 3, 1, 0).contiguous()
        height, width = (outputs_of(n, weight.shape[2], stride, padding) for n in (x.shape[0], x.shape[2]))
        centred = x.new_zeros((height, x.shape[1], width, len(weight)))
        for pixels, weights, place in products(tuple(x.shape), tuple(filters.shape), stride, padding):
            place(centred).addmm_(pixels(x), weights(filters))
        counts = sets.counts(centred)
        means = sets.sums(centred) / counts
        centred -= sets.spread(means, width)
        variances = sets.sums(centred * centred) / counts
        factors = scale * torch.rsqrt(variances + eps)
        y, spread = torch.empty_like(centred), sets.spread(factors, width)
        for r, part in enumerate(ranks(height, next_stride)):
            torch.addcmul(shift, centred[r::next_stride], spread, out=y[part])
        y.relu_()
        ctx.save_for_backward(x, weight, scale, shift, centred, variances, y)
        ctx.sets, ctx.settings = sets, settings
        ctx.mark_non_differentiable(means, variances)
        return y, means, variances

    @staticmethod
    def backward(ctx: Any, g: Tensor, *of_statistics: Tensor) -> Gradients:
        x, weight, scale, shift, centred, variances, y = ctx.saved_tensors
        stride, padding, eps, next_stride = ctx.settings
        sets: Sets = ctx.sets
        if torch.is_grad_enabled():

            def plain(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
                raw = F.conv2d(to_images(x, stride), weight, None, stride, padding)
                return to_rows(normalised_sets(raw, sets.sizes, scale, shift, eps).relu(), next_stride)

            return *with_graph(plain, (x, weight, scale, shift), g), None, None

        width = centred.shape[2]
        delta = torch.empty_like(centred)
        for r, part in enumerate(ranks(len(centred), next_stride)):
            aten.threshold_backward.grad_input(g[part], y[part], 0, grad_input=delta[r::next_stride])
        inverse, counts = torch.rsqrt(variances + eps), sets.counts(centred)
        sums, along = sets.sums(delta), sets.sums(delta * centred) * inverse
        # The gradient of batch norm: subtract the mean and the part along the normalised values.
        factors = scale * inverse
        delta.addcmul_(centred, sets.spread(-along * inverse / counts, width))
        torch.addcmul(sets.spread(-sums * factors / counts, width), delta, sets.spread(factors, width), out=delta)

        filters = weight.permute(2, 3, 1, 0).contiguous()
        parts = products(tuple(x.shape), tuple(filters.shape), stride, padding)
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_filters = torch.zeros_like(filters)
            for pixels, weights, place in parts:
                weights(of_filters).addmm_(pixels(x).t(), place(delta))
            of_weight = of_filters.permute(3, 2, 0, 1)
        if ctx.needs_input_grad[0]:
            of_x = torch.zeros_like(x)
            for pixels, weights, place in parts:
                pixels(of_x).addmm_(place(delta), weights(filters).t())
        return of_x, of_weight, along.sum(0), sums.sum(0), None, None


def stack(layers: Sequence[tuple[nn.Conv2d, BatchNorm]], rows: Tensor, sets: Sets) -> Tensor:
    """Layers one after the other, from rows to images."""
    strides = [conv.stride[0] for conv, _ in layers] + [1]
    for (conv, norm), next_stride in zip(layers, strides[1:], strict=True):
        rows = layer(rows, conv, norm, sets, next_stride)
    return to_images(rows)
