"""Layers convolution, batch norm, ReLU, max-pooling that pool before they normalise; the ReLU may be left out.

Batch norm with a positive scale and ReLU are increasing, so the largest of a window is the same before and after them:
only what is left of the pooling is normalised. The statistics are those of the whole result of the convolution.
It is made and looked through a few images at a time, as many as stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.models._functions import Gradients, aten, with_graph
from bilevel.models._layers import is_plain, suits
from bilevel.models._sets import Sets
from bilevel.models._strided import outputs_of
from bilevel.models.batch_norm import BatchNorm, refuse_single_values

# The result of a convolution that is in the making at a time.
TILE_BYTES = 4 * 1024**2


def applies(layers: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether layers begin with four that are computed here."""
    if len(layers) < 4 or not suits(x):
        return False
    conv, norm, relu, pool = layers[:4]
    return (
        isinstance(conv, nn.Conv2d)
        and is_plain(conv)
        and isinstance(norm, BatchNorm)
        and norm.sizes is not None
        and (norm.weight is None or bool((norm.weight > 0).all()))
        and type(relu) in (nn.ReLU, nn.Identity)
        and type(pool) is nn.MaxPool2d
        and pool.dilation == 1
        and not pool.return_indices
    )


def pooled(x: Tensor, layers: Sequence[nn.Module]) -> Tensor:
    """max-pool(ReLU(batch norm(convolution(x)))), without the ReLU where `nn.Identity` stands in its place."""
    conv, norm, relu, pool = layers[:4]
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, BatchNorm) and isinstance(pool, nn.MaxPool2d)
    sets = Sets(tuple(norm.sizes or ()))
    scale = conv.weight.new_ones(conv.out_channels) if norm.weight is None else norm.weight
    shift = conv.weight.new_zeros(conv.out_channels) if norm.bias is None else norm.bias
    window = (_pair(pool.kernel_size), _pair(pool.stride), _pair(pool.padding), [1, 1], pool.ceil_mode)
    settings = list(conv.stride), list(conv.padding), norm.eps, window, type(relu) is nn.ReLU
    y, means, variances = _Pooled.apply(
        x.contiguous(memory_format=torch.channels_last), conv.weight, scale, shift, sets, settings
    )  # type: ignore[no-untyped-call]
    norm.note(means, variances)
    return y


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, sets: Sets, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        stride, padding, eps, window, rectify = settings
        pixels = prod(map(outputs_of, x.shape[2:], weight.shape[2:], stride, padding))
        refuse_single_values(min(sets.sizes) * pixels)
        tiles = list(_tiles(sets, max(1, TILE_BYTES // (pixels * weight[:, 0, 0, 0].nbytes))))
        largest, moments, raw, places = [], [], [], []
        for _, tile in tiles:
            result = F.conv2d(x[tile], weight, None, stride, padding).contiguous(memory_format=torch.channels_last)
            moments.append(_moments(result))
            values, indices = aten.max_pool2d_with_indices(result, *window)
            largest.append(values)
            if any(ctx.needs_input_grad):
                raw.append(result)
                places.append(indices)
        means, variances = _combined(moments, [k for k, _ in tiles], len(sets.sizes))
        centred = torch.cat([x.sub_(means[k][:, None, None]) for (k, _), x in zip(tiles, largest, strict=True)])
        y = _affine(centred, scale * torch.rsqrt(variances + eps), shift, sets)
        if rectify:
            y.relu_()
        ctx.save_for_backward(x, weight, scale, shift, means, variances, centred, *raw, *places)
        ctx.sets, ctx.settings, ctx.tiles = sets, settings, tiles
        ctx.mark_non_differentiable(means, variances)
        return y, means, variances

    @staticmethod
    def backward(ctx: Any, g: Tensor, *of_statistics: Tensor) -> Gradients:
        x, weight, scale, shift, means, variances, centred, *rest = ctx.saved_tensors
        stride, padding, eps, window, rectify = ctx.settings
        sets: Sets = ctx.sets
        if torch.is_grad_enabled():

            def plain(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
                parts = torch.split(F.conv2d(x, weight, None, stride, padding), list(sets.sizes))
                normal = [F.batch_norm(part, None, None, scale, shift, True, 0.0, eps) for part in parts]
                together = torch.cat(normal).relu() if rectify else torch.cat(normal)
                values: Tensor = aten.max_pool2d_with_indices(together, *window)[0]
                return values

            return *with_graph(plain, (x, weight, scale, shift), g), None, None

        raw, places = rest[: len(ctx.tiles)], rest[len(ctx.tiles) :]
        inverse = torch.rsqrt(variances + eps)
        factors = scale * inverse
        delta = aten.threshold_backward(g, _affine(centred, factors, shift, sets), 0) if rectify else g
        # Sums over all values are sums over the largest: the others have no part in the loss but through statistics.
        sums, along = (sets.sums(x.permute(0, 2, 3, 1).flatten(1, 2)[None]) for x in (delta, delta * centred))
        delta = delta.permute(0, 2, 3, 1)
        counts = means.new_tensor(sets.sizes)[:, None] * raw[0][0, 0].numel()
        slopes = -factors * inverse.square() * along / counts
        constants = -sums * factors / counts - means * slopes

        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight)
        wanted = [of_x is not None, True, False]
        for (k, tile), result, place in zip(ctx.tiles, raw, places, strict=True):
            dense = torch.addcmul(constants[k], result.permute(0, 2, 3, 1), slopes[k])
            source = (delta[tile] * factors[k]).flatten(1, 2)
            dense.flatten(1, 2).scatter_add_(1, place.permute(0, 2, 3, 1).flatten(1, 2), source)
            one, two, _ = aten.convolution_backward(
                dense.permute(0, 3, 1, 2), x[tile], weight, None, stride, padding, [1, 1], False, [0, 0], 1, wanted
            )
            if of_x is not None:
                of_x[tile] = one
            of_weight += two
        return of_x, of_weight, (along * inverse).sum(0), sums.sum(0), None, None


def _tiles(sets: Sets, most: int) -> Iterator[tuple[int, slice]]:
    """Every set in parts of at most so many images.

    >>> list(_tiles(Sets((1, 3)), most=2))
    [(0, slice(0, 1, None)), (1, slice(1, 3, None)), (1, slice(3, 4, None))]
    """
    for k, (size, end) in enumerate(zip(sets.sizes, accumulate(sets.sizes), strict=True)):
        for begin in range(end - size, end, most):
            yield k, slice(begin, min(begin + most, end))


def _affine(centred: Tensor, factors: Tensor, shift: Tensor, sets: Sets) -> Tensor:
    """factor · x + shift with the factors of every set."""
    y = torch.empty_like(centred)
    for k, part in _tiles(sets, max(sets.sizes)):
        torch.addcmul(shift[:, None, None], centred[part], factors[k][:, None, None], out=y[part])
    return y


def _moments(result: Tensor) -> tuple[int, Tensor, Tensor]:
    """The number of values of every channel, their mean and the sum of squares around it."""
    values = result.permute(0, 2, 3, 1).flatten(0, 2)
    mean = values.mean(0)
    centred = values - mean
    return len(values), mean, centred.mul_(centred).sum(0)


def _combined(moments: list[tuple[int, Tensor, Tensor]], members: list[int], sets: int) -> tuple[Tensor, Tensor]:
    """Means and variances of every set from the moments of its parts."""
    means, variances = [], []
    for k in range(sets):
        parts = [moment for moment, member in zip(moments, members, strict=True) if member == k]
        counts = torch.tensor([count for count, _, _ in parts]).to(parts[0][1])[:, None]
        centres = torch.stack([mean for _, mean, _ in parts])
        means.append((counts * centres).sum(0) / counts.sum())
        around = counts * (centres - means[-1]).square() + torch.stack([squares for _, _, squares in parts])
        variances.append(around.sum(0) / counts.sum())
    return torch.stack(means), torch.stack(variances)


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
