"""The example problems of the batteries: trees on both levels, λ in every place, curvature in [0.5, 4]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics.base import Dynamics, gradient_step
from bilevel.engine.method import Part
from bilevel.problem import Problem, Task
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.linear_classifiers import LinearClassifiers
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.outer_objectives import LeftOutLoss
from bilevel.tasks.minibatches import Minibatches
from bilevel.trees import Tree

# Where each leaf of the first examples' λ enters.
PLACES: Mapping[str, frozenset[Part]] = {
    "penalty": frozenset({"the inner objective"}),
    "shift": frozenset({"the inner objective", "the outer objective"}),
    "start": frozenset({"the start"}),
}

_MODEL_PLACES: Mapping[str, frozenset[Part]] = {
    "penalty": PLACES["penalty"],
    "weights": frozenset({"the outer objective"}),
}


@dataclass(frozen=True, eq=False)
class Example:
    """A problem with a λ, a task and known facts about it.

    Attributes:
        quadratic: its inner objective is quadratic in w everywhere.
        enters: for every key of λ the places where it enters.
    """

    name: str
    problem: Problem
    lam: Tree
    task: Task
    quadratic: bool = False
    enters: Mapping[str, frozenset[Part]] = field(default_factory=lambda: PLACES)

    @property
    def single(self) -> bool:
        """Whether it is in float32."""
        return any(leaf.dtype == torch.float32 for leaf in trees.leaves(self.lam))

    @property
    def without_encode(self) -> Problem | None:
        """The same problem with `encode` written into the objectives; None if it has no `encode`."""
        problem, encode = self.problem, self.problem.encode
        if encode is None:
            return None
        return Problem(
            inner=lambda w, lam, batch: problem.inner(w, lam, encode(lam, Task(batch, batch)).train),
            outer=lambda w, lam, batch: problem.outer(w, lam, encode(lam, Task(batch, batch)).val),
            init=problem.init,
        )

    def for_dynamics(self, dynamics: Dynamics) -> Example:
        """For a dynamics that needs equations: the fixed point of w ↦ w − ∇L/4 instead of the minimiser of L."""
        return replace(self, problem=as_fixed_point(self.problem)) if dynamics.equations else self

    def to(self, dtype: torch.dtype) -> Example:
        """The same example in another precision."""
        lam, task = trees.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, (self.lam, self.task))
        return replace(self, lam=lam, task=task)


def as_fixed_point(problem: Problem) -> Problem:
    """The same solution as the fixed point of a gradient step; the curvature of ½‖w − Φ(w)‖² is in [1/64, 1]."""

    def step(w: Tree, lam: Tree, batch: Tree) -> Tree:
        return gradient_step(lambda w: problem.inner(w, lam, batch), w, 0.25)

    return Problem(fixed_point=step, outer=problem.outer, init=problem.init, encode=problem.encode)


def examples() -> list[Example]:
    """A quadratic, a smooth problem, the smooth one on minibatches and in float32, pieces with kinks, an encoder,
    linear classifiers, least squares and linear models that declare their structure, and nested trees."""
    data, val, lam = _data()
    smooth = Problem(inner=_smooth_inner, outer=_outer, init=_init)
    return [
        Example("quadratic", Problem(_quadratic_inner, _outer, _init), lam, Task(data, val), quadratic=True),
        Example("smooth", smooth, lam, Task(data, val)),
        Example("minibatches", smooth, lam, Task(Minibatches(data, size=5, seed=3), val)),
        Example("piecewise", Problem(_piecewise_inner, _kinked_outer, _init), lam, Task(data, val)),
        encoded(),
        classifiers(),
        least_squares(),
        linear_models(),
        nested(),
        replace(Example("smooth", smooth, lam, Task(data, val)).to(torch.float32), name="float32"),
    ]


def encoded() -> Example:
    """Ridge regression on features tanh(x @ λ), which `encode` computes; quadratic in w."""
    normal = _normal(13)
    lam = {"map": normal(3, 2) * 0.6, "penalty": normal() * 0.3}

    def inner(w: Tree, lam: Tree, batch: Tree) -> Tensor:
        return 0.5 * ((batch[0] @ w - batch[1]) ** 2).mean() + (0.25 + 0.25 * lam["penalty"].exp()) * (w**2).sum()

    problem = Problem(
        inner=inner,
        outer=lambda w, lam, batch: ((batch[0] @ w - batch[1]) ** 2).mean(),
        init=lambda lam: 0 * lam["map"][0].detach(),
        encode=_encode,
    )
    task = Task((normal(6, 3), normal(6)), (normal(4, 3), normal(4)))
    places: dict[str, frozenset[Part]] = {"map": PLACES["shift"], "penalty": PLACES["penalty"]}
    return Example("encode", problem, lam, task, quadratic=True, enters=places)


def classifiers() -> Example:
    """Two episodes of three classes on features tanh(x @ λ), with a class weight in the outer objective."""
    normal = _normal(19)
    lam = {"map": normal(3, 7) * 0.6, "weights": normal(3) * 0.3}

    def outer(w: Tree, lam: Tree, batch: Tree) -> Tensor:
        probabilities = torch.log_softmax(batch[0] @ w, -1).gather(-1, batch[1][..., None])[..., 0]
        return -(torch.softmax(lam["weights"], 0)[batch[1]] * probabilities).mean()

    problem = Problem(
        inner=LinearClassifiers(l2=0.5),
        outer=outer,
        init=lambda lam: torch.zeros(2, 7, 3, dtype=lam["map"].dtype),
        encode=_encode,
    )
    labels = torch.tensor([[0, 1, 2, 1], [2, 0, 1, 0]])
    task = Task((normal(2, 4, 3), labels), (normal(2, 4, 3), labels.flip(0)))
    places: dict[str, frozenset[Part]] = {"map": PLACES["shift"], "weights": frozenset({"the outer objective"})}
    return Example("classifiers", problem, lam, task, enters=places)


def least_squares() -> Example:
    """Two folds of ridge regression with two outputs, given by sums over rows, with a penalty per feature."""
    normal = _normal(23)
    lam = {"penalty": normal(3) * 0.3 - 0.5, "weights": normal(2) * 0.3}
    x, y = normal(2, 9, 3), normal(2, 2, 9)
    problem = Problem(
        inner=LeastSquares(lambda lam: lam["penalty"].exp()),
        outer=lambda w, lam, goal: (torch.softmax(lam["weights"], 0) * (w - goal).square().mean((0, 2))).sum(),
        init=lambda lam: torch.zeros(2, 2, 3, dtype=lam["penalty"].dtype),
    )
    task = Task((x.mT @ x / 9, y @ x / 9), normal(2, 2, 3))
    return Example("least squares", problem, lam, task, quadratic=True, enters=_MODEL_PLACES)


def linear_models() -> Example:
    """Two folds of ridge regression with an intercept on the rows of one table, judged on the rows held out."""
    normal = _normal(29)
    lam = {"penalty": normal(3) * 0.3, "weights": normal(6) * 0.3}
    inner = LinearModels(penalty=lambda lam: lam["penalty"].exp(), intercept=True)

    def outer(w: Tree, lam: Tree, batch: Tree) -> Tensor:
        x, y, weight = batch
        return (weight * torch.softmax(lam["weights"], 0) * inner.loss.values(inner.scores(w, x), y)).sum()

    x, y = 0.4 * normal(6, 3), normal(1, 6)
    held_out = torch.arange(6) % 2 == torch.arange(2)[:, None]
    problem = Problem(inner, outer, init=lambda lam: torch.zeros(2, 1, 4, dtype=lam["penalty"].dtype))
    task = Task((x, y, 0.5 * (~held_out).double()), (x, y, 0.5 * held_out.double()))
    return Example("linear models", problem, lam, task, quadratic=True, enters=_MODEL_PLACES)


def left_out() -> Example:
    """Ridge regression on all rows of a table, judged by its leave-one-out loss, in which the penalties enter too."""
    normal = _normal(31)
    lam = {"penalty": normal(3) * 0.3, "weights": normal(3) * 0.3}
    inner = LinearModels(penalty=lambda lam: lam["penalty"].exp(), intercept=True)
    outer = LeftOutLoss(inner, lambda lam, data: (lam["weights"] * data).sum().tanh())
    x, y, weight = 0.4 * normal(6, 3), normal(1, 6), torch.full((1, 6), 0.5, dtype=torch.float64)
    problem = Problem(inner, outer, init=lambda lam: torch.zeros(1, 1, 4, dtype=lam["penalty"].dtype))
    places: dict[str, frozenset[Part]] = {"penalty": PLACES["shift"], "weights": frozenset({"the outer objective"})}
    task = Task((x, y, weight), (x, y, weight, normal(3)))
    return Example("left out", problem, lam, task, quadratic=True, enters=places)


def nested() -> Example:
    """Robust regression with two outputs: w and λ are nested, with matrices and numbers; one λ weighs the outer
    losses."""
    normal = _normal(17)
    lam = {
        "penalties": [normal(3, 2) * 0.3 - 1, (normal() * 0.3,)],
        "start": (normal() * 0.5, normal(3, 2) * 0.5),
        "weights": normal(4) * 0.5,
    }

    def inner(w: Tree, lam: Tree, batch: Tree) -> Tensor:
        matrix, (bias,) = w["net"]
        residual = batch["x"] @ matrix + bias - batch["y"]
        decay = ((0.5 + lam["penalties"][0].exp()) * matrix**2).sum() + (0.5 + lam["penalties"][1][0].exp()) * bias**2
        return torch.log(torch.cosh(residual)).sum(1).mean() + 0.5 * decay

    def outer(w: Tree, lam: Tree, batch: Tree) -> Tensor:
        matrix, (bias,) = w["net"]
        losses = ((batch["x"] @ matrix + bias - batch["y"]) ** 2).sum(1)
        return (torch.softmax(lam["weights"], 0) * losses).sum()

    def init(lam: Tree) -> Tree:
        return {"net": (lam["start"][1], [lam["start"][0]])}

    task = Task({"x": normal(6, 3), "y": normal(6, 2)}, {"x": normal(4, 3), "y": normal(4, 2)})
    places: dict[str, frozenset[Part]] = {
        "penalties": PLACES["penalty"],
        "start": PLACES["start"],
        "weights": frozenset({"the outer objective"}),
    }
    return Example("nested", Problem(inner, outer, init), lam, task, enters=places)


class _normal:
    """Standard normal draws of a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)


