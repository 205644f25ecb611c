"""The nearest class mean in a space that is given: what a network is worth without learning to learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from bilevel.learners.scoring_learner import Episode, ScoringLearner, class_means, squared_distances


class NearestCentroid(ScoringLearner):
    """score(x, c) = −‖φ(x) − μ_c‖² with a network that stays as it is: random, or with the weights of `--initial`."""

    strategy: ClassVar[str] = "baseline"
    trains = False

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        known, asked = self.represent(lam, episode)
        return squared_distances(asked, class_means(known, episode.labels, episode.ways)).neg()
