"""Multinomial logistic regression for many episodes at once: batched matrix products.

Features are episodes × examples × F with a last feature that is always 1, so that a head is one matrix F × classes and
its bias is the last row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def with_one(features: Tensor) -> Tensor:
    """The features with the constant 1 appended, for the bias."""
    return F.pad(features, (0, 1), value=1.0)


def zeros(episodes: int, features: int, ways: int, like: Tensor) -> Tensor:
    """Heads at zero, where the paper starts them; `features` counts the constant."""
    return like.new_zeros((episodes, features, ways))


def cross_entropy(heads: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of every episode, added up over episodes: each head gets the gradient of its own.

    >>> phi, labels = torch.ones(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    >>> round(float(cross_entropy(torch.zeros(2, 4, 5), phi, labels)), 4)  # 2 log 5
    3.2189
    """
    logits = torch.bmm(features, heads)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.shape[1]


@dataclass(frozen=True)
class Descent:
    """T steps of gradient descent on cross_entropy + l2/2 ‖w‖² from w = 0, for every episode."""

    steps: int
    lr: float
    l2: float = 0.0

    def outer(
        self, support: Tensor, labels: Tensor, query: Tensor, answers: Tensor, ways: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """E(w_T), the mean over episodes of the cross-entropy of the queries, and its gradients in both sets' features.

        Every iterate is a combination of the support set's features, w_t = ΦᵀA_t, so the steps and their adjoint need
        no more of Φ than the products K = ΦΦᵀ: with one example of each class they cost next to nothing.

            A_{t+1} = (1 − lr·l2) A_t − lr/n (P_t − Y),   P_t = softmax(K A_t),   E = cross-entropy(R A_T),  R = ΨΦᵀ

        >>> phi = torch.eye(2)[None]
        >>> value, _, _ = Descent(steps=100, lr=1.0).outer(phi, torch.tensor([[0, 1]]), phi, torch.tensor([[0, 1]]), 2)
        >>> bool(value < 0.1)
        True
        """
        episodes, n, m = len(support), labels.shape[1], answers.shape[1]
        decay, step = 1 - self.lr * self.l2, self.lr / n
        products, crossed = support @ support.mT, query @ support.mT
        wanted, asked = (F.one_hot(y, ways).to(support) for y in (labels, answers))
        coefficients, probabilities = support.new_zeros((2, self.steps + 1, episodes, n, ways)).unbind()
        for t in range(self.steps):
            torch.softmax(products @ coefficients[t], 2, out=probabilities[t])
            torch.sub(decay * coefficients[t], probabilities[t] - wanted, alpha=step, out=coefficients[t + 1])
        log_answers = torch.log_softmax(crossed @ coefficients[-1], 2)
        value = -(log_answers * asked).sum() / (m * episodes)

        of_crossed = (log_answers.exp() - asked) / (m * episodes)
        adjoint = crossed.mT @ of_crossed
        slopes = torch.empty_like(coefficients)[:-1]
        for t in reversed(range(self.steps)):
            weighed = probabilities[t] * adjoint
            torch.addcmul(weighed, probabilities[t], weighed.sum(2, keepdim=True), value=-1, out=slopes[t])
            adjoint = torch.sub(decay * adjoint, products @ slopes[t], alpha=step)
        # One product for all steps.
        before, after = (x.permute(1, 2, 0, 3).flatten(2) for x in (coefficients[:-1], slopes))
        of_products = after @ before.mT * -step
        of_crossed = of_crossed @ coefficients[-1].mT
        return value, (of_products + of_products.mT) @ support + of_crossed.mT @ query, of_crossed @ support


def curvature(features: Tensor, ways: int) -> Tensor:
    """The largest curvature of every episode's mean cross-entropy at zero, where the steps begin.

    There every class has probability 1/ways, so the Hessian is (I − 11ᵀ/ways)/ways ⊗ ΦᵀΦ/n, and the largest eigenvalue
    of ΦᵀΦ is that of the smaller of the two Gram matrices.
    """
    wide = features if features.shape[1] <= features.shape[2] else features.transpose(1, 2)
    return torch.linalg.eigvalsh(torch.bmm(wide, wide.transpose(1, 2)))[:, -1] / (features.shape[1] * ways)


def accuracy(heads: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The share of right answers in every episode."""
    return (torch.bmm(features, heads).argmax(2) == labels).double().mean(1)
