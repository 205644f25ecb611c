"""One forward and one backward pass of the plain module on the same images."""

from collections.abc import Iterator, Sequence

import torch

from harness.contract import Case, Run
from problems.representation import representation, summed

LABEL = "h alone, plain module"
GROUP = "floor"
KINDS = ("hyper",)


def prepare(case: Case) -> Run:
    p = representation(case)

    def gradients() -> Iterator[Sequence[torch.Tensor]]:
        for images, _, queries, _ in p.episodes:
            outputs = p.module(images), p.module(queries)
            yield torch.autograd.grad(outputs, p.lam, [torch.ones_like(x) for x in outputs])

    return lambda: summed(gradients())
