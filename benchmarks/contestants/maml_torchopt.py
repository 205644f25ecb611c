"""MAML with torchopt: its functional optimiser adapts all weights."""

import torchopt
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from problems.initialisation import AdaptAll, trainable, with_all_weights

LABEL = "torchopt"
GROUP = "torch peer"
ENVIRONMENT = "torchopt"
REQUIREMENTS = ("torchopt==0.7.3", "torch", "numpy")
KINDS = ("maml",)


def adaptation(model: nn.Module, lr: float, steps: int) -> AdaptAll:
    start = trainable(model)

    def run(images: Tensor, labels: Tensor, queries: Tensor, answers: Tensor) -> Tensor:
        optimizer = torchopt.FuncOptimizer(torchopt.sgd(lr=lr))
        w = tuple(start.values())
        for _ in range(steps):
            logits = functional_call(model, dict(zip(start, w, strict=True)), (images,))
            w = optimizer.step(cross_entropy(logits, labels), w)
        return cross_entropy(functional_call(model, dict(zip(start, w, strict=True)), (queries,)), answers)

    return run


prepare = with_all_weights(adaptation)
