"""What a training draws: episodes, or labelled images of all classes, as pure functions of a seed and a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bilevel.data import ImageDataset, load
from bilevel.data.base import source
from bilevel.errors import BilevelError
from bilevel.learners.settings import TrainingSettings
from bilevel.problem import Task
from bilevel.tasks.augmentation import ImageAugmentation
from bilevel.tasks.episodes import Episodes

# Validation and test episodes must not be training's, and every split needs its own stream.
STREAMS = {"train": 0, "val": 1, "test": 2}
# Shares of the classes for train, val and test where a data set is just a folder of classes.
FRACTIONS = (0.64, 0.16, 0.2)
# Settings that say how the pictures of a folder are read.
OF_FOLDERS = ("channels", "prepare", "invert", "split", "strict")
# Images that pass through the network together and that batch norm takes for one set. As many threads or processes as
# there are such parts can share a step; fewer images would make its statistics noisy.
PART = 64


def open_data(settings: TrainingSettings, data_root: Path | None = None) -> ImageDataset:
    """The data set that the settings name; its classes are split by their seed where the data bring no split."""
    wanted = source(settings.dataset, {})
    known = {f.name for f in fields(wanted)}
    extra: dict[str, Any] = {"seed": settings.seed} if "seed" in known else {}
    if "fractions" in known:
        extra["fractions"] = settings.fractions() or FRACTIONS
    if settings.image_size:
        if "size" not in known:
            raise BilevelError(
                f"image_size={settings.image_size} is for folders of images and MiniImagenet; {settings.dataset} comes "
                "in one size. Leave it out."
            )
        extra["size"] = settings.image_size
    if "prepare" in known:
        gray = {"": settings.prepare not in ("", "photograph"), "gray": True, "rgb": False}[settings.channels]
        extra |= {"mode": "L" if gray else "RGB", "prepare": settings.prepare or "photograph"}
        extra |= {"invert": settings.invert or None, "strict": settings.strict}
    else:
        usual = TrainingSettings()
        given = [name for name in OF_FOLDERS if getattr(settings, name) != getattr(usual, name)]
        if given:
            raise BilevelError(
                f"{given[0]}={getattr(settings, given[0])} is for folders of pictures; {settings.dataset} is read in "
                "one way. Leave it out."
            )
    return load(settings.dataset, data_root, **extra)


def episodes(settings: TrainingSettings, data: ImageDataset, split: str, seed: int | None = None) -> Episodes:
    """The episodes of a split; episode i is a function of the seed, the split and i."""
    settings = settings if seed is None else replace(settings, seed=seed)
    return Episodes(
        data,
        split,
        settings.ways,
        settings.shots,
        settings.queries,
        seed=settings.seed * len(STREAMS) + STREAMS[split],
        rotations=settings.rotations,
    )


def training_classes(settings: TrainingSettings, data: ImageDataset) -> int:
    """How many classes meta-training has; quarter turns count where they are classes of their own."""
    return len(data.splits["train"]) * (4 if settings.rotations else 1)


class TrainingStream(ABC):
    """The data of every hyperiteration 1, 2, …, in groups that processes and threads can share."""

    @abstractmethod
    def groups(self, iteration: int, size: int) -> list[range]:
        """The places in the stream that a hyperiteration draws from; `size` is the learner's `group_size`."""

    @abstractmethod
    def draw(self, group: range) -> Any:
        """What the learner's `hypergradient` takes: a pure function of the seed and the places."""

    @abstractmethod
    def images(self, iteration: int) -> int:
        """How many images a hyperiteration has."""

    def shapes(self) -> list[tuple[int, int]]:
        """(ways, shots) of all episodes that may be drawn, so that a learner can refuse them before work begins."""
        return []


class EpisodeStream(TrainingStream):
    """Episodes of meta-training; other ways or shots than in validation, or no queries, where the settings say so."""

    def __init__(self, settings: TrainingSettings, data: ImageDataset) -> None:
        self.settings = settings
        self.of_shots = {shots: self._episodes(data, shots) for shots in self._all_shots()}

    def _episodes(self, data: ImageDataset, shots: int) -> Episodes:
        settings = self.settings
        return replace(
            episodes(settings, data, "train"),
            ways=settings.ways_in_training,
            shots=shots,
            queries=0 if settings.outer == "support" else settings.queries,
            augmentation=ImageAugmentation.of(settings.augment),
            with_classes=settings.global_loss > 0,
        )

    def groups(self, iteration: int, size: int) -> list[range]:
        count = self.settings.meta_batch
        numbers = range((iteration - 1) * count, iteration * count)
        return [numbers[begin : begin + size] for begin in range(0, count, size)]

    def draw(self, group: range) -> Task:
        """The episodes of a group; where the outer objective is on the support set, that is both their sets."""
        drawn = self.at(group.start // self.settings.meta_batch + 1).batch(group)
        return Task(drawn.train, drawn.train) if self.settings.outer == "support" else drawn

    def images(self, iteration: int) -> int:
        drawn = self.at(iteration)
        return self.settings.meta_batch * drawn.ways * (drawn.shots + drawn.queries)

    def shapes(self) -> list[tuple[int, int]]:
        return [(drawn.ways, shots) for shots, drawn in self.of_shots.items()]

    def at(self, iteration: int) -> Episodes:
        """The episodes with the shots of that hyperiteration; a function of the seed and its number."""
        some = self._all_shots()
        if len(some) == 1:
            return self.of_shots[some[0]]
        bits = np.random.Philox(key=np.array([self.settings.seed, iteration], np.uint64)).random_raw()
        return self.of_shots[some[int(bits) % len(some)]]

    def _all_shots(self) -> range:
        least = self.settings.shots_in_training
        return range(least, max(least, self.settings.most_shots) + 1)


class ImageStream(TrainingStream):
    """Labelled images of all classes of meta-training, shuffled anew for every epoch."""

    def __init__(self, settings: TrainingSettings, data: ImageDataset) -> None:
        self.settings, self.data = settings, data
        classes = np.asarray(data.splits["train"])
        self.rows = np.flatnonzero(np.isin(data.labels, classes))
        self.number = np.zeros(len(data.classes), np.int64)
        self.number[classes] = np.arange(len(classes))
        self.turns = 4 if settings.rotations else 1
        self.augmentation = ImageAugmentation.of(settings.augment)

    def images(self, iteration: int) -> int:
        return self.settings.images_in_iteration

    def groups(self, iteration: int, size: int) -> list[range]:
        count = self.images(iteration)
        stream = range((iteration - 1) * count, iteration * count)
        return [stream[begin : begin + PART] for begin in range(0, count, PART)]

    def draw(self, group: range) -> tuple[Tensor, Tensor]:
        """The images at these places of the stream, and their classes."""
        seed, size = self.settings.seed, len(self.rows) * self.turns
        items = np.array([_shuffled(size, seed, place // size)[place % size] for place in group])
        turns, which = np.divmod(items, len(self.rows))
        pixels = self.data.images[self.rows[which]]
        for quarter in range(1, self.turns):
            pixels[turns == quarter] = np.rot90(pixels[turns == quarter], quarter, axes=(1, 2))
        labels = self.number[self.data.labels[self.rows[which]]] + turns * len(self.data.splits["train"])
        return self.augmentation(torch.from_numpy(pixels), seed, group.start), torch.from_numpy(labels)


@lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """0…size − 1 in the order of that epoch."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64))).permutation(size)
