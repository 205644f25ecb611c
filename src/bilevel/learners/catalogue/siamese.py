"""Siamese networks (Koch, Zemel and Salakhutdinov, 2015): the probability that two images have the same class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.learners.scoring_learner import Episode, ScoringLearner, class_means

WEIGHT, BIAS = "distance.weight", "distance.bias"


class Siamese(ScoringLearner):
    """P(x and x' have the same class) = σ(b + Σ_j α_j |h_j(x) − h_j(x')|).

    λ is the network, α and b. The training objective is the cross-entropy of this probability on pairs of a query and
    a support image. Pairs of one class and pairs of two classes have the same total weight, as in the paper's training
    set.

    There is no inner problem: the strategy is a metric that is learned on pairs.

    Choices: with several support images, the score of a class is the mean of the logits of its pairs. All α_j begin
    with the same negative value, so before training the scores depend on the L1 distance.
    """

    strategy: ClassVar[str] = "metric"

    def build(self) -> None:
        size, like = self.features - 1, next(iter(self.lam.values()))
        self.lam[WEIGHT] = like.new_full((size,), -4 / size)
        self.lam[BIAS] = like.new_full((), 2.0)

    def pair_logits(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        """The logit of "the same class" for every query and support image, M×N."""
        support, queries = self.represent(lam, episode)
        return lam[BIAS] + (queries[:, None] - support[None]).abs() @ lam[WEIGHT]

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        return class_means(self.pair_logits(lam, episode).mT, episode.labels, episode.ways).mT

    def episode_loss(self, lam: Mapping[str, Tensor], episode: Episode, answers: Tensor) -> Tensor:
        logits = self.pair_logits(lam, episode)
        same = (answers[:, None] == episode.labels[None]).to(logits)
        weights = torch.where(same.bool(), 0.5 / same.sum(), 0.5 / (1 - same).sum())
        return F.binary_cross_entropy_with_logits(logits, same, weight=weights, reduction="sum")
