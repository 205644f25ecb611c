"""One forward and one backward pass of the plain module with channels last, one episode at a time.

The support set and the query set pass together, so batch norm runs once for both. A learner normalises each set by
itself, which takes longer.
"""

from collections.abc import Iterator, Sequence

import torch

from harness.contract import Case, Run
from problems.representation import representation, summed

LABEL = "h alone, channels last"
GROUP = "floor"
KINDS = ("hyper",)


def prepare(case: Case) -> Run:
    p = representation(case, torch.channels_last)
    episodes = [torch.cat([images, queries]) for images, _, queries, _ in p.episodes]

    def gradients() -> Iterator[Sequence[torch.Tensor]]:
        for images in episodes:
            output = p.module(images)
            yield torch.autograd.grad(output, p.lam, torch.ones_like(output))

    return lambda: summed(gradients())
