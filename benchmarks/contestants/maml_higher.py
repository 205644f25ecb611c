"""MAML with higher: its differentiable SGD adapts all weights."""

import higher
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from problems.initialisation import AdaptAll, trainable, with_all_weights

LABEL = "higher"
GROUP = "torch peer"
ENVIRONMENT = "higher"
REQUIREMENTS = ("higher==0.2.1", "torch", "numpy")
KINDS = ("maml",)


def adaptation(model: nn.Module, lr: float, steps: int) -> AdaptAll:
    optimizer = torch.optim.SGD(trainable(model).values(), lr=lr)

    def run(images: Tensor, labels: Tensor, queries: Tensor, answers: Tensor) -> Tensor:
        with higher.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (fast, inner_optimizer):
            for _ in range(steps):
                inner_optimizer.step(cross_entropy(fast(images), labels))
            return cross_entropy(fast(queries), answers)

    return run


prepare = with_all_weights(adaptation)
