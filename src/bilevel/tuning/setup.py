"""Facts about a training that determine how many values a hyperparameter has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Setup:
    """The model's parameters, the number of steps and of examples, the names of the losses.

    Args:
        parameters: the model's parameters by name, before training.
        steps: T.
        examples: the number of training examples.
        losses: the names of the training losses.

    >>> import torch
    >>> setup = Setup({"body.0.weight": torch.ones(2), "body.0.bias": torch.ones(2), "scale": torch.ones(1)}, 5, 10)
    >>> setup.layers()
    {'body.0': ['body.0.weight', 'body.0.bias'], 'model': ['scale']}
    """

    parameters: dict[str, Tensor]
    steps: int
    examples: int
    losses: tuple[str, ...] = ("loss",)

    @property
    def like(self) -> Tensor:
        """A tensor of the model's dtype on its device."""
        return next(iter(self.parameters.values()))

    def layers(self, names: Iterable[str] | None = None) -> dict[str, list[str]]:
        """The parameters of each layer: a layer is a module that holds parameters itself."""
        layers: dict[str, list[str]] = {}
        for name in self.parameters if names is None else names:
            layers.setdefault(name.rpartition(".")[0] or "model", []).append(name)
        return layers
