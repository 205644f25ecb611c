"""The objectives in torch, as pure functions of (w, λ, batch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from harness.contract import Case

Tensors = Sequence[Tensor]
Objective = Callable[[Tensors, Tensors, Tensors], Tensor]


def ridge_inner(w: Tensors, lam: Tensors, batch: Tensors) -> Tensor:
    return ((batch[0] @ w[0] - batch[1]) ** 2).sum() + (lam[0].exp() * w[0] ** 2).sum()


def ridge_outer(w: Tensors, lam: Tensors, batch: Tensors) -> Tensor:
    return ((batch[0] @ w[0] - batch[1]) ** 2).mean()


def network_inner(w: Tensors, lam: Tensors, batch: Tensors) -> Tensor:
    penalty = (lam[0].exp() * w[0] ** 2).sum() + (lam[1].exp() * w[2] ** 2).sum()
    return network_outer(w, lam, batch) + penalty


def network_outer(w: Tensors, lam: Tensors, batch: Tensors) -> Tensor:
    hidden = torch.tanh(linear(batch[0], w[0], w[1]))
    return cross_entropy(linear(hidden, w[2], w[3]), batch[1])


OBJECTIVES: dict[str, tuple[Objective, Objective]] = {
    "ridge": (ridge_inner, ridge_outer),
    "network": (network_inner, network_outer),
}


@dataclass(frozen=True)
class TorchCase:
    """A case as torch tensors, where λ requires grad."""

    inner: Objective
    outer: Objective
    lam: list[Tensor]
    start: list[Tensor]
    train: list[Tensor]
    val: list[Tensor]
    lr: float
    steps: int


def in_torch(case: Case) -> TorchCase:
    torch.set_num_threads(1)
    lam, start, train, val = (
        [torch.from_numpy(array.copy()) for array in group] for group in (case.lam, case.start, case.train, case.val)
    )
    inner, outer = OBJECTIVES[case.kind]
    return TorchCase(inner, outer, [leaf.requires_grad_() for leaf in lam], start, train, val, case.lr, case.steps)
