"""One architecture with several sets of weights, computed together: MAML's episodes, each after steps of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from bilevel.models._layers import is_plain, pair, pooling_window, suits
from bilevel.models._second_derivatives import Block, through
from bilevel.models.batch_norm import BatchNorm
from bilevel.models.blocks import FusedSequential

# Layers without weights that may follow the blocks.
LAST = (nn.Flatten, nn.Identity)
_KNOWN: WeakKeyDictionary[nn.Module, Networks | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Networks:
    """Blocks of convolution, batch norm, ReLU and perhaps max-pooling, then layers without weights.

    Attributes:
        names: those of weight, scale and shift of every block; None for a scale or shift that batch norm does not have.
    """

    blocks: Sequence[Block]
    names: Sequence[tuple[str, str | None, str | None]]
    norms: Sequence[BatchNorm]
    rest: Sequence[nn.Module]

    def __call__(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The results for networks × images × C × H × W; the leaves of the weights have a first axis for networks."""
        leaves = []
        for weight, scale, shift in self.names:
            filters = weights[weight]
            leaves.append(filters)
            leaves.append(filters.new_ones(filters.shape[:2]) if scale is None else weights[scale])
            leaves.append(filters.new_zeros(filters.shape[:2]) if shift is None else weights[shift])
        y, statistics = through(self.blocks, images, leaves)
        for norm, mean, inverse in zip(self.norms, statistics[::2], statistics[1::2], strict=True):
            if norm.seen is not None:
                norm.note(mean[:, 0], inverse[:, 0] ** -2 - norm.eps)
        y = y.flatten(0, 1)
        for layer in self.rest:
            y = layer(y)
        return y.view(*images.shape[:2], *y.shape[1:])


def networks(module: nn.Module, images: Tensor) -> Networks | None:
    """The module as `Networks`; None if its layers are of other kinds, or batch norm uses other statistics."""
    if module not in _KNOWN:
        _KNOWN[module] = _parsed(module)
    found = _KNOWN[module]
    own = found is not None and all(norm.by == "own" and norm.sizes is None for norm in found.norms)
    return found if own and suits(images) else None


def stacked(leaf: Tensor, count: int) -> Tensor:
    """`count` copies of a leaf, stacked. Filters keep their layout in memory, which affects the speed of products."""
    if leaf.ndim != 4:
        return leaf.expand(count, *leaf.shape).clone()
    return leaf.permute(0, 2, 3, 1).expand(count, -1, -1, -1, -1).clone().permute(0, 1, 4, 2, 3)


def _parsed(module: nn.Module) -> Networks | None:
    if type(module) is not FusedSequential:
        return None
    named = {id(parameter): name for name, parameter in module.named_parameters()}
    layers, blocks, names, norms = list(_flat(module)), [], [], []
    while len(layers) >= 3:
        conv, norm, relu, *after = layers
        if not (isinstance(conv, nn.Conv2d) and is_plain(conv) and isinstance(norm, BatchNorm)):
            break
        if type(relu) not in (nn.ReLU, nn.Identity):
            break
        window = pooling_window(after[0]) if after else None
        layers = after if window is None else after[1:]
        blocks.append(Block(pair(conv.stride), pair(conv.padding), norm.eps, type(relu) is nn.ReLU, window))
        names.append((named[id(conv.weight)], named.get(id(norm.weight)), named.get(id(norm.bias))))
        norms.append(norm)
    return Networks(blocks, names, norms, layers) if blocks and all(type(x) in LAST for x in layers) else None


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    for layer in module._modules.values():
        assert layer is not None
        if type(layer) is FusedSequential:
            yield from _flat(layer)
        else:
            yield layer
