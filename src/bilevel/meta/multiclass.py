"""Pretraining on all classes of meta-training at once: a stage before the bilevel problem, and the usual baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bilevel.data import ImageDataset
from bilevel.meta.hyper_representation import HyperRepresentation
from bilevel.meta.settings import Settings
from bilevel.meta.training import FewShotTraining, new_learner, training_classes
from bilevel.tasks.augmentation import Augmentation
from bilevel.training.distributed import World

# Images that pass through the network together and that batch norm takes for one set. As many threads or processes as
# there are such parts can share a step; fewer images would make its statistics noisy.
PART = 64


class MulticlassTraining(FewShotTraining):
    """A hyperiteration is a step on the cross-entropy of all classes, on the next images of a shuffled stream.

    Validation is on episodes, so that runs can be compared with those of the bilevel problem.
    """

    def __init__(
        self, settings: Settings, data: ImageDataset, world: World | None = None, folder: Path | None = None
    ) -> None:
        super().__init__(settings, data, world, folder)
        classes = np.asarray(data.splits["train"])
        self.rows = np.flatnonzero(np.isin(data.labels, classes))
        self.number = np.zeros(len(data.classes), np.int64)
        self.number[classes] = np.arange(len(classes))
        self.turns = 4 if settings.rotations else 1
        self.augmentation = Augmentation.of(settings.augment)

    def _images(self, iteration: int) -> int:
        return self.settings.images_in_iteration

    def _groups(self, iteration: int) -> list[range]:
        count = self._images(1)
        stream = range((iteration - 1) * count, iteration * count)
        return [stream[begin : begin + PART] for begin in range(0, count, PART)]

    def _sum(self, group: range) -> Tensor:
        images, labels = (x.to(self.world.device) for x in self._draw(group))
        lam = {name: leaf.detach().requires_grad_() for name, leaf in self.learner.lam.items()}
        with self.learner.watching() as seen, torch.enable_grad():
            features = self.learner.representation.here().together(lam, images)[:, :-1]
            loss = self._loss(lam, features, labels)
            # A cosine classifier does not see the length of normalised features, for example.
            grads = torch.autograd.grad(loss, list(lam.values()), allow_unused=True, materialize_grads=True)
        return self._flat(loss.detach(), dict(zip(lam, grads, strict=True)), seen()) * len(group)

    def _loss(self, lam: Mapping[str, Tensor], features: Tensor, labels: Tensor) -> Tensor:
        assert self.learner.class_loss is not None
        return self.learner.class_loss(lam, features, labels)

    def _draw(self, group: range) -> tuple[Tensor, Tensor]:
        """The images at these places of the stream, and their classes: a pure function of the seed and the places."""
        seed, size = self.settings.seed, len(self.rows) * self.turns
        items = np.array([_shuffled(size, seed, place // size)[place % size] for place in group])
        turns, which = np.divmod(items, len(self.rows))
        pixels = self.data.images[self.rows[which]]
        for quarter in range(1, self.turns):
            pixels[turns == quarter] = np.rot90(pixels[turns == quarter], quarter, axes=(1, 2))
        labels = self.number[self.data.labels[self.rows[which]]] + turns * len(self.data.splits["train"])
        return self.augmentation(torch.from_numpy(pixels), seed, group.start), torch.from_numpy(labels)


class PaperMulticlass(MulticlassTraining):
    """The paper's *Multiclass* (Table 4): the logits of all classes are the representation."""

    def _new_learner(self) -> HyperRepresentation:
        settings, data = replace(self.settings, learner="hyper-representation"), self.data
        network = new_learner(settings, data)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            logits = nn.Linear(network.features - 1, training_classes(settings, data))
            nn.init.xavier_uniform_(logits.weight)
            nn.init.zeros_(logits.bias)
        return new_learner(settings, data, nn.Sequential(network.module, logits))

    def _loss(self, lam: Mapping[str, Tensor], features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(features, labels)


@lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """0…size − 1 in the order of that epoch."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64))).permutation(size)
