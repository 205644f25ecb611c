"""Four stride-2 convolutions with 64 filters: 28×28 pixels to 256 features, 111,424 weights."""

from __future__ import annotations

from torch import nn

from bilevel.models._layers import convolution
from bilevel.models.batch_norm import BatchNorm


def build(channels: int, filters: int = 64) -> nn.Module:
    blocks: list[nn.Module] = []
    for inputs in (channels, filters, filters, filters):
        blocks += [convolution(inputs, filters, 3, stride=2), BatchNorm(filters), nn.ReLU(inplace=True)]
    return nn.Sequential(*blocks, nn.Flatten())
