"""Prototypical networks (Snell, Swersky and Zemel, 2017): the nearest class mean in learned features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from bilevel.learners.scoring_learner import Episode, ScoringLearner, class_means, squared_distances


class Prototypical(ScoringLearner):
    """score(x, c) = −‖h_λ(x) − μ_c‖², μ_c the mean of h_λ over the support images of class c.

    μ_c is the minimiser of the mean squared distance to the features of class c. So this is a bilevel problem whose
    inner solution is known, and there is no inner problem to solve.
    """

    strategy: ClassVar[str] = "metric"
    features_only: ClassVar[bool] = True

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        support, queries = self.represent(lam, episode)
        return squared_distances(queries, class_means(support, episode.labels, episode.ways)).neg()
