"""What learners with a linear classifier of the features share: an episode's classifier is a function of λ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.dynamics import DynamicsLike
from bilevel.engine.method import Hypergradient, Method
from bilevel.errors import BilevelError
from bilevel.hypergradients import hypergradient
from bilevel.learners.base import Learner, LearnerOptions, NetworkOptions
from bilevel.learners.representation import CENTRE, LENGTH
from bilevel.models import heads
from bilevel.problem import Problem, Task

Leaves = Mapping[str, Tensor]
# Features of one length begin with this one; learning moves it.
FIRST_LENGTH = 6.0
# Leaves of λ: the logarithms of the factor on all logits and of the penalty on w.
SCALE, PENALTY = "head.log_scale", "head.log_penalty"
# Features with a smaller ν are not made longer: they are zero up to rounding.
SMALLEST = 1e-12


@dataclass(frozen=True, kw_only=True)
class HeadOptions(NetworkOptions):
    """The settings of every learner with a linear classifier.

    Args:
        normalise: whether features are centred and of one length; see `HyperRepresentation`.
        scale: the factor on all logits at the start of training; it is learned.
        penalty: the penalty on the classifier at the start of training; it is learned.
    """

    normalise: bool = False
    scale: float = 1.0
    penalty: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [f.name for f in fields(self) if f.type == "float" and not getattr(self, f.name) > 0]
        if wrong:
            raise BilevelError(f"{wrong[0]}={getattr(self, wrong[0])} must be positive.")


class LinearHead(Learner):
    """logits(x) = s·h_λ(x)ᵀW with W = W(h_λ(S), λ), the classifier of a support set S; the scale s is learned.

    Episodes are stacked, and their classifiers computed together, in double precision. Write `weights`, which is
    differentiated as it is. Every class counts the same, however many support images it has (`row_weights`).
    """

    strategy: ClassVar[str] = "representation"
    linear: ClassVar[bool] = True
    Options: ClassVar[type[LearnerOptions]] = HeadOptions

    def build(self) -> None:
        like = next(iter(self.lam.values()))
        if self.options.normalise:
            self.lam[CENTRE] = like.new_zeros(self.features - 1)
            self.lam[LENGTH] = like.new_tensor(FIRST_LENGTH).log()
        self.lam[SCALE] = like.new_tensor(self.options.scale).log()
        self.lam[PENALTY] = like.new_tensor(self.options.penalty).log()

    @abstractmethod
    def weights(self, lam: Leaves, support: Tensor, labels: Tensor, ways: int) -> Tensor:
        """W, episodes × F × ways, from features episodes × examples × F and labels episodes × examples."""

    def prepared(self, lam: Leaves, support: Tensor, queries: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        """The features of both sets as the classifier takes them; override it to scale them."""
        return support, queries

    def represent_episodes(
        self, lam: Leaves, images: Tensor, labels: Tensor, queries: Tensor, ways: int, *, training: bool
    ) -> tuple[Tensor, ...]:
        """The features of stacked episodes, the constant one last."""
        support, query = self.representation.here().episodes(lam, images, queries, training=training)
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
        known = self.represent_episodes(self.lam, images, numbers, images, ways, training=False)[0]
        return HeadLogits(self, images, numbers, self.weights(self.lam, known, numbers, ways))


@dataclass(frozen=True)
class HeadLogits:
    """s·h_λ(x)ᵀW, the logits of queries, with the classifier W of a support set (one stacked episode)."""

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
        """W, features × classes, with the logits h(x)ᵀW: `prepared` and the scale are part of it."""
        learner = self.learner
        known = learner.representation.here().episodes(learner.lam, self.support, self.support, training=False)[0]
        # The logits are affine in the features, so those of zero and of the unit vectors say everything.
        units = torch.eye(known.shape[2], dtype=torch.float64, device=known.device).roll(1, 0)
        units[:, -1] = 1
        ways = self.weights.shape[-1]
        _, seen = learner.prepared(learner.lam, known.double(), units[None], self.labels, ways)
        logits = learner.logits(learner.lam, seen, self.weights)[0]
        return torch.cat([logits[1:] - logits[:1], logits[:1]])


class SolvedHead(LinearHead):
    """A linear classifier that minimises a convex inner objective; the engine solves and differentiates it.

    f(λ) = E(w_λ, λ) is the value at the minimiser w_λ itself, so there is no number of steps to choose. Write `inner`,
    `start` and `classifier`, and say how the engine comes to the minimiser: `method`, `dynamics`, `inner_steps`.
    """

    # Steps of `dynamics` from `start`. Methods that compute the minimiser themselves need none.
    inner_steps: ClassVar[int] = 1
    method: Method | None = None

    def __init__(self, *arguments: Any, method: Method | None = None, **options: Any) -> None:
        self.method = method
        self._problems: dict[tuple[int, int, int, bool], Problem] = {}
        super().__init__(*arguments, **options)

    @abstractmethod
    def inner(self, ways: int) -> Any:
        """L(w, λ, batch); the batch is what `batch` returns."""

    @abstractmethod
    def start(self, lam: Leaves, episodes: int, ways: int, examples: int) -> Tensor:
        """w_0 for so many episodes, which the minimiser does not depend on."""

    @abstractmethod
    def classifier(self, w: Tensor, lam: Leaves, support: Tensor, labels: Tensor) -> Tensor:
        """W, episodes × F × ways, from the minimiser w."""

    @abstractmethod
    def best_method(self, unknowns: int) -> Method:
        """How ∇f is computed where w has so many numbers, unless `method` says it."""

    @property
    @abstractmethod
    def dynamics(self) -> DynamicsLike:
        """Φ, whose limit is the minimiser."""

    def batch(self, lam: Leaves, support: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        """What the inner objective needs of a support set."""
        return support, labels

    def problem(self, episodes: int, ways: int, examples: int, *, encoded: bool = False) -> Problem:
        """The bilevel problem of so many episodes, stacked; `encoded`: of their features, which do not depend on λ."""
        key = (episodes, ways, examples, encoded)
        if key not in self._problems:  # kept, because the engine checks every problem at its first use
            self._problems[key] = self._new_problem(*key)
        return self._problems[key]

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
            # Only its minimiser is asked for, and E of a support set may be zero up to rounding, which differences
            # cannot tell from a wrong derivative.
            return Problem(self.inner(ways), outer, init, check_derivatives=False)
        return Problem(self.inner(ways), outer, init, encode)

    def solved(self, problem: Problem, lam: Leaves, task: Task, **settings: Any) -> Hypergradient:
        """f and ∇f of a problem of `problem`."""
        method = self.method or self.best_method(problem.init(lam).numel())
        return hypergradient(
            problem, lam, task, dynamics=self.dynamics, steps=self.inner_steps, method=method, **settings
        )

    def weights(self, lam: Leaves, support: Tensor, labels: Tensor, ways: int) -> Tensor:
        """W at the minimiser, without a graph."""
        own = {name: leaf for name, leaf in lam.items() if name.startswith("head.")}
        problem = self.problem(len(support), ways, support.shape[1], encoded=True)
        task = Task(self.batch(lam, support, labels, ways), (support, labels, support, labels))
        with torch.enable_grad():
            w = self.solved(problem, own, task, allow_unused=True).inner
        return self.classifier(w, lam, support, labels)

    def chunk_hypergradient(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        labels = task.train[1]
        problem = self.problem(len(labels), int(labels.max()) + 1, labels.shape[1])
        found = self.solved(problem, self.lam, Task(task.train, task.val[:2]))
        return found.value.to(found.grad[SCALE]), found.grad

    def inner_size(self, ways: int) -> int:
        return self.start(self.lam, 1, ways, ways).numel()

    def __getstate__(self) -> dict[str, Any]:
        # The problems are functions of this learner; a copy makes its own.
        return {**self.__dict__, "_problems": {}}


def row_weights(labels: Tensor, ways: int) -> Tensor:
    """The weights of examples, episodes × examples, with which every class counts the same; their mean is 1.

    >>> [round(weight, 4) for weight in row_weights(torch.tensor([[0, 0, 0, 1]]), 2)[0].tolist()]
    [0.6667, 0.6667, 0.6667, 2.0]
    """
    counts = F.one_hot(labels, ways).sum(1).double()
    return labels.shape[1] / ways / counts.gather(1, labels)


def of_unit_curvature(support: Tensor, queries: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The features over √ν, with ν = λ_max(ΦᵀSΦ)/n: afterwards the weighted mean of squared errors has the curvature 1.

    Proximal steps of one size then converge on every episode, and a penalty means the same on each. The factor is part
    of the representation and is differentiated with it.
    """
    rows = support * weights.sqrt()[..., None]
    wide = rows if rows.shape[1] <= rows.shape[2] else rows.mT
    nu = torch.linalg.eigvalsh(torch.bmm(wide, wide.mT))[:, -1] / support.shape[1]
    factor = nu.clamp(min=SMALLEST).rsqrt()[:, None, None]
    return support * factor, queries * factor
