"""learn2learn's algorithm, implemented here because the package cannot be built.

In every step, each parameter p of a copy is replaced by p − lr·g. The graph of all steps is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from problems.initialisation import AdaptAll, trainable


def adaptation(model: nn.Module, lr: float, steps: int) -> AdaptAll:
    def run(images: Tensor, labels: Tensor, queries: Tensor, answers: Tensor) -> Tensor:
        w = trainable(model)
        for _ in range(steps):
            loss = cross_entropy(functional_call(model, w, (images,)), labels)
            grads = torch.autograd.grad(loss, list(w.values()), create_graph=True)
            w = {name: p - lr * g for (name, p), g in zip(w.items(), grads, strict=True)}
        return cross_entropy(functional_call(model, w, (queries,)), answers)

    return run
