"""Sequences of layers in which a convolution, its batch norm and its ReLU are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from bilevel.models import _pooled, _strided
from bilevel.models._folded import folded, folds
from bilevel.models._sets import Sets
from bilevel.models.batch_norm import BatchNorm, has_hooks

# Layers that treat every image by itself; batch norm does so set by set.
PER_IMAGE = (
    *(nn.Conv2d, nn.Linear, nn.Flatten, nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, BatchNorm),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Dropout, nn.Dropout2d),
)

# A cache of `per_image`, which is called for every episode.
_KNOWN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class FusedSequential(nn.Sequential):
    """An `nn.Sequential` that computes a convolution, its batch norm and its ReLU together where that is faster.

    It does so where the batch norms know their sets (`batch_norm.using` with sizes). The values are those of
    `nn.Sequential` up to rounding. Layers keep their names.
    """

    per_image = True

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            x, used = _next(layers, x)
            layers = layers[used:]
        return x


def fused(sequence: nn.Sequential) -> nn.Sequential:
    """The sequence as a `FusedSequential`, unless it is a subclass or has hooks between its layers."""
    if type(sequence) is not nn.Sequential or any(map(has_hooks, (sequence, *sequence))):
        return sequence
    ours = FusedSequential()
    for name, layer in sequence._modules.items():  # named_children() lists a layer that is used twice only once
        ours.add_module(name, layer)
    return ours.train(sequence.training)


def per_image(module: nn.Module) -> bool:
    """Whether the module is known to treat images one by one, so that sets can pass through it together."""
    if module not in _KNOWN:
        parts = list(module.modules())
        _KNOWN[module] = all(type(part) in PER_IMAGE or getattr(type(part), "per_image", False) for part in parts)
    return _KNOWN[module]


def _next(layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, int]:
    """The result of the first layer or of the first few layers, and the number of these layers."""
    if _pooled.applies(layers, x):
        return _pooled.pooled(x, layers), 4
    stack = _stack(layers, x)
    if stack:
        return _through(stack, x), 3 * len(stack)
    if len(layers) > 1 and type(layers[0]) is nn.ReLU and type(layers[1]) is nn.MaxPool2d:
        return layers[0](layers[1](x)), 2  # the same values; there are fewer of them after pooling
    return layers[0](x), 1


NormedConvolution = tuple[nn.Conv2d, BatchNorm]


def _stack(layers: Sequence[nn.Module], x: Tensor) -> list[NormedConvolution]:
    """The leading triples of convolution, batch norm and ReLU that are computed together."""
    found: list[NormedConvolution] = []
    for conv, norm, relu in zip(layers[::3], layers[1::3], layers[2::3], strict=False):
        if not (isinstance(conv, nn.Conv2d) and isinstance(norm, BatchNorm) and type(relu) is nn.ReLU):
            break
        if norm.sizes is None or not (_strided.applies(conv, x) or (not found and folds(conv, x))):
            break
        found.append((conv, norm))
    return found


def _through(stack: list[NormedConvolution], x: Tensor) -> Tensor:
    first, norm = stack[0]
    assert norm.sizes is not None
    sets = Sets(tuple(norm.sizes))
    if folds(first, x):
        x, stack = folded(x, first, norm, sets), stack[1:]
    for conv, norm in stack:
        x = _strided.layer(x, conv, norm, sets)
    return x
