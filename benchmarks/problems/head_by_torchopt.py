"""The adaptation of a linear head by torchopt's functional optimiser."""

from __future__ import annotations

import torch
import torchopt
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from problems.representation import Adapt, Representation


def adapt(p: Representation) -> Adapt:
    def run(support: Tensor, labels: Tensor, query: Tensor, answers: Tensor) -> Tensor:
        optimizer = torchopt.FuncOptimizer(torchopt.sgd(lr=p.lr))
        w = tuple(torch.zeros(shape, requires_grad=True) for shape in ((p.ways, p.features), (p.ways,)))
        for _ in range(p.steps):
            w = optimizer.step(cross_entropy(linear(support, *w), labels), w)
        return cross_entropy(linear(query, *w), answers)

    return run
