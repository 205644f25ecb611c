"""The data of a training: episodes, or labelled images of all classes, as pure functions of a seed and a number."""

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

# The number of each split. It is part of the seed, so that the splits draw different episodes.
STREAMS = {"train": 0, "val": 1, "test": 2}
# The default shares of classes for train, val and test, for a folder of classes.
FRACTIONS = (0.64, 0.16, 0.2)
# Settings for folders of pictures only.
OF_FOLDERS = ("channels", "prepare", "invert", "split", "strict")
# How many images pass through the network together; batch norm normalises them as one set. Threads and processes share
# such parts. Fewer images would make the statistics noisy.
PART = 64


def open_data(settings: TrainingSettings, data_root: Path | None = None) -> ImageDataset:
    """The data set that the settings name. If it has no split of its own, its classes are split by the seed."""
    names = {f.name for f in fields(source(settings.dataset, {}))}
    extra: dict[str, Any] = {"seed": settings.seed} if "seed" in names else {}
    if "fractions" in names:
        extra["fractions"] = settings.fractions() or FRACTIONS
    if settings.image_size:
        if "size" not in names:
            raise BilevelError(
                f"image_size={settings.image_size} is for folders of images and MiniImagenet. {settings.dataset} has "
                "one size; leave image_size out."
            )
        extra["size"] = settings.image_size
    if "prepare" in names:
        gray = {"": settings.prepare not in ("", "photograph"), "gray": True, "rgb": False}[settings.channels]
        extra |= {"mode": "L" if gray else "RGB", "prepare": settings.prepare or "photograph"}
        extra |= {"invert": settings.invert or None, "strict": settings.strict}
    else:
        defaults = TrainingSettings()
        changed = [name for name in OF_FOLDERS if getattr(settings, name) != getattr(defaults, name)]
        if changed:
            raise BilevelError(
                f"{changed[0]}={getattr(settings, changed[0])} is for folders of pictures, and {settings.dataset} is "
                f"not one. Leave {changed[0]} out."
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
    """The number of classes of meta-training, including rotated ones."""
    return len(data.splits["train"]) * (4 if settings.rotations else 1)


class TrainingStream(ABC):
    """The data of every hyperiteration 1, 2, …, in groups that processes and threads can share."""

    @abstractmethod
    def groups(self, iteration: int, size: int) -> list[range]:
        """The positions in the stream that a hyperiteration uses, in groups; `size` is the learner's `group_size`."""

    @abstractmethod
    def draw(self, group: range) -> Any:
        """The argument of the learner's `hypergradient`: a pure function of the seed and the positions."""

    @abstractmethod
    def images(self, iteration: int) -> int:
        """The number of images of a hyperiteration."""

    def shapes(self) -> list[tuple[int, int]]:
        """(ways, shots) of all episodes that may be drawn, so that a learner can refuse them before work begins."""
        return []


class EpisodeStream(TrainingStream):
    """Episodes of meta-training. The settings may give them other ways and shots than in validation, or no queries."""

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
        """The episodes of a group. With outer="support", the support set is also the query set."""
        drawn = self.at(group.start // self.settings.meta_batch + 1).batch(group)
        return Task(drawn.train, drawn.train) if self.settings.outer == "support" else drawn

    def images(self, iteration: int) -> int:
        drawn = self.at(iteration)
        return self.settings.meta_batch * drawn.ways * (drawn.shots + drawn.queries)

    def shapes(self) -> list[tuple[int, int]]:
        return [(drawn.ways, shots) for shots, drawn in self.of_shots.items()]

    def at(self, iteration: int) -> Episodes:
        """The episodes with the number of shots of that hyperiteration: a function of the seed and `iteration`."""
        shots = self._all_shots()
        if len(shots) == 1:
            return self.of_shots[shots[0]]
        bits = np.random.Philox(key=np.array([self.settings.seed, iteration], np.uint64)).random_raw()
        return self.of_shots[shots[int(bits) % len(shots)]]

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
        """The images at these positions of the stream, and their classes."""
        seed, size = self.settings.seed, len(self.rows) * self.turns
        items = np.array([_shuffled(size, seed, position // size)[position % size] for position in group])
        turns, row = np.divmod(items, len(self.rows))
        pixels = self.data.images[self.rows[row]]
        for quarter in range(1, self.turns):
            pixels[turns == quarter] = np.rot90(pixels[turns == quarter], quarter, axes=(1, 2))
        labels = self.number[self.data.labels[self.rows[row]]] + turns * len(self.data.splits["train"])
        return self.augmentation(torch.from_numpy(pixels), seed, group.start), torch.from_numpy(labels)


@lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The numbers 0…size − 1 in the random order of that epoch."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64))).permutation(size)
