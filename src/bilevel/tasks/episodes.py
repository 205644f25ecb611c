"""N-way k-shot episodes: tasks drawn from a labelled data set, each a pure function of (seed, i)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.problem import Task
from bilevel.tasks.augmentation import NONE, ImageAugmentation


class LabelledImages(Protocol):
    """What episodes need of a data set; `bilevel.data.ImageDataset` has it."""

    @property
    def images(self) -> NDArray[np.uint8]: ...
    @property
    def labels(self) -> NDArray[np.int64]: ...
    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def splits(self) -> Mapping[str, Sequence[int]]: ...


@dataclass(frozen=True, eq=False)
class EpisodeSampler:
    """The examples of episode i. It uses labels only, so it works for data of any kind.

    The classes of an episode are different, and its support and query examples are different. A draw reads the raw
    stream of a Philox generator with the key (seed, i). So any worker can draw any episode, a resumed run continues
    exactly, and the draw does not depend on versions or machines.

    Args:
        labels: the class of every example.
        ways: classes in an episode, N.
        shots: support examples of each class, k.
        queries: query examples of each class.
        seed: the seed of the episodes.
        classes: the labels to draw from; by default all that occur.
        rotations: every class turned by 90°, 180° and 270° is a class of its own, so there are four times as many.
        names: names of the classes by label, for error messages.

    >>> sampler = EpisodeSampler([0, 0, 0, 1, 1, 1, 2, 2, 2], ways=2, shots=1, queries=2)
    >>> rows, turns = sampler.draw(7)
    >>> rows.shape, turns.tolist()
    ((2, 3), [0, 0])
    """

    labels: Any
    ways: int
    shots: int
    queries: int
    seed: int = 0
    classes: Sequence[int] | None = None
    rotations: bool = False
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._members  # noqa: B018 - raises here, not at the first draw, if the settings cannot be met

    @property
    def count(self) -> int:
        """How many classes there are to draw from."""
        return len(self._members) * (4 if self.rotations else 1)

    def draw(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Episode i: the examples of each class, ways × (shots + queries), and by how many quarter turns each class is
        rotated. The first `shots` columns are the support set."""
        if not 0 <= i < 2**64:
            raise BilevelError(f"Episode {i} does not exist; they are numbered 0, 1, 2, ….")
        each = self.shots + self.queries
        bits = np.random.Philox(key=np.array([self.seed, i], np.uint64))
        raw: list[int] = bits.random_raw(self.ways * (1 + each)).tolist()
        chosen = _without_replacement(self.count, raw[: self.ways])
        rows = np.empty((self.ways, each), np.int64)
        turns = np.empty(self.ways, np.int64)
        for way, number in enumerate(chosen):
            turns[way], which = divmod(number, len(self._members))
            members = self._members[which]
            start = self.ways + way * each
            rows[way] = members[_without_replacement(len(members), raw[start : start + each])]
        return rows, turns

    def number(self, labels: NDArray[np.int64], turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices, 0…count − 1, of the classes with these labels and quarter turns."""
        wanted = np.unique(np.asarray(self.labels)) if self.classes is None else np.asarray(self.classes)
        order = np.argsort(wanted)
        return order[np.searchsorted(wanted[order], labels)] + turns * len(wanted)

    @cached_property
    def _members(self) -> list[NDArray[np.int64]]:
        """The examples of every class that can be drawn."""
        for name, least in (("ways", 1), ("shots", 1), ("queries", 0)):
            if getattr(self, name) < least:
                raise BilevelError(
                    f"{name}={getattr(self, name)} cannot make an episode; pass a whole number ≥ {least}."
                )
        if not 0 <= self.seed < 2**64:
            raise BilevelError(f"seed={self.seed} must be a whole number from 0 to 2⁶⁴ − 1.")
        labels = np.asarray(self.labels)
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise BilevelError(f"labels are {labels.dtype}{list(labels.shape)}; pass one integer per example.")
        wanted = np.unique(labels) if self.classes is None else np.asarray(self.classes, dtype=np.int64)
        order = np.argsort(labels, kind="stable")
        first = np.searchsorted(labels[order], wanted, side="left")
        last = np.searchsorted(labels[order], wanted, side="right")
        members = [order[start:stop].astype(np.int64) for start, stop in zip(first, last, strict=True)]
        self._check(wanted, members)
        return members

    def _check(self, wanted: NDArray[np.int64], members: list[NDArray[np.int64]]) -> None:
        available = len(members) * (4 if self.rotations else 1)
        if available < self.ways:
            more = ", or let rotations make four classes of one" if not self.rotations else ""
            raise BilevelError(
                f"ways={self.ways} needs {self.ways} classes and there are {available} to draw from; pass ways ≤ "
                f"{available}{more}, or give this split more classes (of a folder: --split 0.5,0.25,0.25, say)."
            )
        need = self.shots + self.queries
        short = [number for number, rows in enumerate(members) if len(rows) < need]
        if short:
            label = int(wanted[short[0]])
            name = self.names[label] if self.names is not None else str(label)
            others = f" (and {len(short) - 1} more classes are too small)" if len(short) > 1 else ""
            raise BilevelError(
                f"Class {name!r} has {len(members[short[0]])} examples{others}; shots={self.shots} with queries="
                f"{self.queries} needs {need} different ones. Lower shots or queries, or add images to the class."
            )


@dataclass(frozen=True, eq=False)
class Episodes:
    """Episodes of a data set's split as tasks: `episodes(i)` has a support set to train on and a query set.

    Images are float32 in [0, 1], N×C×H×W, class after class; labels are 0…ways−1.

    Args:
        dataset: labelled uint8 images; see `bilevel.data.load`.
        split: "train", "val" or "test": whose classes are drawn from.
        ways: classes in an episode.
        shots: support images of each class.
        queries: query images of each class.
        seed: the seed of the episodes.
        rotations: quarter turns of a class are classes of their own.
        augmentation: random changes of every image, a function of the seed and the episode.
        with_classes: whether the query set has a third part, the class of every image among all of the split.
    """

    dataset: LabelledImages
    split: str = "train"
    ways: int = 5
    shots: int = 1
    queries: int = 15
    seed: int = 0
    rotations: bool = False
    augmentation: ImageAugmentation = NONE
    with_classes: bool = False

    def __post_init__(self) -> None:
        if self.rotations and self.dataset.images.shape[1] != self.dataset.images.shape[2]:
            height, width = self.dataset.images.shape[1:3]
            raise BilevelError(
                f"Rotations need square images, and these are {width}×{height}. Bring them to one size, or leave "
                "rotations out."
            )
        self.sampler  # noqa: B018 - raises here if the settings cannot be met

    @cached_property
    def sampler(self) -> EpisodeSampler:
        splits = self.dataset.splits
        if not splits.get(self.split):
            filled = [name for name, chosen in splits.items() if chosen]
            raise BilevelError(f"split={self.split!r} holds no classes; pass one of {', '.join(map(repr, filled))}.")
        try:
            return EpisodeSampler(
                self.dataset.labels,
                ways=self.ways,
                shots=self.shots,
                queries=self.queries,
                seed=self.seed,
                classes=tuple(splits[self.split]),
                rotations=self.rotations,
                names=self.dataset.classes,
            )
        except BilevelError as error:
            raise BilevelError(f"Episodes of the split {self.split!r}: {error}") from error

    def episode(self, i: int) -> Task:
        """Episode i = 0, 1, 2, …"""
        train, val = self._stacked([i])
        return Task(tuple(x[0] for x in train), tuple(x[0] for x in val))

    __call__ = episode

    def batch(self, numbers: Sequence[int]) -> Task:
        """Several episodes as one task whose tensors have a leading axis of episodes; faster than one by one."""
        if not len(numbers):
            raise BilevelError("batch([]) has no episodes; pass their numbers, range(16) for example.")
        train, val = self._stacked(numbers)
        return Task(train=train, val=val)

    def sample(self, count: int = 1) -> Callable[[int], list[Task]]:
        """A source for `solve`: hyperiteration k gets episodes k·count … k·count + count − 1."""
        if count < 1:
            raise BilevelError(f"sample(count={count}) would draw no episode; pass a whole number ≥ 1.")

        def draw(k: int) -> list[Task]:
            train, val = self._stacked(range(k * count, (k + 1) * count))
            return [Task(tuple(x[j] for x in train), tuple(x[j] for x in val)) for j in range(count)]

        return draw

    def drawn(self, numbers: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows of the images, episodes × ways × images, and the quarter turns of the classes, episodes × ways."""
        found = [self.sampler.draw(int(i)) for i in numbers]
        return np.stack([rows for rows, _ in found]), np.stack([turns for _, turns in found])

    def pictures(self, rows: NDArray[np.int64], turns: NDArray[np.int64], numbers: Sequence[int]) -> Tensor:
        """The images that `drawn` names, episodes × ways × images × C × H × W."""
        pixels = self.dataset.images[rows]  # episodes × ways × examples × H × W × C, bytes
        if self.rotations:
            for quarter in (1, 2, 3):
                where = turns == quarter
                pixels[where] = np.rot90(pixels[where], quarter, axes=(2, 3))
        changed = [
            self.augmentation(torch.from_numpy(one).flatten(0, 1), self.seed, int(number))
            for one, number in zip(pixels, numbers, strict=True)
        ]
        return torch.stack(changed).reshape(*rows.shape, *changed[0].shape[1:])

    def _stacked(self, numbers: Sequence[int]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        rows, turns = self.drawn(numbers)
        parts = [self.pictures(rows, turns, numbers), torch.arange(self.ways)[:, None].expand(rows.shape)]
        if self.with_classes:
            known = self.sampler.number(self.dataset.labels[rows[:, :, 0]], turns)
            parts.append(torch.from_numpy(known)[:, :, None].expand(rows.shape))
        return self.sets(parts)

    def sets(self, parts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Support and query sets of stacked episodes from tensors episodes × ways × images × …"""
        support = tuple(x[:, :, : self.shots].flatten(1, 2).contiguous() for x in parts[:2])  # without its classes
        query = tuple(x[:, :, self.shots :].flatten(1, 2).contiguous() for x in parts)
        return support, query


def _without_replacement(count: int, raw: list[int]) -> list[int]:
    """len(raw) different numbers below `count`: a Fisher–Yates shuffle that stores only the swapped entries.

    The bias of taking remainders of 64-bit numbers is below count/2⁶⁴.
    """
    moved: dict[int, int] = {}
    drawn = []
    for taken, number in enumerate(raw):
        pick = taken + number % (count - taken)
        drawn.append(moved.get(pick, pick))
        moved[pick] = moved.get(taken, taken)
    return drawn
