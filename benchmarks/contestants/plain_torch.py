"""The unrolled loop, written by hand in torch without any library."""

from collections.abc import Sequence

import torch

from harness.contract import Case, Run
from problems.in_torch import in_torch

LABEL = "plain torch"
GROUP = "by hand"


def prepare(case: Case) -> Run:
    p = in_torch(case)

    def run() -> Sequence[torch.Tensor]:
        w = [leaf.detach().requires_grad_() for leaf in p.start]
        for _ in range(p.steps):
            slope = torch.autograd.grad(p.inner(w, p.lam, p.train), w, create_graph=True)
            w = [leaf.sub(g, alpha=p.lr) for leaf, g in zip(w, slope, strict=True)]
        return torch.autograd.grad(p.outer(w, p.lam, p.val), p.lam)

    return run
