"""higher: features are computed once per episode, and its differentiable SGD adapts a linear head."""

import higher
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from problems.representation import Adapt, Representation, with_adaptation

LABEL = "higher"
GROUP = "torch peer"
ENVIRONMENT = "higher"
REQUIREMENTS = ("higher==0.2.1", "torch", "numpy")
KINDS = ("hyper",)


def adapt(p: Representation) -> Adapt:
    head = nn.Linear(p.features, p.ways)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD(head.parameters(), lr=p.lr)

    def run(support: Tensor, labels: Tensor, query: Tensor, answers: Tensor) -> Tensor:
        with higher.innerloop_ctx(head, optimizer, copy_initial_weights=False) as (model, inner_optimizer):
            for _ in range(p.steps):
                inner_optimizer.step(cross_entropy(model(support), labels))
            return cross_entropy(model(query), answers)

    return run


prepare = with_adaptation(adapt)
