"""Pretraining on all classes at once: the paper's *Multiclass* (Table 4), the usual baseline of few-shot learning."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.data import ImageDataset
from bilevel.errors import BilevelError
from bilevel.meta.hyper_representation import HyperRepresentation
from bilevel.meta.settings import Settings
from bilevel.meta.training import FewShotTraining, new_learner
from bilevel.training.distributed import World


class MulticlassTraining(FewShotTraining):
    """One softmax over all classes of meta-training; its logits are the representation.

    A hyperiteration is a step of Adam on as many images as the episodes of a meta-batch would have, and validation is
    on episodes, so that runs can be compared with the others'.
    """

    def __init__(self, settings: Settings, data: ImageDataset, world: World | None = None) -> None:
        super().__init__(settings, data, world)
        if self.world.size > 1:
            raise BilevelError("Multiclass training runs in one process; start it without torchrun.")
        self.members = [np.flatnonzero(data.labels == label) for label in data.splits["train"]]

    def _new_learner(self) -> HyperRepresentation:
        settings, data = self.settings, self.data
        network = new_learner(settings, data)
        classes = len(data.splits["train"]) * (4 if settings.rotations else 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            logits = nn.Linear(network.features - 1, classes)
            nn.init.xavier_uniform_(logits.weight)
            nn.init.zeros_(logits.bias)
        return new_learner(settings, data, nn.Sequential(network.module, logits))

    def _groups(self, iteration: int) -> list[range]:
        return [range(iteration, iteration + 1)]

    def _sums(self, groups: Sequence[range]) -> Generator[Tensor, None, None]:
        yield from map(self._sum, groups)  # one group, with all threads inside of it

    def _sum(self, group: range) -> Tensor:
        images, labels = self._draw(group.start)
        lam = {name: leaf.detach().requires_grad_() for name, leaf in self.learner.lam.items()}
        with self.learner.watching() as seen:
            logits = self.learner.represent(lam, images)[:, :-1]
            loss = F.cross_entropy(logits, labels)
            grads = torch.autograd.grad(loss, list(lam.values()))
        # `step` divides by the meta-batch.
        return self._flat(loss.detach(), dict(zip(lam, grads, strict=True)), seen()) * self.settings.meta_batch

    def _draw(self, iteration: int) -> tuple[Tensor, Tensor]:
        """A batch as a pure function of the seed and the hyperiteration."""
        settings, count = self.settings, self.settings.meta_batch * self._images()
        draw = np.random.Generator(np.random.Philox(key=np.array([settings.seed, iteration], np.uint64)))
        which = draw.integers(len(self.members), size=count)
        rows = np.array([self.members[label][draw.integers(len(self.members[label]))] for label in which])
        turns = draw.integers(4 if settings.rotations else 1, size=count)
        pixels = self.data.images[rows]
        for quarter in range(1, 4):
            pixels[turns == quarter] = np.rot90(pixels[turns == quarter], quarter, axes=(1, 2))
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255)
        return images, torch.from_numpy(which + turns * len(self.members))
