"""The first layer of a network, convolution, batch norm and ReLU, as a single convolution."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.models._layers import Gradients, aten, is_plain, outputs_of, suits, to_images, with_graph
from bilevel.models._sets import Sets
from bilevel.models.batch_norm import BatchNorm, refuse_single_values


def folds(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether the patches of the images take far less memory than the result of the convolution."""
    return (
        is_plain(layer)
        and 4 * layer.in_channels * prod(layer.kernel_size) <= layer.out_channels
        and not x.requires_grad
        and suits(x)
    )


def folded(x: Tensor, layer: nn.Conv2d, norm: BatchNorm, sets: Sets) -> Tensor:
    """ReLU(batch norm(convolution(x))), channels last.

    A convolution is linear in the patches of its input, so the statistics for batch norm follow from those of the
    patches: the result of a filter w has variance wᵀCw where C is the covariance of the patches, a 9 × 9 matrix for
    3 × 3 filters of grey images. Batch norm then only rescales w, and needs no pass over the large result.
    """
    columns = [patches(part, layer) for part in torch.split(x, list(sets.sizes))]
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
    height = outputs_of(x.shape[2], layer.kernel_size[0], layer.stride[0], int(layer.padding[0]))
    return to_images(rectified_products(weights, columns), height)


def patches(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """The patches of a convolution, with a constant 1 at the end: (number in the patch, image, pixel)."""
    x = F.pad(x, [int(n) for n in layer.padding[::-1] for _ in range(2)]).transpose(0, 1)
    (high, wide), (down, right) = layer.kernel_size, layer.stride
    seen = x.unfold(2, high, down).unfold(3, wide, right).permute(0, 4, 5, 1, 2, 3)
    columns = x.new_empty((prod(seen.shape[:3]) + 1, seen.shape[3], prod(seen.shape[4:])))
    columns[:-1].view(seen.shape).copy_(seen)
    columns[-1] = 1.0
    return columns


def rectified_products(weights: Tensor, columns: list[Tensor]) -> Tensor:
    """max(0, xᵀW_k) for the patches x of every set k: (image, pixel, output), with weights sets × inputs × outputs."""
    return _RectifiedProducts.apply(weights, *columns)  # type: ignore[no-untyped-call]


class _RectifiedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, *columns: Tensor) -> Tensor:
        sizes = [part.shape[1] for part in columns]
        y = weights.new_empty((sum(sizes), columns[0].shape[2], weights.shape[2]))
        for part, weight, place in zip(columns, weights, torch.split(y, sizes), strict=True):
            torch.mm(part.flatten(1).t(), weight, out=place.flatten(0, 1))
        y.relu_()
        ctx.save_for_backward(weights, y, *columns)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        weights, y, *columns = ctx.saved_tensors
        none = (None,) * len(columns)
        if torch.is_grad_enabled():

            def plain(weights: Tensor) -> Tensor:
                parts = (torch.einsum("inp,io->npo", part, w) for part, w in zip(columns, weights, strict=True))
                return torch.cat(list(parts)).relu()

            return *with_graph(plain, (weights,), g), *none
        parts = torch.split(aten.threshold_backward(g, y, 0), [part.shape[1] for part in columns])
        found = [part.flatten(1) @ place.flatten(0, 1) for part, place in zip(columns, parts, strict=True)]
        return torch.stack(found), *none
