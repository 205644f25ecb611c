"""Learners that compute scores of queries directly: metric and memory strategies, without an inner problem."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.learners.base import Learner, Logits
from bilevel.problem import Task


@dataclass(frozen=True)
class Episode:
    """One episode, as `ScoringLearner.scores` receives it.

    Attributes:
        support: images N×C×H×W.
        labels: the classes of the support images, 0…ways − 1.
        queries: images M×C×H×W.
        ways: the number of classes.
        training: whether λ is being trained. It matters for the batch norm mode "running".
    """

    support: Tensor
    labels: Tensor
    queries: Tensor
    ways: int
    training: bool = False


class ScoringLearner(Learner):
    """A strategy that is one differentiable function from an episode to scores. Implement `scores`.

    The training objective is the cross-entropy of the queries. Override `episode_loss` for another one.
    """

    @property
    def trains_on_cross_entropy(self) -> bool:  # type: ignore[override]
        return type(self).episode_loss is ScoringLearner.episode_loss

    @abstractmethod
    def scores(self, lam: Mapping[str, Tensor], episode: Episode) -> Tensor:
        """The logits of the queries, M×ways."""

    def episode_loss(self, lam: Mapping[str, Tensor], episode: Episode, answers: Tensor) -> Tensor:
        """The training objective of an episode whose queries have these classes."""
        return F.cross_entropy(self.scores(lam, episode), answers)

    def represent(self, lam: Mapping[str, Tensor], episode: Episode) -> tuple[Tensor, Tensor]:
        """The features of the support set, N×F, and of the queries, M×F."""
        representation = self.representation.of_this_thread()
        support, queries = representation.sets(lam, episode.support, episode.queries, training=episode.training)
        return support[:, :-1], queries[:, :-1]  # without the constant feature of the bias

    def chunk_hypergradient(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        lam = {name: leaf.detach().requires_grad_() for name, leaf in self.lam.items()}
        with torch.enable_grad():
            losses = [self.episode_loss(lam, episode, answers) for episode, answers in _episodes(task, training=True)]
            value = torch.stack(losses).mean()
            grads = torch.autograd.grad(value, list(lam.values()), allow_unused=True)
        unused = [name for name, grad in zip(lam, grads, strict=True) if grad is None]
        if unused:
            raise BilevelError(
                f"The training objective of {self.name} does not depend on {', '.join(unused)}. Remove it from λ."
            )
        return value.detach(), dict(zip(lam, grads, strict=True))

    @torch.no_grad()
    def chunk_accuracies(self, task: Task, steps: int) -> Tensor:
        accuracies = [
            (self.scores(self.lam, episode).argmax(1) == answers).double().mean()
            for episode, answers in _episodes(task, training=False)
        ]
        return torch.stack(accuracies)[:, None]

    def adapted(self, support: Tensor, labels: Tensor, ways: int, steps: int) -> Logits:
        return lambda queries: self.scores(self.lam, Episode(support, labels, queries, ways))


def class_means(features: Tensor, labels: Tensor, ways: int) -> Tensor:
    """The mean features of every class, ways × F."""
    members = F.one_hot(labels, ways).to(features)
    return (members.mT @ features) / members.sum(0)[:, None]


def squared_distances(one: Tensor, other: Tensor) -> Tensor:
    """‖a − b‖² for every row a of `one` and b of `other`."""
    return one.square().sum(1)[:, None] - 2 * one @ other.mT + other.square().sum(1)[None]


def _episodes(task: Task, training: bool) -> Iterator[tuple[Episode, Tensor]]:
    (images, labels), (queries, answers, *_) = task.train, task.val
    ways = int(labels.max()) + 1
    for support, classes, query, answer in zip(images, labels, queries, answers, strict=True):
        yield Episode(support, classes, query, ways, training), answer
