"""Functions that are shared by the networks, and by the layers that are written as autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten
Gradients = tuple[Tensor | None, ...]


def convolution(inputs: int, outputs: int, size: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution with same padding, Glorot-uniform weights and zero bias."""
    layer = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def is_plain(layer: nn.Conv2d) -> bool:
    """Whether a convolution is a plain one: no bias, groups or dilation, zero padding, not a subclass."""
    return (
        type(layer) is nn.Conv2d
        and layer.bias is None
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def pooling_window(layer: nn.Module) -> tuple[Any, ...] | None:
    """The settings of max-pooling as torch's function takes them; None for other layers, dilation or indices."""
    if type(layer) is not nn.MaxPool2d or layer.dilation != 1 or layer.return_indices:
        return None
    return *map(pair, (layer.kernel_size, layer.stride, layer.padding)), [1, 1], layer.ceil_mode


def pair(value: Any) -> list[int]:
    """A setting of two axes, which may be given as one number."""
    return [value, value] if isinstance(value, int) else list(value)


def outputs_of(size: int, filters: int, stride: int, padding: int) -> int:
    """The number of rows (or columns) in the result of a convolution."""
    return (size + 2 * padding - filters) // stride + 1


def by_pixel(images: Tensor) -> Tensor:
    """Images N×C×H×W as a contiguous tensor (image, pixel, channel); no copy if channels come last in memory."""
    return images.permute(0, 2, 3, 1).contiguous().flatten(1, 2)


def to_images(pixels: Tensor, height: int) -> Tensor:
    """The inverse of `by_pixel`."""
    return pixels.view(len(pixels), height, -1, pixels.shape[2]).permute(0, 3, 1, 2)


def normalised_sets(x: Tensor, sizes: Sequence[int], scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Batch norm of consecutive sets of images, each by its own statistics."""
    parts = torch.split(x, list(sizes))
    return torch.cat([F.batch_norm(part, None, None, scale, shift, True, 0.0, eps) for part in parts])


def suits(x: Tensor) -> bool:
    """Whether the fast layers are used: on a CPU, in single or double precision, without autocast."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


def with_graph(plain: Callable[..., Tensor], inputs: tuple[Tensor, ...], g: Tensor) -> Gradients:
    """The gradient of `plain`, a layer in torch's operations, as a differentiable function of the inputs and of g."""
    # Views, because one input may have been computed from another: from a weight that an earlier layer has too.
    inputs = tuple(x.view_as(x) for x in inputs)
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(plain(*inputs), wanted, g, create_graph=True, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)
