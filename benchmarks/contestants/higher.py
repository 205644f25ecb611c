"""higher: a patched module and a differentiable SGD."""

from collections.abc import Sequence

import higher
import torch
from torch import nn

from harness.contract import Case, Run
from problems.in_torch import in_torch

LABEL = "higher"
GROUP = "torch peer"
ENVIRONMENT = "higher"
REQUIREMENTS = ("higher==0.2.1", "torch", "numpy")


class Weights(nn.Module):
    """A module whose parameters are w. The objectives are functions of these."""

    def __init__(self, start: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.leaves = nn.ParameterList([nn.Parameter(leaf.clone()) for leaf in start])


def prepare(case: Case) -> Run:
    p = in_torch(case)
    module = Weights(p.start)
    optimizer = torch.optim.SGD(module.parameters(), lr=p.lr)

    def run() -> Sequence[torch.Tensor]:
        with higher.innerloop_ctx(module, optimizer, copy_initial_weights=False) as (model, inner_optimizer):
            for _ in range(p.steps):
                inner_optimizer.step(p.inner(list(model.parameters()), p.lam, p.train))
            return torch.autograd.grad(p.outer(list(model.parameters()), p.lam, p.val), p.lam)

    return run
