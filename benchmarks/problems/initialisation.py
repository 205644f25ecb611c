"""MAML in plain torch: all weights of a module and of a linear head take T steps on every episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from harness.contract import Case, Run
from problems.representation import representation, summed

# A function of support images, their labels, query images and their labels, which returns E after T steps.
AdaptAll = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# A function of a model, the step size and the number of steps, which returns an `AdaptAll`.
Adaptation = Callable[[nn.Module, float, int], AdaptAll]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def with_all_weights(
    adaptation: Adaptation, layout: torch.memory_format = torch.contiguous_format
) -> Callable[[Case], Run]:
    """The `prepare` of a contestant that computes the gradient of the mean E with respect to the network's initial
    weights. The head starts at zero."""

    def prepare(case: Case) -> Run:
        p = representation(case, layout)
        head = nn.Linear(p.features, p.ways)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        run_episode = adaptation(nn.Sequential(p.module, head), p.lr, p.steps)

        def gradients() -> Iterator[Sequence[Tensor]]:
            for images, labels, queries, answers in p.episodes:
                loss = run_episode(images, labels, queries, answers) / len(p.episodes)
                yield torch.autograd.grad(loss, p.lam)

        return lambda: summed(gradients())

    return prepare
