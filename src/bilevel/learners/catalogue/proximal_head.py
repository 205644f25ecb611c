"""A sparse linear classifier: least squares with an L1 penalty, which selects features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.dynamics.fista import FISTA
from bilevel.dynamics.penalties import L1
from bilevel.engine.method import Method
from bilevel.learners.base import LearnerOptions
from bilevel.learners.linear_head import PENALTY, HeadOptions, Leaves, SolvedHead, of_unit_curvature, row_weights
from bilevel.learners.settings import setting
from bilevel.methods.linear_models.active_set import ActiveSet
from bilevel.structures.least_squares import LeastSquares


@dataclass(frozen=True, kw_only=True)
class ProximalHeadOptions(HeadOptions):
    """The settings of `ProximalHead`.

    Args:
        penalty: ρ, the initial strength of the L1 penalty; it is learned.
        l2: the strength of the squared penalty, which makes L strongly convex.
    """

    scale: float = setting(10.0, above=0)
    penalty: float = setting(0.001, above=0)
    l2: float = setting(0.01, above=0)


class ProximalHead(SolvedHead):
    """w_λ = argmin of 1/(2n) ‖Φw − Y‖² + l2/2 ‖w‖² + ρ‖w‖₁, a sparse regression of one-hot labels; logits s·φᵀw.

    w_λ is the limit of the proximal steps w ← prox(w − ∇L(w)) of `FISTA`. `ActiveSet` computes it from its signs and
    differentiates there. ρ and the scale s are leaves of λ; l2 is a setting.

    Open choices: the features of every episode are scaled to λ_max(ΦᵀΦ) = n, so that one step size converges and ρ has
    the same effect in all episodes. The bias is penalised too. If classes have different numbers of images, the squared
    errors are weighted such that every class has the same weight.
    """

    Options: ClassVar[type[LearnerOptions]] = ProximalHeadOptions

    def prepared(self, lam: Leaves, support: Tensor, queries: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        return of_unit_curvature(support, queries, row_weights(labels, ways))

    def batch(self, lam: Leaves, support: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        share = row_weights(labels, ways)[..., None] / labels.shape[1]
        targets = F.one_hot(labels, ways).double()
        return torch.bmm(support.mT, support * share), torch.bmm(targets.mT, support * share)

    def inner(self, ways: int) -> LeastSquares:
        return LeastSquares(partial(_squared_penalties, self.options.l2, self.features))

    def start(self, lam: Leaves, episodes: int, ways: int, examples: int) -> Tensor:
        return lam[PENALTY].double().new_zeros(episodes, ways, self.features)

    def classifier(self, w: Tensor, lam: Leaves, support: Tensor, labels: Tensor) -> Tensor:
        return w.mT

    @property
    def dynamics(self) -> Callable[[Leaves], FISTA]:
        return partial(_proximal, self.options.l2)

    def best_method(self) -> Method:
        return ActiveSet()


def _squared_penalties(l2: float, features: int, lam: Any) -> Tensor:
    """The strength of the squared penalty of every feature."""
    return lam[PENALTY].new_full((features,), l2).double()


def _proximal(l2: float, lam: Leaves) -> FISTA:
    return FISTA(1 / (1 + l2), L1(lam[PENALTY].double().exp()))
