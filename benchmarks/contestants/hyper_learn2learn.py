"""learn2learn's algorithm, implemented here because the package cannot be built.

In every step, each parameter p of a clone of the head is replaced by p − lr·g. The graph of all steps is kept.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from problems.representation import Adapt, Representation, with_adaptation

LABEL = "learn2learn, by hand"
GROUP = "torch peer"
KINDS = ("hyper",)


def adapt(p: Representation) -> Adapt:
    head = [torch.zeros(shape, requires_grad=True) for shape in ((p.ways, p.features), (p.ways,))]

    def run(support: Tensor, labels: Tensor, query: Tensor, answers: Tensor) -> Tensor:
        w = [parameter.clone() for parameter in head]
        for _ in range(p.steps):
            loss = cross_entropy(linear(support, *w), labels)
            grads = torch.autograd.grad(loss, w, create_graph=True)
            w = [parameter - p.lr * grad for parameter, grad in zip(w, grads, strict=True)]
        return cross_entropy(linear(query, *w), answers)

    return run


prepare = with_adaptation(adapt)
