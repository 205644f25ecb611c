"""Blocks of convolution, batch norm, ReLU and max-pooling for several networks, with second derivatives written out.

The inner step of MAML holds the gradient of a few images' loss, and the hypergradient differentiates this gradient. By
torch's own rules, the derivative of a batch norm's gradient is composed of some thirty operations, and that of a
convolution's gradient of convolutions with images and filters exchanged. Here a step and its derivative take nine
convolutions, the fewest possible, and a few passes over the values of batch norm. Every episode has weights of its own;
the same layer of all of them is one batched product, so that small operations are few.

A stack of blocks is one function for autograd: `_Stack` is the stack, and `_StackGradient` its gradient. The results of
all layers are outputs of `_Stack` and inputs of `_StackGradient`. Autograd then adds up what reaches a layer through
the gradient and through the loss before it goes back through the layer.

Images are (network, image, row, column, channel) here, and weights (network, output, input, row, column).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.models._layers import Gradients, aten
from bilevel.models.batch_norm import refuse_single_values

# Patches of this size (of one network) stay in the processor's cache, and a product with them is then faster than
# torch's convolution.
PATCH_BYTES = 256 * 1024
Maybe = Tensor | None


@dataclass(frozen=True)
class Block:
    """The settings of max-pool(ReLU(batch norm(convolution(x)))).

    Attributes:
        window: the settings of the pooling, as torch's function takes them; None where there is none.
    """

    stride: list[int]
    padding: list[int]
    eps: float
    rectify: bool
    window: tuple[Any, ...] | None

    def seen(self, x: Tensor, weight: Tensor) -> Seen:
        """Images as the convolution sees them."""
        rows, columns = (
            (x.shape[a + 2] + 2 * self.padding[a] - weight.shape[a + 3]) // self.stride[a] + 1 for a in (0, 1)
        )
        if not self._fits(x.shape[1] * rows * columns, weight):
            return Seen(self, x, (rows, columns))
        (down, right), (above, left), (high, wide) = self.stride, self.padding, weight.shape[3:]
        padded = F.pad(x, (0, 0, left, left, above, above))
        one, two, three, four, five = padded.stride()
        shape = (*x.shape[:2], rows, columns, high, wide, x.shape[4])
        patches = padded.as_strided(shape, (one, two, down * three, right * four, three, four, five))
        return Seen(self, x, (rows, columns), patches.reshape(len(x), -1, high * wide * x.shape[4]))

    def of_images(self, e: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of ⟨convolution of x, e⟩ in x."""
        if not self._fits(e[0, ..., 0].numel(), weight):
            return _images([_last(self.backward(*one, 0)) for one in zip(e, x, weight, strict=True)])
        (down, right), (above, left), (high, wide) = self.stride, self.padding, weight.shape[3:]
        networks, images, rows, columns, _ = e.shape
        patches = torch.bmm(e.flatten(1, 3), _matrices(weight)).view(networks, images, rows, columns, high, wide, -1)
        height, width = x.shape[2] + 2 * above, x.shape[3] + 2 * left
        found = x.new_zeros((networks, images, height, width, x.shape[4]))
        for i in range(high):
            for j in range(wide):
                seen = found[:, :, i : i + down * (rows - 1) + 1 : down, j : j + right * (columns - 1) + 1 : right]
                seen += patches[:, :, :, :, i, j]
        return found[:, :, above : height - above, left : width - left].contiguous()

    def _fits(self, places: int, weight: Tensor) -> bool:
        """Whether patches are used; autograd does not see their products."""
        return places * weight[0, 0].numel() * weight.element_size() <= PATCH_BYTES and not torch.is_grad_enabled()

    def backward(self, e: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        """torch's gradient of the convolution of one network: 0 in x, 1 in the weight."""
        wanted, one = [which == 0, which == 1, False], [1, 1]
        return aten.convolution_backward(
            _first(e), _first(x), weight, None, self.stride, self.padding, one, False, [0, 0], 1, wanted
        )[which]


@dataclass(frozen=True)
class Seen:
    """Images as a convolution sees them, with their patches, network × place × (row, column, input), if these fit."""

    block: Block
    x: Tensor
    size: tuple[int, int]
    patches: Maybe = None

    def convolved(self, weight: Tensor) -> Tensor:
        if self.patches is not None:
            return torch.bmm(self.patches, _matrices(weight).mT).view(*self.x.shape[:2], *self.size, -1)
        stride, padding = self.block.stride, self.block.padding
        pairs = zip(self.x, weight, strict=True)
        return _images([_last(F.conv2d(_first(x), w, None, stride, padding)) for x, w in pairs])

    def of_weight(self, e: Tensor, weight: Tensor) -> Tensor:
        """The gradient of ⟨convolved(weight), e⟩ in weight."""
        if self.patches is None:
            return torch.stack([self.block.backward(*one, 1) for one in zip(e, self.x, weight, strict=True)])
        networks, outputs, inputs, high, wide = weight.shape
        errors = e.flatten(1, 3)
        # A product with few columns is slow.
        narrow = self.patches.shape[2] < outputs
        found = torch.bmm(self.patches.mT, errors).mT if narrow else torch.bmm(errors.mT, self.patches)
        return found.reshape(networks, outputs, high, wide, inputs).permute(0, 1, 4, 2, 3)


def _matrices(weight: Tensor) -> Tensor:
    """Filters as matrices: network × output × (row, column, input)."""
    return weight.permute(0, 1, 3, 4, 2).flatten(2)


def _first(images: Tensor) -> Tensor:
    """Images with the channels first, as torch's functions take them."""
    return images.transpose(-1, -2).transpose(-2, -3)


def _last(images: Tensor) -> Tensor:
    return images.transpose(-3, -2).transpose(-2, -1)


def _images(parts: list[Tensor]) -> Tensor:
    """The images of all networks in one tensor."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def through(blocks: Sequence[Block], x: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The result of a stack for networks × images × C × H × W, in this order of axes.

    Args:
        blocks: the settings.
        x: the images.
        leaves: weight, scale and shift of every block, with a first axis for the networks.

    Returns:
        The result, and batch norm's mean and 1/√(variance + eps) in every block, network × channel.
    """
    y, *more = _Stack.apply(tuple(blocks), x.movedim(2, 4).contiguous(), *leaves)  # type: ignore[no-untyped-call]
    return y.movedim(4, 2), more[-2 * len(blocks) :]


# ------------------------------------------------------------------------------------------------- the stack


@dataclass(frozen=True)
class Layer:
    """A block with its weights and what it has computed.

    Attributes:
        x: its images.
        raw: their convolution, which batch norm brings to n = inverse · (raw − mean).
        y: the result.
        places: where the maxima of the pooling are.
    """

    block: Block
    x: Tensor
    weight: Tensor
    scale: Tensor
    shift: Tensor
    raw: Tensor
    y: Tensor
    mean: Tensor
    inverse: Tensor
    places: Maybe

    def seen(self) -> Seen:
        return self.block.seen(self.x, self.weight)

    def normal(self) -> Tensor:
        """n: network × (image, row, column) × channel."""
        return torch.addcmul(-self.mean * self.inverse, self.raw.flatten(1, 3), self.inverse)

    def before_norm(self, g: Tensor) -> Tensor:
        """The gradient before ReLU and pooling, network × (image, row, column) × channel, from that of y."""
        if self.block.rectify:
            g = aten.threshold_backward(g, self.y, 0)
        if self.places is None or self.block.window is None:
            return g.flatten(1, 3)
        raw, places = (_first(x.flatten(0, 1)) for x in (self.raw, self.places))
        spread = aten.max_pool2d_with_indices_backward(_first(g.flatten(0, 1)), raw, *self.block.window, places)
        return _last(spread).reshape(len(g), -1, g.shape[4])

    def picked(self, values: Tensor) -> Tensor:
        """Values before ReLU and pooling at the places that both let through: the transpose of `before_norm`."""
        if self.places is None:
            values = values.view(self.raw.shape)
        else:
            flat = values.view(*self.raw.shape[:2], -1, values.shape[2])
            values = flat.gather(2, self.places.flatten(2, 3)).view(self.y.shape)
        return aten.threshold_backward(values, self.y, 0) if self.block.rectify else values


class _Stack(torch.autograd.Function):
    """From images and (weight, scale, shift) of every block to y of the last block, y of the others, and all raw."""

    @staticmethod
    def forward(ctx: Any, blocks: tuple[Block, ...], x: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        ys: list[Tensor] = []
        raws, statistics, places = [], [], []
        for block, weight, scale, shift in zip(blocks, leaves[::3], leaves[1::3], leaves[2::3], strict=True):
            raw = block.seen(ys[-1] if ys else x, weight).convolved(weight)
            refuse_single_values(raw[0, ..., 0].numel())
            rows = raw.flatten(1, 3)
            mean = rows.mean(1, keepdim=True)
            y = rows - mean
            inverse = torch.rsqrt((y * y).mean(1, keepdim=True) + block.eps)
            y = torch.addcmul(shift[:, None], y, scale[:, None] * inverse).view(raw.shape)
            place = None
            if block.window is not None:
                pooled, place = aten.max_pool2d_with_indices(_first(y.flatten(0, 1)), *block.window)
                y, place = (_last(part).reshape(*y.shape[:2], *part.shape[2:], -1) for part in (pooled, place))
            ys.append(y.relu_() if block.rectify else y)  # a ReLU does not move a maximum
            raws.append(raw)
            statistics += [mean, inverse]
            places.append(place)
        ctx.blocks = blocks
        ctx.save_for_backward(x, *leaves, *ys, *raws, *statistics, *places)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        return ys[-1], *ys[:-1], *raws, *statistics

    @staticmethod
    def backward(ctx: Any, g: Maybe, *others: Maybe) -> Gradients:
        count, tensors, needs_images = len(ctx.blocks), ctx.saved_tensors, ctx.needs_input_grad[1]
        of_ys, of_raws = [*others[: count - 1], g], others[count - 1 : 2 * count - 1]
        if not torch.is_grad_enabled():
            return None, *_pulled(list(_layers(ctx.blocks, tensors)), of_ys, of_raws, needs_images)[0]
        if g is None or any(part is not None for part in others):
            return None, *_plain_pulled(list(_layers(ctx.blocks, tensors)), of_ys, of_raws, needs_images)
        known = [None if x is None else x.detach() for x in tensors[1 + 5 * count :]]
        found = _StackGradient.apply(ctx.blocks, known, needs_images, g, *tensors[: 1 + 5 * count])  # type: ignore[no-untyped-call]
        return None, *(() if needs_images else (None,)), *found


def _layers(blocks: Sequence[Block], tensors: Sequence[Any]) -> Iterator[Layer]:
    """From what `_Stack` saves: images, leaves, ys, raws, statistics, places."""
    count = len(blocks)
    x, leaves, rest = tensors[0], tensors[1 : 1 + 3 * count], tensors[1 + 3 * count :]
    ys, raws, statistics, places = (rest[i * count : j * count] for i, j in ((0, 1), (1, 2), (2, 4), (4, 5)))
    for i, block in enumerate(blocks):
        (weight, scale, shift), (mean, inverse) = leaves[3 * i : 3 * i + 3], statistics[2 * i : 2 * i + 2]
        yield Layer(block, ys[i - 1] if i else x, weight, scale, shift, raws[i], ys[i], mean, inverse, places[i])


def _pulled(
    layers: Sequence[Layer], of_ys: Sequence[Maybe], of_raws: Sequence[Maybe], needs_images: bool
) -> tuple[list[Maybe], list[tuple[Tensor, Tensor]]]:
    """The gradients in the images and the leaves, from those in y and raw of every layer; and of every layer the
    gradients after and before batch norm."""
    found: list[Maybe] = []
    kept = []
    g: Maybe = None
    for i in reversed(range(len(layers))):
        layer, of_raw = layers[i], of_raws[i]
        d = layer.before_norm(_sum(g, of_ys[i], layer.y))
        n, count = layer.normal(), d.shape[1]
        mean, along = d.mean(1, keepdim=True), (d * n).mean(1, keepdim=True)
        e = torch.addcmul(d - mean, n, along, value=-1).mul_(layer.scale[:, None] * layer.inverse).view(layer.raw.shape)
        if of_raw is not None:
            e += of_raw
        found = [layer.seen().of_weight(e, layer.weight), count * along[:, 0], count * mean[:, 0], *found]
        kept.append((d, e))
        g = layer.block.of_images(e, layer.x, layer.weight) if i or needs_images else None
    return [g, *found], kept[::-1]


def _sum(one: Maybe, other: Maybe, like: Tensor) -> Tensor:
    if one is None and other is None:
        return torch.zeros_like(like)
    return one if other is None else other if one is None else one + other  # type: ignore[return-value]


class _StackGradient(torch.autograd.Function):
    """From the gradient in y of the last block, and what `_Stack` saves, to the gradients in the images and leaves."""

    @staticmethod
    def forward(
        ctx: Any, blocks: tuple[Block, ...], known: list[Maybe], needs_images: bool, g: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        layers = list(_layers(blocks, [*tensors, *known]))
        found, kept = _pulled(layers, [*[None] * (len(blocks) - 1), g], [None] * len(blocks), needs_images)
        ctx.blocks, ctx.needs_images = blocks, needs_images
        ctx.save_for_backward(g, *tensors, *known, *chain.from_iterable(kept))
        return tuple(x for x in found if x is not None)

    @staticmethod
    def backward(ctx: Any, *of_gradients: Tensor) -> Gradients:
        count = len(ctx.blocks)
        g, *tensors = ctx.saved_tensors
        tensors, kept = tensors[: -2 * count], tensors[-2 * count :]
        if torch.is_grad_enabled():
            return None, None, None, *_plain_second(ctx.blocks, g, tensors, of_gradients, ctx.needs_images)
        given = iter(of_gradients)
        u = next(given) if ctx.needs_images else None
        of_leaves: list[Maybe] = []
        of_xs: list[Maybe] = []
        of_raws = []
        for layer, d, e in zip(_layers(ctx.blocks, tensors), kept[::2], kept[1::2], strict=True):
            block, v, of_weight = layer.block, next(given), None
            q = layer.seen().convolved(v)
            if u is not None:
                seen = block.seen(u, layer.weight)
                q += seen.convolved(layer.weight)
                of_weight = seen.of_weight(e, layer.weight)
            of_xs.append(block.of_images(e, layer.x, v) if of_xs or ctx.needs_input_grad[4] else None)
            of_d, of_raw, of_scale = _norm_second(layer, d, q.flatten(1, 3), next(given), next(given))
            of_raws.append(of_raw)
            of_leaves += [of_weight, of_scale, None]
            u = layer.picked(of_d)
        return None, None, None, u, of_xs[0], *of_leaves, *of_xs[1:], None, *of_raws


def _norm_second(
    layer: Layer, d: Tensor, q: Tensor, of_scale: Tensor, of_shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivative of batch norm's gradient: from cotangents of its three results to those of d, raw and scale.

    With n = r (raw − mean), f = s r and m the mean of a channel, the gradient is e = f (d − m(d) − n m(dn)), Σ dn for
    the scale s, and Σ d for the shift. Their cotangents are q, `of_scale` and `of_shift`.
    """
    n, factor = layer.normal(), layer.scale[:, None] * layer.inverse
    d_mean, along, q_mean, q_along, q_d = (x.mean(1, keepdim=True) for x in (d, d * n, q, q * n, q * d))
    product = q_d - q_mean * d_mean - q_along * along
    share = of_scale[:, None] - factor * q_along
    of_d = torch.addcmul(of_shift[:, None] - factor * q_mean, n, share).addcmul_(q, factor)
    # e and Σ dn depend on raw through n, with the cotangent share·d − f m(dn) q, and e through r.
    constant = factor * along * q_mean - share * d_mean
    slope = (factor * q_along - share) * along - factor * product
    r = layer.inverse
    of_raw = torch.addcmul(r * constant, n, r * slope).addcmul_(q, -r * factor * along).addcmul_(d, r * share)
    return of_d, of_raw.view(layer.raw.shape), (n.shape[1] * r * product)[:, 0]


# ------------------------------------------------------------------------------------------------- higher derivatives


def _plain_pulled(
    layers: Sequence[Layer], of_ys: Sequence[Maybe], of_raws: Sequence[Maybe], needs_images: bool
) -> list[Maybe]:
    """`_pulled` in operations that autograd differentiates, for derivatives of the third order and above."""
    found: list[Maybe] = []
    g: Maybe = None
    for i in reversed(range(len(layers))):
        layer, of_raw = layers[i], of_raws[i]
        d, raw = layer.before_norm(_sum(g, of_ys[i], layer.y)), layer.raw.flatten(1, 3)
        centred = raw - raw.mean(1, keepdim=True)
        inverse = (centred.square().mean(1, keepdim=True) + layer.block.eps).rsqrt()
        n = centred * inverse
        along = (d * n).mean(1, keepdim=True)
        e = (layer.scale[:, None] * inverse * (d - d.mean(1, keepdim=True) - n * along)).view(layer.raw.shape)
        e = e if of_raw is None else e + of_raw
        found = [layer.seen().of_weight(e, layer.weight), (d * n).sum(1), d.sum(1), *found]
        g = layer.block.of_images(e, layer.x, layer.weight) if i or needs_images else None
    return [g, *found]


def _plain_second(
    blocks: tuple[Block, ...], g: Tensor, tensors: Sequence[Any], cotangents: Sequence[Tensor], needs_images: bool
) -> list[Maybe]:
    """The backward pass of `_StackGradient` in operations that autograd differentiates."""
    count = len(blocks)
    # Views, because a layer's results depend on those before it, and each is a variable of its own here.
    inputs = [x.view_as(x) for x in (g, *tensors[: 1 + 5 * count])]
    layers = list(_layers(blocks, [*inputs[1:], *tensors[1 + 5 * count :]]))
    found = _plain_pulled(layers, [*[None] * (count - 1), inputs[0]], [None] * count, needs_images)
    total = sum((x * u).sum() for x, u in zip((x for x in found if x is not None), cotangents, strict=True))
    wanted = [x for x in inputs if x.requires_grad]
    parts = iter(torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True))  # type: ignore[arg-type]
    return [next(parts) if x.requires_grad else None for x in inputs]
