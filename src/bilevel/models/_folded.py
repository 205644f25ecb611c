"""The first layer of a network, convolution, batch norm and ReLU, as a single convolution."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.models._layers import Gradients, aten, is_plain, suits, with_graph
from bilevel.models._sets import Sets
from bilevel.models._strided import ranks
from bilevel.models.batch_norm import BatchNorm, refuse_single_values


def folds(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether the patches of the images take far less memory than the result of the convolution."""
    return (
        is_plain(layer)
        and 4 * layer.in_channels * prod(layer.kernel_size) <= layer.out_channels
        and not x.requires_grad
        and suits(x)
    )


def folded(x: Tensor, layer: nn.Conv2d, norm: BatchNorm, sets: Sets, next_stride: int = 1) -> Tensor:
    """ReLU(batch norm(convolution(x))), as rows that are sorted for a layer with the next stride.

    A convolution is linear in the patches of its input, so the statistics for batch norm follow from those of the
    patches: the result of a filter w has variance wᵀCw where C is the covariance of the patches, a 9 × 9 matrix for
    3 × 3 filters of grey images. Batch norm then only rescales w, and needs no pass over the large result.
    """
    columns = [patches(part, layer, next_stride) for part in torch.split(x, list(sets.sizes))]
    refuse_single_values(min(part[0].numel() for part in columns))
    means, covariances = [], []
    for part in (part[:-1].flatten(1) for part in columns):
        means.append(part.mean(1))
        part -= means[-1][:, None]
        covariances.append(part @ part.t() / part.shape[1])
    filters = layer.weight.flatten(1)
    variances = ((filters @ torch.stack(covariances)) * filters).sum(2)
    norm.note(torch.stack(means) @ filters.t(), variances)
    scales = torch.rsqrt(variances + norm.eps)
    if norm.weight is not None:
        scales = scales * norm.weight
    bias = filters.new_zeros(len(filters)) if norm.bias is None else norm.bias
    weights = torch.cat([filters.t() * scales[:, None], bias.expand(len(scales), 1, -1)], 1)
    return rectified_products(weights, columns)


def patches(x: Tensor, layer: nn.Conv2d, next_stride: int = 1) -> Tensor:
    """The patches of a convolution, with a constant 1 at the end: (number in the patch, row, image, column)."""
    x = F.pad(x, [int(n) for n in layer.padding[::-1] for _ in range(2)]).permute(1, 2, 0, 3)
    (high, wide), (down, right) = layer.kernel_size, layer.stride
    seen = x.unfold(1, high, down).unfold(3, wide, right).permute(0, 4, 5, 1, 2, 3)
    columns = x.new_empty((seen[:, :, :, 0, 0, 0].numel() + 1, *seen.shape[3:]))
    places = columns[:-1].view(seen.shape)
    for r, part in enumerate(ranks(seen.shape[3], next_stride)):
        places[:, :, :, part] = seen[:, :, :, r::next_stride]
    columns[-1] = 1.0
    return columns


def rectified_products(weights: Tensor, columns: list[Tensor]) -> Tensor:
    """max(0, xᵀW_k) for the patches x of every set k, with weights sets × inputs × outputs."""
    return _RectifiedProducts.apply(weights, *columns)  # type: ignore[no-untyped-call]


class _RectifiedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, *columns: Tensor) -> Tensor:
        _, rows, _, width = columns[0].shape
        y = weights.new_empty((rows, sum(part.shape[2] for part in columns), width, weights.shape[2]))
        for part, weight, place in zip(columns, weights, _parts(y, columns), strict=True):
            torch.bmm(_by_row(part).transpose(1, 2), weight.expand(rows, -1, -1), out=place)
        y.relu_()
        ctx.save_for_backward(weights, y, *columns)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        weights, y, *columns = ctx.saved_tensors
        none = (None,) * len(columns)
        if torch.is_grad_enabled():

            def plain(weights: Tensor) -> Tensor:
                parts = (torch.einsum("irnc,io->rnco", part, w) for part, w in zip(columns, weights, strict=True))
                return torch.cat(list(parts), 1).relu()

            return *with_graph(plain, (weights,), g), *none
        g = aten.threshold_backward(g, y, 0)
        parts = zip(columns, _parts(g, columns), strict=True)
        return torch.stack([torch.bmm(_by_row(part), place).sum(0) for part, place in parts]), *none


def _by_row(columns: Tensor) -> Tensor:
    """Patches as one matrix per row of the result: row × number in the patch × (image, column)."""
    return columns.flatten(2).transpose(0, 1)


def _parts(y: Tensor, columns: Sequence[Tensor]) -> list[Tensor]:
    """The part of every set in the result: row × (image, column) × output."""
    return [part.flatten(1, 2) for part in torch.split(y, [part.shape[2] for part in columns], 1)]
