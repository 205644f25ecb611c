"""Multinomial logistic regression on given features, for many episodes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LinearClassifiers:
    """L(w) = Σ_j mean over n of cross-entropy(Φ_j w_j, y_j) + l2/2 ‖w‖², one linear classifier w_j for each episode j.

    The batch is (Φ, y): features episodes × examples × F and labels episodes × examples. w is episodes × F × classes. λ
    enters through the features, which `encode` computes.

    >>> phi, labels = torch.ones(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    >>> round(float(LinearClassifiers()(torch.zeros(2, 4, 5), None, (phi, labels))), 4)  # 2 log 5
    3.2189
    """

    l2: float = 0.0

    def __call__(self, w: Tensor, lam: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = batch
        logits = torch.bmm(features, w).flatten(0, 1)
        # A mean over an episode's examples and a sum over episodes, so that every classifier has a slope of its own.
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / labels.shape[1]
        return loss + self.l2 / 2 * w.square().sum() if self.l2 else loss
