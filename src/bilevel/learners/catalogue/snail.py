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
from bilevel.learners.settings import TrainingSettings

# A sequence N×C, and queries M×C. Each query alone is the last element of a sequence of N + 1.
SupportAndQueries = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class SNAILOptions(NetworkOptions):
    """The settings of `SNAIL`.

    Args:
        ways: the largest number of classes. `bilevel train` takes it from the episodes.
        shots: with `ways`, it decides how far the convolutions reach.
        filters: of each dense block; the attention blocks have as many values.
    """

    ways: int = 5
    shots: int = 1
    filters: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ways < 2 or self.shots < 1 or self.filters < 1:
            raise BilevelError(
                f"ways={self.ways} must be at least 2, and shots={self.shots} and filters={self.filters} at least 1."
            )


class SNAIL(ScoringLearner):
    """logits(x) = the last output of a causal network on (h(x_1), y_1), …, (h(x_N), y_N), (h(x), 0).

    The network is attention, convolutions, attention, convolutions, attention, and a linear layer, as in the paper.
    Every block appends its outputs to its inputs:

        convolution with dilation d   out_t = tanh(u_t) σ(v_t),   (u_t, v_t) = A x_t + B x_{t−d} + b;   d = 1, 2, 4, …
        attention                     out_t = Σ_{s ≤ t} softmax_s(q_tᵀk_s / √F) v_s

    In the bilevel framework there is no inner problem and no w: λ holds the whole learning algorithm, which is a
    function from a sequence to an answer.

    Choices: the support images come class by class. An output and the one-hot label belong to a class number, so a
    learner takes at most as many classes as it was built for, and is not symmetric in them. Any number of shots works;
    beyond the number it was built for, only attention sees the whole sequence. Keys and queries begin with equal
    weights, so attention begins as a similarity. The paper has 128 filters, and more keys and values in later blocks.
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
                f"This {self.name} was built for {self.options.ways} classes and cannot tell {ways} apart. "
                f"Train one with --ways {ways}, or pass at most {self.options.ways} classes."
            )

    def build(self) -> None:
        options = self.options
        self.add_part("causal", CausalNetwork(self.features - 1, options.ways, options.shots, options.filters))

    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        known, asked = self.represent(lam, episode)
        order = episode.labels.argsort(stable=True)
        labels = F.one_hot(episode.labels[order], self.options.ways).to(known)
        pairs = torch.cat([known[order], labels], 1)
        _, logits = self.part("causal", lam, (pairs, F.pad(asked, (0, self.options.ways))))
        return logits[:, : episode.ways]


class CausalNetwork(nn.Module):
    """From a sequence of features and labels to logits at every place of it."""

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
            known, asked = block(sequence)
            sequence = torch.cat([sequence[0], known], 1), torch.cat([sequence[1], asked], 1)
        return self.last(sequence[0]), self.last(sequence[1])


class CausalConvolution(nn.Module):
    """A gated convolution of width 2 over the sequence: each place sees itself and the place `dilation` before it."""

    def __init__(self, size: int, filters: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.now, self.before = nn.Linear(size, 2 * filters), nn.Linear(size, 2 * filters, bias=False)

    def forward(self, sequence: SupportAndQueries) -> SupportAndQueries:
        known, asked = sequence
        # Zeros stand before the sequence. The last row is the one that the queries see.
        earlier = F.pad(self.before(known), (0, 0, self.dilation, 0))[: len(known) + 1]
        return self._gated(self.now(known) + earlier[:-1]), self._gated(self.now(asked) + earlier[-1:])

    @staticmethod
    def _gated(both: Tensor) -> Tensor:
        content, gate = both.chunk(2, dim=1)
        return content.tanh() * gate.sigmoid()


class CausalAttention(nn.Module):
    """Each place reads the values of all places up to itself."""

    def __init__(self, size: int, filters: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, filters) for _ in range(3))
        self.key.load_state_dict(self.query.state_dict())

    def forward(self, sequence: SupportAndQueries) -> SupportAndQueries:
        known, asked = sequence
        keys, values = self.key(known), self.value(known)
        scale = keys.shape[1] ** -0.5
        later = torch.ones(len(known), len(known), dtype=torch.bool, device=known.device).triu(1)
        weights = (scale * self.query(known) @ keys.mT).masked_fill(later, -torch.inf).softmax(1)
        own = scale * (self.query(asked) * self.key(asked)).sum(1, keepdim=True)
        of_query = torch.cat([scale * self.query(asked) @ keys.mT, own], 1).softmax(1)
        return weights @ values, of_query[:, :-1] @ values + of_query[:, -1:] * self.value(asked)
