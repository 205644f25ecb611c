"""What the networks of the paper share."""

from __future__ import annotations

from torch import nn


def convolution(inputs: int, outputs: int, size: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution with same padding, Glorot-uniform weights and zero bias."""
    layer = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
