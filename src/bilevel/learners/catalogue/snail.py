"""SNAIL (Mishra et al., 2018): temporal convolutions and causal attention read the support set as a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel.errors import BilevelError
from bilevel.learners.base import LearnerOptions, NetworkOptions
from bilevel.learners.scoring_learner import Episode, ScoringLearner
from bilevel.learners.settings import TrainingSettings, setting

# The support sequence N×C, and queries M×C. Each query is the last element of its own sequence of length N + 1.
SupportAndQueries = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class SNAILOptions(NetworkOptions):
    """The settings of `SNAIL`.

    Args:
        ways: the largest number of classes. `bilevel train` takes it from the episodes.
        shots: together with `ways`, it determines how far back the convolutions reach.
        filters: the number of filters of each convolution block, and of values of each attention block.
    """

    ways: int = setting(5, least=2)
    shots: int = setting(1, least=1)
    filters: int = setting(32, least=1)


class SNAIL(ScoringLearner):
    """logits(x) = the last output of a causal network for the sequence (h(x_1), y_1), …, (h(x_N), y_N), (h(x), 0).

    The network is attention, convolutions, attention, convolutions, attention, and a linear layer, as in the paper.
    Every block appends its outputs to its inputs:

        convolution with dilation d   out_t = tanh(u_t) σ(v_t),   (u_t, v_t) = A x_t + B x_{t−d} + b;   d = 1, 2, 4, …
        attention                     out_t = Σ_{s ≤ t} softmax_s(q_tᵀk_s / √F) v_s

    In the bilevel framework there is no inner problem and no w: λ is the learning algorithm, a function from a sequence
    to a prediction.

    Choices: the sequence is ordered by class. Each class number has its own output and its own entry of the one-hot
    label, so the learner has a largest number of classes and is not symmetric in them. Any number of shots works. With
    more than `shots`, the convolutions do not reach the whole sequence, but attention does. Keys and queries begin with
    equal weights, so that attention begins as a similarity. The paper has 128 filters, and more keys and values in
    later blocks.
    """

    strategy: ClassVar[str] = "memorisation"
    Options: ClassVar[type[LearnerOptions]] = SNAILOptions
    symmetric = False

    @classmethod
    def options_of(cls, settings: TrainingSettings) -> dict[str, Any]:
        return {**super().options_of(settings), "ways": max(settings.ways, settings.ways_in_training)}

    def check_episode(self, ways: int, shots: int) -> None:
        if ways > self.options.ways:
            raise BilevelError(
                f"This {self.name} was built for {self.options.ways} classes and cannot classify {ways}. "
                f"Train one with --ways {ways}, or pass at most {self.options.ways} classes."
            )

    def build(self) -> None:
        options = self.options
        self.add_part("causal", CausalNetwork(self.features - 1, options.ways, options.shots, options.filters))

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        support, queries = self.represent(lam, episode)
        order = episode.labels.argsort(stable=True)
        labels = F.one_hot(episode.labels[order], self.options.ways).to(support)
        pairs = torch.cat([support[order], labels], 1)
        _, logits = self.part("causal", lam, (pairs, F.pad(queries, (0, self.options.ways))))
        return logits[:, : episode.ways]


class CausalNetwork(nn.Module):
    """From a sequence of features and labels to logits at every position."""

    def __init__(self, features: int, ways: int, shots: int, filters: int) -> None:
        super().__init__()
        dilations = [2**i for i in range(max(1, math.ceil(math.log2(ways * shots + 1))))]
        blocks: list[nn.Module] = []
        size = features + ways
        for kind in ("attention", "convolutions", "attention", "convolutions", "attention"):
            for dilation in dilations if kind == "convolutions" else [0]:
                blocks.append(
                    CausalConvolution(size, filters, dilation) if dilation else CausalAttention(size, filters)
                )
                size += filters
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(size, ways)

    def forward(self, sequence: SupportAndQueries) -> SupportAndQueries:
        for block in self.blocks:
            support, queries = block(sequence)
            sequence = torch.cat([sequence[0], support], 1), torch.cat([sequence[1], queries], 1)
        return self.last(sequence[0]), self.last(sequence[1])


class CausalConvolution(nn.Module):
    """A gated convolution of width 2: each position sees itself and the position `dilation` before it."""

    def __init__(self, size: int, filters: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.now, self.before = nn.Linear(size, 2 * filters), nn.Linear(size, 2 * filters, bias=False)

    def forward(self, sequence: SupportAndQueries) -> SupportAndQueries:
        support, queries = sequence
        # The sequence is preceded by zeros. The last row is for the queries.
        earlier = F.pad(self.before(support), (0, 0, self.dilation, 0))[: len(support) + 1]
        return self._gated(self.now(support) + earlier[:-1]), self._gated(self.now(queries) + earlier[-1:])

    @staticmethod
    def _gated(outputs: Tensor) -> Tensor:
        content, gate = outputs.chunk(2, dim=1)
        return content.tanh() * gate.sigmoid()


class CausalAttention(nn.Module):
    """Each position reads the values of all positions up to itself."""

    def __init__(self, size: int, filters: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, filters) for _ in range(3))
        self.key.load_state_dict(self.query.state_dict())

    def forward(self, sequence: SupportAndQueries) -> SupportAndQueries:
        support, queries = sequence
        keys, values = self.key(support), self.value(support)
        scale = keys.shape[1] ** -0.5
        later = torch.ones(len(support), len(support), dtype=torch.bool, device=support.device).triu(1)
        weights = (scale * self.query(support) @ keys.mT).masked_fill(later, -torch.inf).softmax(1)
        own = scale * (self.query(queries) * self.key(queries)).sum(1, keepdim=True)
        of_queries = torch.cat([scale * self.query(queries) @ keys.mT, own], 1).softmax(1)
        return weights @ values, of_queries[:, :-1] @ values + of_queries[:, -1:] * self.value(queries)
