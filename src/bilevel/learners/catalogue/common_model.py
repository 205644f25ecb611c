"""Section 2.2's common model: the model of a task is λ + w, where the difference w of the task is penalised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import DynamicsLike
from bilevel.dynamics.ista import ISTA
from bilevel.dynamics.penalties import L1, Penalty
from bilevel.learners.base import LearnerOptions
from bilevel.learners.catalogue.maml import MAML, MAMLOptions
from bilevel.learners.settings import setting
from bilevel.trees import Tree


@dataclass(frozen=True)
class HalfSquareOfWeights(Penalty):
    """Ω(w) = strength/2 · ‖w‖², whose proximal operator multiplies by 1/(1 + step·strength)."""

    strength: float

    def value(self, w: Tree, t: int = 1) -> Tensor:
        return sum((self.strength / 2 * leaf.square().sum() for leaf in trees.leaves(w)), start=torch.zeros(()))

    def prox(self, w: Tree, step: Any, t: int = 1) -> Tree:
        return trees.map(lambda leaf: leaf / (1 + step * self.strength), w)


@dataclass(frozen=True, kw_only=True)
class CommonModelOptions(MAMLOptions):
    """The settings of `CommonModel`.

    Args:
        rho: ρ, the strength of the penalty on the difference w.
        penalty: "square", ρ/2 ‖w‖², or "absolute", ρ ‖w‖₁: a task differs from the common model in a few weights.
    """

    rho: float = setting(0.1, least=0)
    penalty: Literal["square", "absolute"] = "square"


class CommonModel(MAML):
    """min_w L(λ + w) + Ω(w) by T proximal steps: w_0 = 0, w_t = prox_{ηΩ}(w_{t−1} − η ∇L(λ + w_{t−1})).

    The paper's example is a linear model ⟨w + λ, x⟩. Here the weights are those of the network and of the last layer:
    classes are renumbered in every episode, so episodes have no linear model in common. f_T is differentiated through
    the steps, while `imaml` differentiates the minimiser. With rho=0 this learner is `maml`.
    """

    Options: ClassVar[type[LearnerOptions]] = CommonModelOptions
    offsets = True

    @property
    def dynamics(self) -> DynamicsLike:
        penalty = HalfSquareOfWeights(self.options.rho) if self.options.penalty == "square" else L1(self.options.rho)
        return ISTA(self.options.inner_lr, penalty)
