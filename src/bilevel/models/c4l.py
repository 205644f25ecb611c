"""Four convolutions with 32 filters and max-pooling: 84×84 pixels to 800 features, 28,640 weights (the paper's C4L)."""

from __future__ import annotations

from torch import nn

from bilevel.models._layers import convolution
from bilevel.models.batch_norm import BatchNorm


def build(channels: int, filters: int = 32) -> nn.Module:
    blocks: list[nn.Module] = []
    for inputs in (channels, filters, filters, filters):
        blocks += [convolution(inputs, filters, 3), BatchNorm(filters), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten())
