"""Representations h_λ and linear heads: one file per network, found by walking this folder.

A file is a network if it has a function `build(channels)` that returns an `nn.Module` from images N×C×H×W to features
N×F. The name of the network is that of the file.
"""

from __future__ import annotations

import importlib
import sys

import torch
from torch import nn

from bilevel import discovery
from bilevel.errors import BilevelError


def find() -> list[str]:
    """The names of the networks.

    >>> find()
    ['c4l', 'c4l-64', 'omniglot-net', 'rn']
    """
    found = (importlib.import_module(name) for name in discovery.modules(sys.modules[__name__]))
    networks = (module.__name__.rpartition(".")[2] for module in found if hasattr(module, "build"))
    return [name.replace("_", "-") for name in networks]


def build(name: str, channels: int, seed: int = 0, last_relu: bool = True) -> nn.Module:
    """The network of that name for images with `channels` channels. The weights are drawn with the seed.

    Without `last_relu`, features can be negative, which suits cosine classifiers.

    >>> sum(p.numel() for p in build("omniglot-net", channels=1).parameters())
    111424
    """
    if name not in find():
        raise BilevelError(
            f"There is no network {name!r}; pass one of {', '.join(find())}, or an nn.Module of your own."
        )
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = module.build(channels)
    return network if last_relu else _without_last_relu(network)


def _without_last_relu(network: nn.Module) -> nn.Module:
    """The network with nn.Identity in the place of its last ReLU, so that the other layers keep their names."""
    names = [name for name, layer in network.named_modules() if isinstance(layer, (nn.ReLU, nn.LeakyReLU))]
    if names:
        parent, _, layer = names[-1].rpartition(".")
        setattr(network.get_submodule(parent), layer, nn.Identity())
    return network
