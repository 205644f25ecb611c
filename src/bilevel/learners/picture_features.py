"""The features of every picture of an evaluation, computed once, although a picture occurs in many episodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bilevel.distributed import World
from bilevel.models.blocks import per_image
from bilevel.problem import Task
from bilevel.tasks.augmentation import NONE
from bilevel.tasks.episodes import Episodes
from bilevel.training.stopping import Interrupted, StopRequest

if TYPE_CHECKING:
    from bilevel.learners.base import Learner

# How many pictures pass through the network at a time. The groups do not depend on the number of processes, so the
# features do not either.
GROUP = 64
# The features are computed once if there are at most this many different pictures for each picture of an episode.
WORTH = 0.7
# The features of pictures by split and number.
KnownFeatures = dict[tuple[str, int], Tensor]
# The most pictures whose row numbers are exact in single precision.
MOST = 2**24


class FeatureTable(nn.Module):
    """A network that looks up features: row numbers N×1×1×1 → N×F."""

    per_image = True

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, rows: Tensor) -> Tensor:
        return F.embedding(rows.flatten().long(), self.get_buffer("table"))


@dataclass(frozen=True, eq=False)
class DrawnPictures:
    """The different pictures of some episodes.

    Attributes:
        episodes: the episodes.
        keys: which pictures there are, in increasing order; see `_keys`.
    """

    episodes: Episodes
    keys: NDArray[np.int64]

    @classmethod
    def of(cls, episodes: Episodes, count: int) -> DrawnPictures:
        """The pictures of episodes 0…count − 1."""
        return cls(episodes, np.unique(cls._keys(episodes, range(count))))

    @staticmethod
    def _keys(episodes: Episodes, numbers: Sequence[int]) -> NDArray[np.int64]:
        """One number per picture and quarter turn: episodes × ways × pictures."""
        rows, turns = episodes.drawn(numbers)
        return rows + len(episodes.dataset.labels) * turns[:, :, None]

    def pictures(self, group: range) -> Tensor:
        """Some of the different pictures, as floats N×C×H×W."""
        turns, rows = np.divmod(self.keys[group.start : group.stop], len(self.episodes.dataset.labels))
        return self.episodes.pictures(rows[None, :, None], turns[None], [0])[0, :, 0]

    def batch(self, numbers: Sequence[int]) -> Task:
        """As `Episodes.batch`, with rows of the table of features in the place of pictures."""
        rows = torch.from_numpy(np.searchsorted(self.keys, self._keys(self.episodes, numbers)))
        labels = torch.arange(self.episodes.ways)[:, None].expand(rows.shape)
        # Learners take images of floats.
        images = rows[..., None, None, None].to(torch.get_default_dtype())
        return Task(*self.episodes.sets([images, labels]))

    def episode(self, number: int) -> Task:
        """One episode of `batch`."""
        found = self.batch([number])
        return Task(tuple(x[0] for x in found.train), tuple(x[0] for x in found.val))


def with_features(
    learner: Learner,
    episodes: Episodes,
    count: int,
    world: World | None = None,
    report: Callable[[float], None] = lambda part: None,
    stop: StopRequest | bool = False,
    known: KnownFeatures | None = None,
) -> tuple[Learner, DrawnPictures] | None:
    """The learner on features that are computed once, and the episodes for it. The processes share the pictures.

    None if an episode uses pictures not only through their features, if the features of a picture depend on other
    pictures, or if there are few pictures in several episodes. `known` has features that earlier calls computed with
    the same weights, and gets the others.
    """
    # Other episodes are of features already.
    if not (learner.features_only and isinstance(episodes, Episodes) and episodes.augmentation == NONE):
        return None
    representation = learner.representation
    exact = all(leaf.dtype in (torch.float32, torch.float64) for leaf in learner.lam.values())
    independent = (learner.batch_norm == "running" or not representation.norms) and per_image(representation.module)
    if not (learner.lam and exact and independent):
        return None
    drawn = DrawnPictures.of(episodes, count)
    passed = count * episodes.ways * (episodes.shots + episodes.queries)
    known = {} if known is None else known
    new = DrawnPictures(episodes, np.array([key for key in drawn.keys if (episodes.split, key) not in known], int))
    if len(new.keys) > WORTH * passed or len(drawn.keys) > MOST:
        return None
    groups = [range(first, min(first + GROUP, len(new.keys))) for first in range(0, len(new.keys), GROUP)]
    world, like = world or World(), next(iter(learner.lam.values()))
    table = like.new_zeros(len(new.keys), learner.features - 1)
    own = list(world.share(groups))

    def features(group: range) -> Tensor:
        with torch.no_grad():
            return representation.of_this_thread().independent(learner.lam, new.pictures(group).to(like))

    for done, (group, found) in enumerate(zip(own, representation.each(features, own), strict=True), 1):
        table[group.start : group.stop] = found
        report(done / len(own))
        if stop:
            break
    if world.any(bool(stop)):
        raise Interrupted
    known.update(zip(((episodes.split, key) for key in new.keys), world.sum(table), strict=True))
    return _looking_up(learner, torch.stack([known[episodes.split, key] for key in drawn.keys])), drawn


def _looking_up(learner: Learner, table: Tensor) -> Learner:
    """The learner with a table of features in the place of its network."""
    found, representation = copy.copy(learner), copy.copy(learner.representation)
    representation.module, representation.norms, representation.names = FeatureTable(table), {}, []
    representation.mirror = False  # the table has the means over mirror images
    found.representation, found.shape = representation, (1, 1, 1)
    found._problems = {}  # problems keep the learner that they were made by
    return found
