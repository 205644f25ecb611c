"""One forward and one backward pass of the package's own h on the same images, with as many episodes at a time as in
its learner."""

from collections.abc import Iterator, Sequence

import torch

from harness.contract import Case, Run
from problems.representation import summed
from problems.representation_in_bilevel import learner_and_episodes

LABEL = "h alone, as bilevel runs it"
GROUP = "floor"
KINDS = ("hyper",)


def prepare(case: Case) -> Run:
    learner, episodes = learner_and_episodes(case)
    lam = {name: value.clone().requires_grad_() for name, value in learner.lam.items()}
    chunks = list(zip(*(torch.split(part[0], learner.chunk) for part in (episodes.train, episodes.val)), strict=True))

    def gradients() -> Iterator[Sequence[torch.Tensor]]:
        for images, queries in chunks:
            outputs = learner.representation.episodes(lam, images, queries, training=True)
            yield torch.autograd.grad(outputs, list(lam.values()), [torch.ones_like(x) for x in outputs])

    return lambda: summed(gradients())
