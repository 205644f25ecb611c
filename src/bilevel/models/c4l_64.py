"""C4L with 64 filters: the network that the paper pretrains on all classes at once (its Multiclass, Table 4)."""

from __future__ import annotations

from torch import nn

from bilevel.models import c4l


def build(channels: int) -> nn.Module:
    return c4l.build(channels, filters=64)
