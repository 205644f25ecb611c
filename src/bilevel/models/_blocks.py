"""Sequences of layers in which a convolution, its batch norm and its ReLU are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.models import _strided
from bilevel.models._functions import rectified_products
from bilevel.models._layers import is_plain
from bilevel.models.batch_norm import BatchNorm

# Layers that treat every image by itself; batch norm does so set by set.
PER_IMAGE = (
    *(nn.Conv2d, nn.Linear, nn.Flatten, nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, BatchNorm),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Dropout, nn.Dropout2d),
)

# Answers of `per_image`, which is asked for every episode.
_KNOWN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class Blocks(nn.Sequential):
    """A sequence that takes shortcuts where its batch norms know their sets (`batch_norm.using` with sizes).

    The values are those of `nn.Sequential` up to rounding. Layers keep their names.
    """

    per_image = True

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            x, used = _next(layers, x)
            layers = layers[used:]
        return x


class Each(nn.Module):
    """A module applied to one stack of images after the other."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, stacks: Tensor) -> Tensor:
        return torch.stack([self.module(stack) for stack in stacks])


def blocks(sequence: nn.Sequential) -> nn.Sequential:
    """The sequence as `Blocks`, unless somebody listens to what passes between its layers."""
    if type(sequence) is not nn.Sequential or any(map(_has_hooks, (sequence, *sequence))):
        return sequence
    ours = Blocks()
    for name, layer in sequence._modules.items():  # named_children() has a layer that is used twice once
        ours.add_module(name, layer)
    return ours.train(sequence.training)


def per_image(module: nn.Module) -> bool:
    """Whether the module is known to treat images one by one, so that sets can pass through it together."""
    if module not in _KNOWN:
        parts = list(module.modules())
        _KNOWN[module] = all(type(part) in PER_IMAGE or getattr(type(part), "per_image", False) for part in parts)
    return _KNOWN[module]


def _has_hooks(layer: nn.Module) -> bool:
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def _next(layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, int]:
    """The result of the first layer, or of the first few, and how many they are."""
    first, second, third = [*layers[:3], None, None][:3]
    if isinstance(first, BatchNorm) and first.sizes is not None and type(second) is nn.ReLU:
        return first.normalised(x, rectify=True), 2
    if isinstance(first, nn.Conv2d) and isinstance(second, BatchNorm) and second.sizes is not None:
        if type(third) is nn.ReLU and _folds(first, x):
            return folded(first, second, x), 3
        if _strided.applies(first, x):
            return _strided.convolve(x, first), 1
    assert first is not None
    return first(x), 1


def _folds(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether a convolution is of images whose patches take less memory than its result by far."""
    return (
        is_plain(layer)
        and 4 * layer.in_channels * prod(layer.kernel_size) <= layer.out_channels
        and not x.requires_grad
    )


def folded(layer: nn.Conv2d, norm: BatchNorm, x: Tensor) -> Tensor:
    """ReLU(batch norm(convolution(x))) as a single convolution.

    A convolution is linear in the patches of its input, so the statistics that batch norm needs follow from theirs:
    the result of a filter w has variance wᵀCw where C is the covariance of the patches, a 9 × 9 matrix for 3 × 3
    filters of grey images. Batch norm then only rescales w, and no pass over the large result is spent on it.
    """
    columns, (height, width) = patches(x, layer)
    sizes = [size * height * width for size in norm.sizes or ()]
    means, covariances = [], []
    for part in torch.split(columns[:-1], sizes, 1):
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
    weights = torch.cat([filters.t() * scales[:, None], bias.expand(len(sizes), 1, -1)], 1)
    result = rectified_products(weights, columns, sizes)
    return result.view(len(x), height, width, -1).permute(0, 3, 1, 2)


def patches(x: Tensor, layer: nn.Conv2d) -> tuple[Tensor, tuple[int, int]]:
    """What every filter of a convolution sees, a patch in each column with a 1 below it, and the size of the result."""
    x = F.pad(x, [int(n) for n in layer.padding[::-1] for _ in range(2)])
    count, channels, *size = x.shape
    height, width = ((n - k) // step + 1 for n, k, step in zip(size, layer.kernel_size, layer.stride, strict=True))
    places = list(product(range(channels), *map(range, layer.kernel_size)))
    columns = x.new_empty((len(places) + 1, count, height, width))
    for row, (channel, top, left) in zip(columns, places, strict=False):
        row.copy_(x[:, channel, top :: layer.stride[0], left :: layer.stride[1]][:, :height, :width])
    columns[-1] = 1.0
    return columns.flatten(1), (height, width)
