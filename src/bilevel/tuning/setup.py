"""What a hyperparameter is told about the training that it enters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel.errors import BilevelError


@dataclass(frozen=True)
class Setup:
    """The facts about a training that decide how many values a hyperparameter has.

    Args:
        parameters: the model's parameters by name, at their start.
        steps: T.
        examples: how many training examples there are.
        losses: the names of the training losses.
    """

    parameters: dict[str, Tensor]
    steps: int
    examples: int
    losses: tuple[str, ...] = ("loss",)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def layers(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """The number of the layer of every parameter: a layer is a module that holds parameters itself."""
        order: dict[str, int] = {}
        return {
            name: order.setdefault(layer_of(name), len(order)) for name in (self.parameters if names is None else names)
        }

    def layer_names(self, names: Iterable[str] | None = None) -> list[str]:
        return list(dict.fromkeys(layer_of(name) for name in (self.parameters if names is None else names)))


def layer_of(parameter: str) -> str:
    """The module that holds a parameter.

    >>> layer_of("features.0.weight"), layer_of("weight")
    ('features.0', 'model')
    """
    return parameter.rpartition(".")[0] or "model"


def refuse_parameters(kind: str, chosen: list[str]) -> None:
    if not chosen:
        raise BilevelError(f"{kind}(only=…) chose none of the model's parameters; let it return True for some names.")