def _data() -> tuple[Tree, Tree, Tree]:
    normal = _normal(7)
    x, x_val = normal(12, 5) * 0.9, normal(8, 5)
    lam = {"penalty": normal(5) * 0.3 - 1, "shift": normal() * 0.5, "start": normal(5) * 0.5}
    return (x, normal(12)), (x_val, normal(8)), lam


def _encode(lam: Tree, task: Task) -> Task:
    train, val = ((torch.tanh(x @ lam["map"]), y) for x, y in (task.train, task.val))
    return Task(train, val)


def _init(lam: Tree) -> Tree:
    return {"a": lam["start"][:3], "b": lam["start"][3:]}


def _vector(w: Tree) -> Tensor:
    return torch.cat([w["a"], w["b"]])


def _penalty(w: Tensor, lam: Tree) -> Tensor:
    return 0.5 * ((0.5 + lam["penalty"].exp()) * w**2).sum()


def _quadratic_inner(w: Tree, lam: Tree, batch: Tree) -> Tensor:
    x, y = batch
    vector = _vector(w)
    return 0.5 * ((x @ vector - y - lam["shift"]) ** 2).mean() + _penalty(vector, lam)


def _smooth_inner(w: Tree, lam: Tree, batch: Tree) -> Tensor:
    x, y = batch
    vector = _vector(w)
    residual = x @ vector - y - lam["shift"]
    return torch.log(torch.cosh(residual)).mean() + _penalty(vector, lam)


def _piecewise_inner(w: Tree, lam: Tree, batch: Tree) -> Tensor:
    """The quadratic with a low hill between start and minimiser: quadratic at both ends, but not on the way."""
    hill = torch.relu(0.1 - (w["a"][0] - 0.12).abs())
    return _quadratic_inner(w, lam, batch) + 2 * hill**2


def _outer(w: Tree, lam: Tree, batch: Tree) -> Tensor:
    x, y = batch
    return ((x @ _vector(w) - y) ** 2).mean() + 0.1 * lam["shift"] ** 2


def _kinked_outer(w: Tree, lam: Tree, batch: Tree) -> Tensor:
    x, y = batch
    return (x @ _vector(w) - y).abs().mean() + 0.1 * lam["shift"] ** 2
