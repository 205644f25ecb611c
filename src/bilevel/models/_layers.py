"""What the networks of the paper share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def convolution(inputs: int, outputs: int, size: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution with same padding, Glorot-uniform weights and zero bias."""
    layer = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def is_plain(layer: nn.Conv2d) -> bool:
    """Whether a convolution is nothing but one: no bias, groups or dilation, zeros around the image, not a subclass."""
    return (
        type(layer) is nn.Conv2d
        and layer.bias is None
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def suits(x: Tensor) -> bool:
    """Whether layers are worth computing in a way of our own: graphics cards and half precision have theirs."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
