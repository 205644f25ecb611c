"""torchopt as someone uses it who knows that torch's convolutions are faster with channels last."""

import torch
import torchopt
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from problems.representation import Adapt, Representation, with_adaptation

LABEL = "torchopt, channels last"
GROUP = "by hand"
ENVIRONMENT = "torchopt"
REQUIREMENTS = ("torchopt==0.7.3", "torch", "numpy")
KINDS = ("hyper",)


def adapt(p: Representation) -> Adapt:
    def run(support: Tensor, labels: Tensor, query: Tensor, answers: Tensor) -> Tensor:
        optimizer = torchopt.FuncOptimizer(torchopt.sgd(lr=p.lr))
        w = tuple(torch.zeros(shape, requires_grad=True) for shape in ((p.ways, p.features), (p.ways,)))
        for _ in range(p.steps):
            w = optimizer.step(cross_entropy(linear(support, *w), labels), w)
        return cross_entropy(linear(query, *w), answers)

    return run


prepare = with_adaptation(adapt, torch.channels_last)
