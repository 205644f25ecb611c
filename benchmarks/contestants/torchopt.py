"""torchopt with its functional optimiser, which is the fastest of its three interfaces on these cases."""

from collections.abc import Sequence

import torch
import torchopt

from harness.contract import Case, Run
from problems.in_torch import in_torch

LABEL = "torchopt"
GROUP = "torch peer"
ENVIRONMENT = "torchopt"
REQUIREMENTS = ("torchopt==0.7.3", "torch", "numpy")


def prepare(case: Case) -> Run:
    p = in_torch(case)

    def run() -> Sequence[torch.Tensor]:
        optimizer = torchopt.FuncOptimizer(torchopt.sgd(lr=p.lr))
        w = tuple(leaf.detach().requires_grad_() for leaf in p.start)
        for _ in range(p.steps):
            w = optimizer.step(p.inner(w, p.lam, p.train), w)
        return torch.autograd.grad(p.outer(w, p.lam, p.val), p.lam)

    return run
