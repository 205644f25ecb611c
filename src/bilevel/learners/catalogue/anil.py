"""ANIL (Raghu, Raghu, Bengio and Vinyals, 2020): MAML whose inner steps update the last layer only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from bilevel.learners.base import LearnerOptions
from bilevel.learners.catalogue.hyper_representation import LinearLogits
from bilevel.learners.catalogue.maml import HEAD, MAML, MAMLOptions
from bilevel.models.batch_norm import MODES, Mode


@dataclass(frozen=True, kw_only=True)
class ANILOptions(MAMLOptions):
    """The settings of `ANIL`."""

    head: Literal["zero", "learned"] = "learned"


class ANIL(MAML):
    """w_0 = λ_head, w_t = w_{t−1} − η ∇_w L(h_λ(x)ᵀw): λ is the network and the start of the last layer w.

    The network is fixed in an episode, so the features of an episode are computed and differentiated once. With
    head=zero this learner is `hyper-representation`. Unlike in `maml`, the default is head=learned, as in the paper:
    the start of the last layer is part of λ, and the learner is for one number of classes.
    """

    Options: ClassVar[type[LearnerOptions]] = ANILOptions
    batch_norm_modes: ClassVar[tuple[Mode, ...]] = MODES
    linear: ClassVar[bool] = True

    @property
    def adapts_network(self) -> bool:
        return False

    def adapted(self, support: Tensor, labels: Tensor, ways: int, steps: int) -> LinearLogits:
        w = self.solution(self.episode_problem(ways, training=False), support, labels, steps)
        head = self.weights(w, self.lam)[HEAD]
        return LinearLogits(self, support, head, head.new_ones(()))
