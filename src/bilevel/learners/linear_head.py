"""The base classes of learners with a linear classifier on the features, which is a function of λ and the episode."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.dynamics import DynamicsLike
from bilevel.engine.method import Hypergradient, Method
from bilevel.hypergradients import hypergradient
from bilevel.learners.base import Learner, LearnerOptions, NetworkOptions
from bilevel.learners.settings import setting
from bilevel.models import heads
from bilevel.problem import Problem, Task

Leaves = Mapping[str, Tensor]
# Leaves of λ: the logarithms of the factor on all logits and of the penalty on w.
SCALE, PENALTY = "head.log_scale", "head.log_penalty"
# The lower bound of ν: features with a smaller ν are zero up to rounding.
SMALLEST = 1e-12


@dataclass(frozen=True, kw_only=True)
class HeadOptions(NetworkOptions):
    """The settings of every learner with a linear classifier.

    Args:
        normalise: whether features are centred and scaled to one length; see `HyperRepresentation`.
        scale: the initial factor on all logits; it is learned.
        penalty: the initial penalty on the classifier; it is learned.
    """

    normalise: bool = False
    scale: float = setting(1.0, above=0)
    penalty: float = setting(1.0, above=0)


class LinearHead(Learner):
    """logits(x) = s·h_λ(x)ᵀW with W = W(h_λ(S), λ), the classifier of a support set S; the scale s is learned.

    Episodes are stacked, and their classifiers are computed together in double precision. Implement `weights`; autograd
    differentiates it. Every class should have the same weight, whatever its number of support images: use
    `row_weights`.
    """

    strategy: ClassVar[str] = "representation"
    linear: ClassVar[bool] = True
    features_only: ClassVar[bool] = True
    Options: ClassVar[type[LearnerOptions]] = HeadOptions

    def build(self) -> None:
        like = next(iter(self.lam.values()))
        self.lam[SCALE] = like.new_tensor(self.options.scale).log()
        self.lam[PENALTY] = like.new_tensor(self.options.penalty).log()

    @abstractmethod
    def weights(self, lam: Leaves, support: Tensor, labels: Tensor, ways: int) -> Tensor:
        """W, episodes × F × ways, from features episodes × examples × F and labels episodes × examples."""

    def prepared(self, lam: Leaves, support: Tensor, queries: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        """The features of both sets as inputs of the classifier. Override this method to scale them."""
        return support, queries

    def represent_episodes(
        self, lam: Leaves, images: Tensor, labels: Tensor, queries: Tensor, ways: int, *, training: bool
    ) -> tuple[Tensor, ...]:
        """The features of stacked episodes, the constant one last."""
        support, query = self.representation.of_this_thread().episodes(lam, images, queries, training=training)
        return self.prepared(lam, support.double(), query.double(), labels, ways)

    @staticmethod
    def logits(lam: Leaves, queries: Tensor, weights: Tensor) -> Tensor:
        return lam[SCALE].double().exp() * torch.bmm(queries, weights)

    # ------------------------------------------------------------------------------------------- the contract

    def chunk_hypergradient(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        (images, labels), (queries, answers, *_) = task.train, task.val
        ways = int(labels.max()) + 1
        lam = {name: leaf.detach().requires_grad_() for name, leaf in self.lam.items()}
        with torch.enable_grad():
            support, query = self.represent_episodes(lam, images, labels, queries, ways, training=True)
            logits = self.logits(lam, query, self.weights(lam, support, labels, ways))
            value = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
            grads = torch.autograd.grad(value, list(lam.values()))
        return value.detach().to(grads[0]), dict(zip(lam, grads, strict=True))

    @torch.no_grad()
    def chunk_accuracies(self, task: Task, steps: int) -> Tensor:
        (images, labels), (queries, answers, *_) = task.train, task.val
        ways = int(labels.max()) + 1
        support, query = self.represent_episodes(self.lam, images, labels, queries, ways, training=False)
        return heads.accuracy(self.weights(self.lam, support, labels, ways), query, answers)[:, None]

    @torch.no_grad()
    def adapted(self, support: Tensor, labels: Tensor, ways: int, steps: int) -> HeadLogits:
        images, numbers = support[None], labels[None]
        features = self.represent_episodes(self.lam, images, numbers, images, ways, training=False)[0]
        return HeadLogits(self, images, numbers, self.weights(self.lam, features, numbers, ways))


@dataclass(frozen=True)
class HeadLogits:
    """The logits s·h_λ(x)ᵀW of queries, with the classifier W of a support set (one stacked episode)."""

    learner: LinearHead
    support: Tensor
    labels: Tensor
    weights: Tensor

    def __call__(self, queries: Tensor) -> Tensor:
        learner, ways = self.learner, self.weights.shape[-1]
        features = learner.represent_episodes(
            learner.lam, self.support, self.labels, queries[None], ways, training=False
        )[1]
        return learner.logits(learner.lam, features, self.weights)[0].to(self.support)

    @property
    def matrix(self) -> Tensor:
        """The matrix, features × classes, that gives the logits h(x)ᵀ·matrix. It includes `prepared` and the scale."""
        learner = self.learner
        representation = learner.representation.of_this_thread()
        support = representation.episodes(learner.lam, self.support, self.support, training=False)[0]
        # The logits are affine in the features, so their values at zero and at the unit vectors determine them.
        units = torch.eye(support.shape[2], dtype=torch.float64, device=support.device).roll(1, 0)
        units[:, -1] = 1
        ways = self.weights.shape[-1]
        _, inputs = learner.prepared(learner.lam, support.double(), units[None], self.labels, ways)
        logits = learner.logits(learner.lam, inputs, self.weights)[0]
        return torch.cat([logits[1:] - logits[:1], logits[:1]])


class SolvedHead(LinearHead):
    """A linear classifier that minimises a convex inner objective. The engine solves and differentiates it.

    f(λ) = E(w_λ, λ) is the value at the minimiser w_λ, so there is no number of steps to choose. Implement `inner`,
    `start` and `classifier`, and define how the engine computes the minimiser: `best_method`, `dynamics`,
    `inner_steps`.
    """

    # Steps of `dynamics` from `start`. Methods that compute the minimiser by another algorithm ignore them.
    inner_steps: ClassVar[int] = 1
    method: Method | None = None

    def __init__(self, *arguments: Any, method: Method | None = None, **options: Any) -> None:
        self.method = method
        super().__init__(*arguments, **options)

    @abstractmethod
    def inner(self, ways: int) -> Any:
        """The inner objective L(w, λ, batch), where the batch is what `batch` returns."""

    @abstractmethod
    def start(self, lam: Leaves, episodes: int, ways: int, examples: int) -> Tensor:
        """w_0 for this number of episodes. The minimiser does not depend on it."""

    @abstractmethod
    def classifier(self, w: Tensor, lam: Leaves, support: Tensor, labels: Tensor) -> Tensor:
        """The classifier W, episodes × F × ways, from the minimiser w."""

    @abstractmethod
    def best_method(self) -> Method:
        """How ∇f is computed if `method` is None."""

    @property
    @abstractmethod
    def dynamics(self) -> DynamicsLike:
        """The dynamics Φ; its limit is the minimiser."""

    def batch(self, lam: Leaves, support: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        """The data of a support set that the inner objective uses."""
        return support, labels

    def problem(self, episodes: int, ways: int, examples: int, *, encoded: bool = False) -> Problem:
        """The bilevel problem of stacked episodes. With `encoded`, a task holds features instead of images."""
        key = (episodes, ways, examples, encoded)
        return self.kept_problem(key, lambda: self._new_problem(*key))

    def _new_problem(self, episodes: int, ways: int, examples: int, encoded: bool) -> Problem:
        def encode(lam: Leaves, task: Task) -> Task:
            (images, labels), (queries, answers) = task.train, task.val
            support, query = self.represent_episodes(lam, images, labels, queries, ways, training=True)
            return Task(self.batch(lam, support, labels, ways), (query, answers, support, labels))

        def outer(w: Tensor, lam: Leaves, batch: tuple[Tensor, ...]) -> Tensor:
            query, answers, support, labels = batch
            logits = self.logits(lam, query, self.classifier(w, lam, support, labels))
            return F.cross_entropy(logits.flatten(0, 1), answers.flatten())

        def init(lam: Leaves) -> Tensor:
            return self.start(lam, episodes, ways, examples)

        if encoded:
            # Only the minimiser is used. E on a support set may be zero up to rounding, and a comparison of its
            # derivative with differences would then fail.
            return Problem(self.inner(ways), outer, init, check_derivatives=False)
        # The calls of a comparison with differences would enter the running averages.
        encode.keeps_statistics = self.batch_norm == "running"  # type: ignore[attr-defined]
        return Problem(self.inner(ways), outer, init, encode)

    def solved(self, problem: Problem, lam: Leaves, task: Task, **settings: Any) -> Hypergradient:
        """f and ∇f of a problem that `problem` returned."""
        method = self.method or self.best_method()
        return hypergradient(
            problem, lam, task, dynamics=self.dynamics, steps=self.inner_steps, method=method, **settings
        )

    def weights(self, lam: Leaves, support: Tensor, labels: Tensor, ways: int) -> Tensor:
        """W at the minimiser, without an autograd graph."""
        of_head = {name: leaf for name, leaf in lam.items() if name.startswith("head.")}
        problem = self.problem(len(support), ways, support.shape[1], encoded=True)
        task = Task(self.batch(lam, support, labels, ways), (support, labels, support, labels))
        with torch.enable_grad():
            w = self.solved(problem, of_head, task, allow_unused=True).inner
        return self.classifier(w, lam, support, labels)

    def chunk_hypergradient(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        labels = task.train[1]
        problem = self.problem(len(labels), int(labels.max()) + 1, labels.shape[1])
        result = self.solved(problem, self.lam, Task(task.train, task.val[:2]))
        return result.value.to(result.grad[SCALE]), result.grad

    def inner_size(self, ways: int) -> int:
        return self.start(self.lam, 1, ways, ways).numel()


def row_weights(labels: Tensor, ways: int) -> Tensor:
    """Weights of the examples, episodes × examples, that give every class the same total weight. Their mean is 1.

    >>> [round(weight, 4) for weight in row_weights(torch.tensor([[0, 0, 0, 1]]), 2)[0].tolist()]
    [0.6667, 0.6667, 0.6667, 2.0]
    """
    counts = F.one_hot(labels, ways).sum(1).double()
    return labels.shape[1] / ways / counts.gather(1, labels)


def of_unit_curvature(support: Tensor, queries: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The features divided by √ν, ν = λ_max(ΦᵀSΦ)/n, so that the weighted mean of squared errors has curvature 1.

    S is the diagonal matrix of `weights`. Proximal steps of one size then converge in every episode, and a penalty has
    the same effect in each. The factor is part of the representation and is differentiated with it.
    """
    rows = support * weights.sqrt()[..., None]
    wide = rows if rows.shape[1] <= rows.shape[2] else rows.mT
    nu = torch.linalg.eigvalsh(torch.bmm(wide, wide.mT))[:, -1] / support.shape[1]
    factor = nu.clamp(min=SMALLEST).rsqrt()[:, None, None]
    return support * factor, queries * factor
