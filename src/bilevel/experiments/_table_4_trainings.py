"""Two trainings of Table 4 that `bilevel train` does not have: the paper's *Classic* and its *Multiclass*."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.data import ImageDataset
from bilevel.distributed import World
from bilevel.errors import BilevelError
from bilevel.learners.catalogue.multiclass import Multiclass
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import training_classes
from bilevel.learners.training import FewShotTraining, new_learner
from bilevel.problem import Task


class ClassicTraining(FewShotTraining):
    """Classic multitask learning (Baxter, 1995) minimises Σ_j L^j(w^j, λ) jointly, without a hypergradient.

    A hyperiteration is one joint step: gradient descent on the w^j, Adam on λ. After `steps` of them new episodes are
    drawn, and w^j = 0 again.
    """

    def __init__(self, settings: TrainingSettings, data: ImageDataset, world: World | None = None) -> None:
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
        episodes = self.stream.draw(group)
        lam = {name: leaf.detach().requires_grad_() for name, leaf in self.learner.lam.items()}
        w = self.heads.detach().requires_grad_()
        problem = self.learner.problem(count, ways)
        assert problem.encode is not None
        with self.learner.recording_statistics() as seen:
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


class PaperMulticlass(FewShotTraining):
    """A hyperiteration is a step on the cross-entropy of the representation itself: its features are logits."""

    def _new_learner(self) -> Any:
        plain = replace(self.settings, learner="hyper-representation")
        network = new_learner(plain, self.data)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plain.seed)
            logits = nn.Linear(network.features - 1, training_classes(plain, self.data))
            nn.init.xavier_uniform_(logits.weight)
            nn.init.zeros_(logits.bias)
        return _LogitsMulticlass.for_training(plain, self.data, nn.Sequential(network.module, logits))


class _LogitsMulticlass(Multiclass):
    """Without a classifier beside the representation."""

    @classmethod
    def class_loss_of(cls, settings: Any, data: Any) -> None:
        return None

    def loss(self, lam: Mapping[str, Tensor], features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(features, labels)
