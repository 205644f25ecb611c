"""The loss of one classifier over all classes of meta-training, in addition to the episodes or instead of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.errors import BilevelError

Classifier = Literal["linear", "cosine"]
PREFIX = "classifier."
# The logarithm of the factor on the cosines at the start of training.
TEMPERATURE = math.log(10.0)


@dataclass(frozen=True)
class ClassLoss:
    """The cross-entropy over all classes, a function of the features and of leaves of λ called `classifier.…`.

    Args:
        classes: the number of classes.
        kind: "linear" has the logits θᵀφ + b, "cosine" the logits exp(τ)·cos(θ, φ) with a learned τ.
        smoothing: the label smoothing: how much of the target probability is spread evenly over all classes.
    """

    classes: int
    kind: Classifier = "linear"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Classifier):
            raise BilevelError(f"classifier={self.kind!r} is unknown; pass one of {', '.join(get_args(Classifier))}.")

    def new(self, features: int, seed: int) -> dict[str, Tensor]:
        """New leaves for this number of features, drawn with the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weight = nn.init.xavier_uniform_(torch.empty(self.classes, features))
        leaves = {"weight": weight}
        if self.kind == "cosine":
            leaves["temperature"] = torch.tensor(TEMPERATURE)
        else:
            leaves["bias"] = torch.zeros(self.classes)
        return {f"{PREFIX}{name}": value for name, value in leaves.items()}

    def logits(self, lam: Mapping[str, Tensor], features: Tensor) -> Tensor:
        weight = lam[f"{PREFIX}weight"]
        if self.kind == "cosine":
            cosines = F.normalize(features, dim=-1) @ F.normalize(weight, dim=1).mT
            return lam[f"{PREFIX}temperature"].exp() * cosines
        return F.linear(features, weight, lam[f"{PREFIX}bias"])

    def __call__(self, lam: Mapping[str, Tensor], features: Tensor, labels: Tensor) -> Tensor:
        """The mean over all examples: features … × F, labels …, with any leading axes."""
        logits = self.logits(lam, features.flatten(0, -2))
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=self.smoothing)
