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


@dataclass(frozen=True, kw_only=True)
class MemoryModuleOptions(NetworkOptions):
    """The settings of `MemoryModule`.

    Args:
        slots: how many keys fit into the memory.
        margin: how much nearer the nearest right key should be than the nearest wrong one.
        sharpness: the factor on cosines that makes them logits.
    """

    slots: int = 256
    margin: float = 0.5
    sharpness: float = 40.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots < 2:
            raise BilevelError(f"slots={self.slots} must be a whole number ≥ 2.")
        if not self.margin > 0 or not self.sharpness > 0:
            raise BilevelError(f"margin={self.margin} and sharpness={self.sharpness} must be positive.")


@dataclass(frozen=True)
class KeyMemory:
    """The slots in use: keys of length 1 (slots × F), their classes, and the writes since each was last changed."""

    keys: Tensor
    values: Tensor
    ages: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> KeyMemory:
        """No slot in use; keys are as long as the rows of `like`."""
        none = torch.zeros(0, dtype=torch.long, device=like.device)
        return cls(like.new_zeros(0, like.shape[1]), none, none)

    def write(self, key: Tensor, value: Tensor, slots: int) -> KeyMemory:
        """The memory after it was asked for `key` and told that the answer is `value`.

        If the nearest key has that value, the key moves to the normalised sum of both. If not, the new key and value
        take a free slot, or the oldest one of a full memory. The changed slot has age 0; all others grow older by 1.
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
        here = torch.arange(len(self.keys), device=key.device) == slot
        return KeyMemory(
            torch.where(here[:, None], key, self.keys),
            torch.where(here, value, self.values),
            torch.where(here, 0, self.ages + 1),
        )

    def best(self, queries: Tensor, ways: int) -> Tensor:
        """The largest cosine of every query and a key of every class; −1 for a class without a key."""
        cosines = queries @ self.keys.mT
        of_class = F.one_hot(self.values, ways).bool()
        return torch.where(of_class, cosines[:, :, None], cosines.new_full((), -1)).amax(1)


class MemoryModule(ScoringLearner):
    """The class of x is the value of the nearest key, argmax over slots of q(x)ᵀk with q(x) = h_λ(x)/‖h_λ(x)‖.

    The support images are written one after the other by `KeyMemory.write`. The training objective is the margin loss

        max(0, margin + (largest cosine with a key of a wrong class) − (largest cosine with a key of the right class))

    In the bilevel framework the memory is w. It begins empty, and Φ_t(w_{t−1}, λ) writes the t-th support image: a
    recurrent map without an inner objective.

    Choices: the memory begins empty in every episode, because the classes are new. The paper takes the keys as given;
    here they are functions of λ and differentiated too. The margin loss looks at all slots and not at the k nearest
    ones, and its margin is 0.5 (the paper's code has 0.1), since the loss has no gradient once the margin is kept. The
    oldest slot is chosen without random noise on the ages. The images are written in rounds, one of every
    class in each; the order matters, so the learner is not symmetric in the classes when there are several shots.
    """

    strategy: ClassVar[str] = "memorisation"
    Options: ClassVar[type[LearnerOptions]] = MemoryModuleOptions
    symmetric = False

    def check_episode(self, ways: int, shots: int) -> None:
        if ways > self.options.slots:
            raise BilevelError(
                f"A memory of {self.options.slots} slots cannot hold {ways} classes; set slots={ways} or more."
            )

    def best_cosines(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        """The largest cosine of every query and a key of every class, M×ways, after all support images were written."""
        known, asked = (F.normalize(features, dim=1) for features in self.represent(lam, episode))
        memory = KeyMemory.empty(known)
        for i in in_rounds(episode.labels):
            memory = memory.write(known[i], episode.labels[i], self.options.slots)
        return memory.best(asked, episode.ways)

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        return self.options.sharpness * self.best_cosines(lam, episode)

    def episode_loss(self, lam: Mapping[str, Tensor], episode: Episode, answers: Tensor) -> Tensor:
        cosines = self.best_cosines(lam, episode)
        right = F.one_hot(answers, episode.ways).bool()
        wrong = cosines.masked_fill(right, -torch.inf).amax(1)
        return (self.options.margin + wrong - cosines[right]).relu().mean()


def in_rounds(labels: Tensor) -> list[int]:
    """Places in an order that takes one image of every class, then the next one of every class.

    >>> in_rounds(torch.tensor([1, 1, 0, 0, 1]))
    [2, 0, 3, 1, 4]
    """
    listed = labels.tolist()
    return sorted(range(len(listed)), key=lambda i: (listed[:i].count(listed[i]), listed[i]))
