"""The memory of Kaiser et al. (2017, "Learning to remember rare events"): keys, values, ages, nearest neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.learners.base import LearnerOptions, NetworkOptions
from bilevel.learners.scoring_learner import Episode, ScoringLearner
from bilevel.learners.settings import setting


@dataclass(frozen=True, kw_only=True)
class MemoryModuleOptions(NetworkOptions):
    """The settings of `MemoryModule`.

    Args:
        slots: the number of keys that fit into the memory.
        margin: the wanted difference between the largest cosine with a key of the right class and with any other key.
        sharpness: the factor that turns cosines into logits.
    """

    slots: int = setting(256, least=2)
    margin: float = setting(0.5, above=0)
    sharpness: float = setting(40.0, above=0)


@dataclass(frozen=True)
class KeyMemory:
    """The slots in use: keys of length 1 (slots × F), their classes, and the writes since each was changed."""

    keys: Tensor
    values: Tensor
    ages: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> KeyMemory:
        """An empty memory for keys with as many entries as a row of `like`."""
        none = torch.zeros(0, dtype=torch.long, device=like.device)
        return cls(like.new_zeros(0, like.shape[1]), none, none)

    def write(self, key: Tensor, value: Tensor, slots: int) -> KeyMemory:
        """The memory after a labelled image with this key and class was written.

        If the nearest key has that class, it is replaced by the normalised sum of both keys. If not, the new key takes
        a free slot, or the oldest slot of a full memory. The changed slot has age 0; the age of all others grows by 1.
        """
        if len(self.keys):
            nearest = int((self.keys @ key).argmax())
            if self.values[nearest] == value:
                return self._with(nearest, F.normalize(self.keys[nearest] + key, dim=0), value)
        if len(self.keys) == slots:
            return self._with(int(self.ages.argmax()), key, value)
        grown = KeyMemory(
            torch.cat([self.keys, key[None]]), torch.cat([self.values, value[None]]), F.pad(self.ages, (0, 1))
        )
        return grown._with(len(self.keys), key, value)

    def _with(self, slot: int, key: Tensor, value: Tensor) -> KeyMemory:
        changed = torch.arange(len(self.keys), device=key.device) == slot
        return KeyMemory(
            torch.where(changed[:, None], key, self.keys),
            torch.where(changed, value, self.values),
            torch.where(changed, 0, self.ages + 1),
        )

    def best(self, queries: Tensor, ways: int) -> Tensor:
        """The largest cosine of every query with the keys of every class, M×ways; −1 for a class without a key."""
        cosines = queries @ self.keys.mT
        of_class = F.one_hot(self.values, ways).bool()
        return torch.where(of_class, cosines[:, :, None], cosines.new_full((), -1)).amax(1)


class MemoryModule(ScoringLearner):
    """The class of x is the value of the nearest key, argmax over slots of q(x)ᵀk with q(x) = h_λ(x)/‖h_λ(x)‖.

    `KeyMemory.write` writes the support images one after the other. The training objective is the margin loss

        max(0, margin + (largest cosine with a key of a wrong class) − (largest cosine with a key of the right class))

    In the bilevel framework the memory is w. It begins empty, and Φ_t(w_{t−1}, λ) writes the t-th support image. There
    is no inner objective.

    Choices: the memory begins empty in every episode, because the classes are new. In the paper the keys are constants;
    here they are functions of λ and are differentiated too. The margin loss uses all slots and not the k nearest ones.
    Its margin is 0.5 (the paper's code has 0.1), because the gradient is zero once the margin is reached. The oldest
    slot is chosen without random noise on the ages. The images are written in rounds, each with one image of every
    class. The order matters, so with several shots the learner is not symmetric in the classes.
    """

    strategy: ClassVar[str] = "memorisation"
    Options: ClassVar[type[LearnerOptions]] = MemoryModuleOptions
    symmetric = False

    def check_episode(self, ways: int, shots: int) -> None:
        if ways > self.options.slots:
            raise BilevelError(
                f"A memory with slots={self.options.slots} cannot hold {ways} classes; set slots={ways} or more."
            )

    def best_cosines(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        """`KeyMemory.best` of the queries, M×ways, after all support images were written."""
        support, queries = (F.normalize(features, dim=1) for features in self.represent(lam, episode))
        memory = KeyMemory.empty(support)
        for i in in_rounds(episode.labels):
            memory = memory.write(support[i], episode.labels[i], self.options.slots)
        return memory.best(queries, episode.ways)

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        return self.options.sharpness * self.best_cosines(lam, episode)

    def episode_loss(self, lam: Mapping[str, Tensor], episode: Episode, answers: Tensor) -> Tensor:
        cosines = self.best_cosines(lam, episode)
        right = F.one_hot(answers, episode.ways).bool()
        wrong = cosines.masked_fill(right, -torch.inf).amax(1)
        return (self.options.margin + wrong - cosines[right]).relu().mean()


def in_rounds(labels: Tensor) -> list[int]:
    """The positions of images in rounds: the first image of every class, then the second of every class, …

    >>> in_rounds(torch.tensor([1, 1, 0, 0, 1]))
    [2, 0, 3, 1, 4]
    """
    classes = labels.tolist()
    return sorted(range(len(classes)), key=lambda i: (classes[:i].count(classes[i]), classes[i]))
