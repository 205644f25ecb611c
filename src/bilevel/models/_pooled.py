"""Convolution, batch norm, ReLU and max-pooling, computed by pooling before normalising; the ReLU may be left out.

Batch norm with a positive scale and ReLU are increasing, so the maximum of a window is at the same place before and
after them, and only the maxima are normalised. The statistics are those of the whole result of the convolution, which
is computed a few images at a time, as many as fit into the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.models._layers import (
    Gradients,
    aten,
    is_plain,
    normalised_sets,
    outputs_of,
    pooling_window,
    suits,
    with_graph,
)
from bilevel.models._sets import Sets
from bilevel.models.batch_norm import BatchNorm, refuse_single_values

# Bytes of the convolution's result that are computed at a time.
TILE_BYTES = 4 * 1024**2


def applies(layers: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether the first four layers are such layers."""
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
        and pooling_window(pool) is not None
    )


def pooled(x: Tensor, layers: Sequence[nn.Module]) -> Tensor:
    """max-pool(ReLU(batch norm(convolution(x)))), without the ReLU if `nn.Identity` stands in its place."""
    conv, norm, relu, pool = layers[:4]
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, BatchNorm)
    sets = Sets(tuple(norm.sizes or ()))
    settings = list(conv.stride), list(conv.padding), norm.eps, pooling_window(pool), type(relu) is nn.ReLU
    y, means, variances = _Pooled.apply(
        x.contiguous(memory_format=torch.channels_last), conv.weight, *norm.scale_and_shift(conv.weight), sets, settings
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
        means, variances = _combined(moments, tiles)
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
                normal = normalised_sets(F.conv2d(x, weight, None, stride, padding), sets.sizes, scale, shift, eps)
                values: Tensor = aten.max_pool2d_with_indices(normal.relu() if rectify else normal, *window)[0]
                return values

            return *with_graph(plain, (x, weight, scale, shift), g), None, None

        raw, places = rest[: len(ctx.tiles)], rest[len(ctx.tiles) :]
        inverse = torch.rsqrt(variances + eps)
        factors = scale * inverse
        delta = aten.threshold_backward(g, _affine(centred, factors, shift, sets), 0) if rectify else g
        # Only the maxima enter the loss directly, so sums over all values reduce to sums over the maxima. The other
        # values enter through the statistics.
        sums, along = (sets.sums(x.permute(0, 2, 3, 1).flatten(1, 2)) for x in (delta, delta * centred))
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
    """Every set in parts of at most `most` images.

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


def _moments(result: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of every channel, and the mean square around it."""
    values = result.permute(0, 2, 3, 1).flatten(0, 2)
    mean = values.mean(0)
    centred = values - mean
    return mean, centred.mul_(centred).mean(0)


def _combined(moments: list[tuple[Tensor, Tensor]], tiles: list[tuple[int, slice]]) -> tuple[Tensor, Tensor]:
    """Means and variances of every set from the moments of its tiles."""
    tile_means, tile_variances = (torch.stack(part) for part in zip(*moments, strict=True))
    shares = tile_means.new_zeros((tiles[-1][0] + 1, len(tiles)))
    for column, (k, tile) in enumerate(tiles):
        shares[k, column] = tile.stop - tile.start
    shares /= shares.sum(1, keepdim=True)
    means = shares @ tile_means
    # The variance of a set is the mean variance of its tiles plus the variance of their means.
    around = (tile_means - means[:, None]).square() + tile_variances
    return means, (shares[:, :, None] * around).sum(1)
