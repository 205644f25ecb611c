"""Relation networks (Sung et al., 2018): a learned network compares a query with a class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.learners.base import LearnerOptions, NetworkOptions
from bilevel.learners.scoring_learner import Episode, ScoringLearner
from bilevel.learners.settings import setting


@dataclass(frozen=True, kw_only=True)
class RelationOptions(NetworkOptions):
    """The settings of `Relation`: `hidden` is the width of the comparing network."""

    hidden: int = setting(128, least=1)


class Relation(ScoringLearner):
    """r(x, c) = σ(g_λ([s_c, h_λ(x)])),   s_c = Σ of h_λ over the support images of class c.

    The training objective is the mean over queries and classes of (r(x, c) − [y = c])².

    There is no inner problem: the strategy is a metric that is computed by a network.

    Choices: in the paper g compares feature maps by convolutions. Here the features are vectors, so g has three dense
    layers. The scores are the logits of r, which have the same order as r.
    """

    strategy: ClassVar[str] = "metric"
    Options: ClassVar[type[LearnerOptions]] = RelationOptions

    def build(self) -> None:
        hidden = self.options.hidden
        layers = [nn.Linear(2 * (self.features - 1), hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
        self.add_part("comparison", nn.Sequential(*layers, nn.Linear(hidden, 1)))

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        support, queries = self.represent(lam, episode)
        sums = F.one_hot(episode.labels, episode.ways).to(support).mT @ support
        rows = queries[:, None].expand(-1, episode.ways, -1)
        pairs = torch.cat([sums.expand(len(queries), -1, -1), rows], 2)
        logits: Tensor = self.part("comparison", lam, pairs)
        return logits[:, :, 0]

    def episode_loss(self, lam: Mapping[str, Tensor], episode: Episode, answers: Tensor) -> Tensor:
        relations = self.scores(lam, episode).sigmoid()
        return F.mse_loss(relations, F.one_hot(answers, episode.ways).to(relations))
