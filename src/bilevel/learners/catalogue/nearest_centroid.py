"""The nearest class mean in the features of a fixed network: a baseline without training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from bilevel.learners.scoring_learner import Episode, ScoringLearner, class_means, squared_distances


class NearestCentroid(ScoringLearner):
    """score(x, c) = −‖φ(x) − μ_c‖² with a fixed network φ: random, or with the weights of `--initial`."""

    strategy: ClassVar[str] = "baseline"
    features_only: ClassVar[bool] = True
    trains = False

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        support, queries = self.represent(lam, episode)
        return squared_distances(queries, class_means(support, episode.labels, episode.ways)).neg()
