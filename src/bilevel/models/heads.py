"""Linear heads of many episodes, as batched matrix products.

Features are episodes × examples × F with a last feature that is always 1, so that a head is one matrix F × classes and
its bias is the last row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def with_one(features: Tensor) -> Tensor:
    """The features with the constant 1 appended, for the bias."""
    return F.pad(features, (0, 1), value=1.0)


def curvature(features: Tensor, ways: int) -> Tensor:
    """The largest curvature of every episode's mean cross-entropy at w_0 = 0.

    There every class has probability 1/ways, so the Hessian is (I − 11ᵀ/ways)/ways ⊗ ΦᵀΦ/n, and the largest eigenvalue
    of ΦᵀΦ is that of the smaller of the two Gram matrices.
    """
    wide = features if features.shape[1] <= features.shape[2] else features.transpose(1, 2)
    return torch.linalg.eigvalsh(torch.bmm(wide, wide.transpose(1, 2)))[:, -1] / (features.shape[1] * ways)


def accuracy(heads: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The share of correct predictions in every episode."""
    return (torch.bmm(features, heads).argmax(2) == labels).double().mean(1)
