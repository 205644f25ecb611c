"""Classic multitask learning (Baxter, 1995): representation and classifiers descend one objective together.

The paper's *Classic* (Table 4) minimises Σ_j L^j(w^j, λ) jointly, on a meta-batch of episodes that is drawn anew every
few gradient steps; nothing is differentiated through the steps.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from bilevel.data import ImageDataset
from bilevel.errors import BilevelError
from bilevel.meta.settings import Settings
from bilevel.meta.training import FewShotTraining
from bilevel.problem import Task
from bilevel.training.distributed import World


class ClassicTraining(FewShotTraining):
    """A hyperiteration is one joint step: gradient descent on the w^j, Adam on λ; after `steps` of them come new
    episodes and w^j = 0."""

    def __init__(self, settings: Settings, data: ImageDataset, world: World | None = None) -> None:
        super().__init__(settings, data, world)
        if self.world.size > 1:
            raise BilevelError("Classic training runs in one process; start it without torchrun.")
        self.heads = self._new_heads()

    def _new_heads(self) -> Tensor:
        return self.learner.problem(self.settings.meta_batch, self.settings.ways).init(self.learner.lam)

    def _groups(self, iteration: int) -> list[range]:
        count, block = self.settings.meta_batch, (iteration - 1) // self.settings.steps
        if (iteration - 1) % self.settings.steps == 0:
            self.heads = self._new_heads()
        return [range(block * count, (block + 1) * count)]

    def _sums(self, groups: Sequence[range]) -> Generator[Tensor, None, None]:
        yield from map(self._sum, groups)  # one group, with all threads inside of it

    def _sum(self, group: range) -> Tensor:
        """Σ_j L^j, its gradient in λ, and a step of every w^j."""
        count, ways = len(group), self.settings.ways
        episodes = self._episodes(group)
        lam = {name: leaf.detach().requires_grad_() for name, leaf in self.learner.lam.items()}
        w = self.heads.detach().requires_grad_()
        problem = self.learner.problem(count, ways)
        assert problem.encode is not None
        with self.learner.watching() as seen:
            task: Task = problem.encode(lam, episodes)
            loss = problem.inner(w, lam, task.train)
            grad, *grads = torch.autograd.grad(loss, [w, *lam.values()])
        self.heads = (w - self.learner.inner_lr * grad).detach()
        return self._flat(loss.detach(), dict(zip(lam, grads, strict=True)), seen())

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "heads": self.heads}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.heads = state["heads"].clone()
