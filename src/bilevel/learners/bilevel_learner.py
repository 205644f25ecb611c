"""Learners that solve an inner problem for every episode: the engine differentiates through its solution."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel import trees
from bilevel.dynamics import DynamicsLike, as_function_of_lam
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.method import Method
from bilevel.hypergradients import hypergradient
from bilevel.learners.base import Learner, LearnerOptions, Logits, NetworkOptions
from bilevel.learners.settings import setting
from bilevel.methods.first_order import FirstOrder
from bilevel.methods.reverse import Reverse
from bilevel.methods.unrolled import Unrolled
from bilevel.problem import Problem, Task
from bilevel.trees import Tree

# The values of `--method`. None is the default method of the learner.
METHODS: dict[str, Method | None] = {
    "reverse": None,
    "reverse-sqrt": Reverse("sqrt"),
    "unrolled": Unrolled(),
    "first-order": FirstOrder(),
}


def _loss(problem: Problem, lam: Tree, batch: Any, w: Tree) -> Tensor:
    return problem.inner(w, lam, batch)


@dataclass(frozen=True, kw_only=True)
class DescentOptions(NetworkOptions):
    """The settings of gradient descent in an episode.

    Args:
        steps: T, the inner steps.
        inner_lr: the step size of the inner gradient descent.
    """

    steps: int = setting(5, least=1)
    inner_lr: float = setting(0.1, above=0)


class BilevelLearner(Learner):
    """A strategy that is a bilevel problem: w is trained on the support set of an episode, and λ on the query sets.

        L(w, λ) = cross-entropy of logits(w, λ, support),   w_0 = start(λ),   T steps of `dynamics`
        E(w, λ) = cross-entropy of logits(w, λ, queries),   f_T(λ) = mean over episodes of E(w_T, λ)

    Every class has the same weight in L, whatever its number of support images. Implement `start` and `logits`.
    Override `dynamics` for another Φ, `problem` for other objectives or an `encode`, `solutions` for another inner
    algorithm.

    Args:
        method: how ∇f_T is computed; any method of the engine. None: `default_method`.
    """

    Options: ClassVar[type[LearnerOptions]] = DescentOptions
    default_method: ClassVar[Method] = Reverse()
    also_uses: ClassVar[frozenset[str]] = frozenset({"method"})

    def __init__(
        self,
        module: nn.Module | str | None,
        shape: tuple[int, int, int],
        *,
        method: Method | None = None,
        **options: Any,
    ) -> None:
        self.method = method
        super().__init__(module, shape, **options)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return (self.method or self.default_method).exact

    @property
    def dynamics(self) -> DynamicsLike:
        """Φ, or a function of λ that returns it."""
        return GradientDescent(self.options.inner_lr)

    @abstractmethod
    def start(self, lam: Tree, ways: int) -> Tree:
        """w_0 = Φ_0(λ) for this number of classes."""

    @abstractmethod
    def logits(self, w: Tree, lam: Tree, images: Tensor) -> Tensor:
        """The logits N×ways of a set of images, or of the results of `problem(…).encode` if there is one."""

    def problem(self, ways: int, *, training: bool = True) -> Problem:
        """The bilevel problem of one episode. Its task is Task((support, labels), (queries, answers))."""

        def inner(w: Tree, lam: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
            with self.representation.of_this_thread().unfused():  # ∇L is part of a step, so it is differentiated again
                logits, labels = self.logits(w, lam, batch[0]), batch[1]
            return F.cross_entropy(logits, labels, weight=1 / torch.bincount(labels, minlength=ways).to(logits))

        def outer(w: Tree, lam: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(self.logits(w, lam, batch[0]), batch[1])

        return Problem(inner, outer, lambda lam: self.start(lam, ways))

    def episode_problem(self, ways: int, *, training: bool = True) -> Problem:
        """`problem`, built once."""
        return self.kept_problem((ways, training, self.method), lambda: self.problem(ways, training=training))

    def solutions(self, problem: Problem, task: Task, steps: int) -> Iterator[Tree]:
        """w_1, …, w_steps for an encoded task."""
        dynamics = as_function_of_lam(self.dynamics)(self.lam)
        w = problem.init(self.lam)
        state = dynamics.init(w)
        for t in range(1, steps + 1):
            w, state = dynamics.step(partial(_loss, problem, self.lam, task.batch(t)), w, state, t)
            yield w

    # ------------------------------------------------------------------------------------------- the contract

    def inner_size(self, ways: int) -> int:
        return sum(leaf.numel() for leaf in trees.leaves(self.start(self.lam, ways)))

    def chunk_hypergradient(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = task.train
        problem = self.episode_problem(int(labels.max()) + 1)
        tasks = [Task((images[i], labels[i]), tuple(x[i] for x in task.val[:2])) for i in range(len(images))]
        method = self.method or self.default_method
        result = hypergradient(problem, self.lam, tasks, dynamics=self.dynamics, steps=self.steps, method=method)
        return result.value, result.grad

    def chunk_accuracies(self, task: Task, steps: int) -> Tensor:
        return self._accuracies(task, steps, range(1, steps + 1))

    def chunk_last_accuracies(self, task: Task, steps: int) -> Tensor:
        return self._accuracies(task, steps, range(steps, steps + 1))

    @torch.no_grad()
    def _accuracies(self, task: Task, steps: int, scored: range) -> Tensor:
        (images, labels), (queries, answers, *_) = task.train, task.val
        problem = self.episode_problem(int(labels.max()) + 1, training=False)
        rows = []
        for i in range(len(images)):
            encoded = self._encoded(problem, Task((images[i], labels[i]), (queries[i], answers[i])))
            accuracies = [
                (self.logits(w, self.lam, encoded.val[0]).argmax(1) == answers[i]).double().mean()
                for t, w in enumerate(self.solutions(problem, encoded, steps), 1)
                if t in scored
            ]
            rows.append(torch.stack(accuracies))
        return torch.stack(rows)

    def solution(self, problem: Problem, support: Tensor, labels: Tensor, steps: int) -> Tree:
        """w_steps for a support set."""
        # The queries are not known yet. An `encode` expects some, so it gets the support set twice.
        encoded = self._encoded(problem, Task((support, labels), (support, labels)))
        *_, w = self.solutions(problem, encoded, steps)
        return w

    def adapted(self, support: Tensor, labels: Tensor, ways: int, steps: int) -> Logits:
        problem = self.episode_problem(ways, training=False)
        w = self.solution(problem, support, labels, steps)

        def logits(queries: Tensor) -> Tensor:
            answers = labels.new_zeros(len(queries))
            return self.logits(w, self.lam, self._encoded(problem, Task((support, labels), (queries, answers))).val[0])

        return logits

    def _encoded(self, problem: Problem, task: Task) -> Task:
        return task if problem.encode is None else problem.encode(self.lam, task)

    @classmethod
    def for_training(cls, settings: Any, data: Any, module: nn.Module | None = None, **more: Any) -> Any:
        return super().for_training(settings, data, module, method=METHODS[settings.method], **more)
