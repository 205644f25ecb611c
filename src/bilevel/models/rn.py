"""Four residual blocks: 84×84 pixels to 512 features, 3,805,696 weights, 51,936 of them in skips (the paper's RN)."""

from __future__ import annotations

from torch import Tensor, nn

from bilevel.models._layers import convolution
from bilevel.models.batch_norm import BatchNorm


class ResidualBlock(nn.Module):
    """max-pool(body(x) + skip(x)) with three convolutions in the body and a linear 1×1 convolution as the skip."""

    per_image = True

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        body: list[nn.Module] = []
        for first in (inputs, outputs, outputs):
            body += [convolution(first, outputs, 3), BatchNorm(outputs), nn.LeakyReLU(0.1, inplace=True)]
        self.body = nn.Sequential(*body)
        self.skip = convolution(inputs, outputs, 1, bias=True)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.body(x) + self.skip(x))


def build(
    channels: int, filters: tuple[int, ...] = (64, 96, 128, 256), tail: tuple[int, int] = (2048, 512)
) -> nn.Module:
    sizes = (channels, *filters)
    blocks = [ResidualBlock(inputs, outputs) for inputs, outputs in zip(sizes, filters, strict=False)]
    wide, features = tail
    return nn.Sequential(
        *blocks,
        convolution(filters[-1], wide, 1, bias=True),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        convolution(wide, features, 1, bias=True),
        nn.ReLU(inplace=True),
        nn.Flatten(),
    )
