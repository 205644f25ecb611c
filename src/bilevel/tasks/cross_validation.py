"""K-fold cross-validation as a bilevel problem (Appendix B)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import torch

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.problem import Problem, Task
from bilevel.tasks.holdout import number_of_examples, shuffled, take
from bilevel.trees import Tree


@dataclass(frozen=True)
class CrossValidation:
    """f(λ) = (1/K) Σ_j E^j(w^j_λ, λ), with w^j trained on all folds but the j-th and E^j taken on the j-th.

    The folds can be solved in three ways that agree: one after another (pass `cv.tasks` as the tasks), all in one
    batched run (`problem, task = cv.batched(problem)`), or a few at random in every hyperiteration (pass
    `cv.sample(count)` to `solve`), which agrees in expectation.

    Args:
        data: a tree of tensors whose first axis counts examples.
        folds: K; None means leave-one-out, K = number of examples.
        seed: the seed of the shuffle before the examples are split into folds; None keeps the order.

    >>> cv = CrossValidation((torch.arange(10),), folds=5)
    >>> [len(task.val[0]) for task in cv.tasks]
    [2, 2, 2, 2, 2]
    """

    data: Tree
    folds: int | None = 5
    seed: int | None = 0

    @cached_property
    def tasks(self) -> list[Task]:
        """One task per fold."""
        count = number_of_examples(self.data)
        folds = count if self.folds is None else self.folds
        if not (isinstance(folds, Integral) and 2 <= folds <= count):
            raise BilevelError(
                f"{count} examples cannot be split into {folds!r} folds; pass an int, 2 ≤ folds ≤ {count}, or "
                "None for leave-one-out."
            )
        held_out = torch.tensor_split(shuffled(count, self.seed), folds)
        return [Task(take(self.data, _without(held_out, j)), take(self.data, rows)) for j, rows in enumerate(held_out)]

    def batched(self, problem: Problem) -> tuple[Problem, Task]:
        """The K inner problems as one: w has a leading axis of folds and all of them take their steps together."""
        return stack(problem, self.tasks)

    def sample(self, count: int = 1, seed: int = 0) -> Callable[[int], list[Task]]:
        """A source that draws `count` different folds for hyperiteration k, as a pure function of (seed, k)."""
        if not 1 <= count <= len(self.tasks):
            raise BilevelError(f"sample(count={count}) cannot be drawn from {len(self.tasks)} folds.")

        def draw(k: int) -> list[Task]:
            return [self.tasks[int(j)] for j in shuffled(len(self.tasks), seed * 1_000_003 + k)[:count]]

        return draw


def _without(parts: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
    return torch.cat([part for j, part in enumerate(parts) if j != index])


def stack(problem: Problem, tasks: list[Task]) -> tuple[Problem, Task]:
    """Several tasks of one problem as a single task of a stacked problem.

    The inner objective is the sum over tasks, so that every w^j takes exactly the step it would take alone; the outer
    objective is the mean. Tasks with equal shapes are evaluated together by `torch.vmap`, others in a loop. The
    dynamics must act on each weight separately (all dynamics here do, except with group penalties).
    """
    if problem.encode is not None:
        raise BilevelError(
            "A problem with `encode` cannot be stacked; pass the list of tasks instead, which gives the same numbers."
        )
    if problem.residual is not None:
        raise BilevelError(
            "A problem that is given by equations cannot be stacked; pass the list of tasks instead, which gives the "
            "same numbers."
        )
    if any(callable(task.train) for task in tasks):
        raise BilevelError(
            "Tasks whose `train` is a function of t cannot be stacked; pass the list of tasks instead, which gives the "
            "same numbers."
        )
    count = len(tasks)
    even = len({str(trees.describe(task)) for task in tasks}) == 1

    def join(batches: list[Tree]) -> Tree:
        return trees.map(lambda *parts: torch.stack(parts), *batches) if even else batches

    def each(objective: Callable[[Tree, Tree, Tree], torch.Tensor]) -> Callable[[Tree, Tree, Tree], torch.Tensor]:
        def evaluate(w: Tree, lam: Tree, batches: Tree) -> torch.Tensor:
            if even:
                return torch.vmap(objective, in_dims=(0, None, 0))(w, lam, batches)
            return torch.stack(
                [objective(trees.map(lambda leaf, j=j: leaf[j], w), lam, batches[j]) for j in range(count)]
            )

        return evaluate

    inner, outer = each(problem.inner), each(problem.outer)
    stacked = Problem(
        inner=lambda w, lam, batches: inner(w, lam, batches).sum(),
        outer=lambda w, lam, batches: outer(w, lam, batches).mean(),
        init=lambda lam: trees.map(lambda leaf: leaf.expand(count, *leaf.shape).clone(), problem.init(lam)),
        check_derivatives=problem.check_derivatives,
    )
    return stacked, Task(join([task.train for task in tasks]), join([task.val for task in tasks]))
