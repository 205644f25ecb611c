"""Matching networks (Vinyals et al., 2016): attention over the support images by cosine similarity."""

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
class MatchingOptions(NetworkOptions):
    """The settings of `Matching`.

    Args:
        sharpness: the factor β on cosines before the softmax.
        context: whether the features of an image depend on all support images (full context embeddings).
        reads: K, how often the LSTM of a query reads the support set. Only used with `context`.
    """

    sharpness: float = setting(10.0, above=0)
    context: bool = False
    reads: int = setting(5, least=1)


class Matching(ScoringLearner):
    """p(c | x) = Σ_i a(x, x_i) [y_i = c],   a = softmax over the support images of β cos(f(x), g(x_i)).

    Without `context`, f = g = h_λ. With it, g(x_i) = h_λ(x_i) + a bidirectional LSTM over the support set, and f(x) is
    the state after K steps of an LSTM that reads the support set by attention:

        r_k = Σ_i softmax_i(s_kᵀ g(x_i)) g(x_i),   s_{k+1} = h_λ(x) + LSTM([h_λ(x), r_k], s_k),   s_0 = 0

    There is no inner problem. Without `context` the strategy is a metric. With it, a recurrent network reads the
    support set.

    Choices: the paper has β = 1, which bounds p(c | x) by 0.65 in 5-way 1-shot episodes; the default here is 10. The
    LSTM over the support set reads it class by class, so with `context` the learner is not symmetric in the classes. In
    the paper [s_k, r_k] is the state of the LSTM; here r_k is an input, which enters the same affine maps.
    """

    strategy: ClassVar[str] = "metric"
    Options: ClassVar[type[LearnerOptions]] = MatchingOptions

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return not self.options.context

    def build(self) -> None:
        if self.options.context:
            size = self.features - 1
            self.add_part("support_lstm", nn.LSTM(size, size, bidirectional=True))
            self.add_part("query_lstm", nn.LSTMCell(2 * size, size))

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        support, queries = self.represent(lam, episode)
        order = episode.labels.argsort(stable=True)
        support, labels = support[order], episode.labels[order]
        if self.options.context:
            support, queries = self._in_context(lam, support, queries)
        cosines = F.normalize(queries, dim=1) @ F.normalize(support, dim=1).mT
        of_class = F.one_hot(labels, episode.ways).to(cosines).log()  # 0, or −∞ for other classes
        return torch.logsumexp(self.options.sharpness * cosines[:, :, None] + of_class, 1)

    def _in_context(self, lam: Mapping[str, Tensor], support: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """g of the support set and f of the queries."""
        outputs, _ = self.part("support_lstm", lam, support)
        support = support + outputs.unflatten(1, (2, -1)).sum(1)
        state = cell = torch.zeros_like(queries)
        for _ in range(self.options.reads):
            read = (state @ support.mT).softmax(1) @ support
            hidden, cell = self.part("query_lstm", lam, torch.cat([queries, read], 1), (state, cell))
            state = queries + hidden
        return support, state
