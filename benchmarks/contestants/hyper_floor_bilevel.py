"""One forward and one backward pass of the package's own h on the same images."""

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

    def gradients() -> Iterator[Sequence[torch.Tensor]]:
        for images, queries in zip(episodes.train[0], episodes.val[0], strict=True):
            outputs = learner.represent_sets(lam, images, queries, training=True)
            yield torch.autograd.grad(outputs, list(lam.values()), [torch.ones_like(x) for x in outputs])

    return lambda: summed(gradients())
