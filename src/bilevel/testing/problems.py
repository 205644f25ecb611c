"""Small problems that carry what the batteries need: trees on both levels, λ in every place, curvature in [0.5, 4]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bilevel import trees
from bilevel.methods.base import Part
from bilevel.problem import Problem, Task
from bilevel.structures.linear_classifiers import LinearClassifiers
from bilevel.tasks.minibatches import Minibatches
from bilevel.trees import Tree

# Where each leaf of the first examples' λ enters.
PLACES: Mapping[str, frozenset[Part]] = {
    "penalty": frozenset({"the inner objective"}),
    "shift": frozenset({"the inner objective", "the outer objective"}),
    "start": frozenset({"the start"}),
}


@dataclass(frozen=True, eq=False)
class Example:
    """A problem with a λ, a task and what is known about it.

    Attributes:
        quadratic: its inner objective is quadratic in w everywhere.
        enters: for every key of λ the places where it enters.
        written: the same problem without `encode`, where it has one.
    """

    name: str
    problem: Problem
    lam: Tree
    task: Task
    quadratic: bool = False
    enters: Mapping[str, frozenset[Part]] = field(default_factory=lambda: PLACES)
    written: Problem | None = None

    @property
    def single(self) -> bool:
        """Whether it is in float32."""
        return any(leaf.dtype == torch.float32 for leaf in trees.leaves(self.lam))

    def to(self, dtype: torch.dtype) -> Example:
        """The same example in another precision."""
        lam, task = trees.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, (self.lam, self.task))
        return replace(self, lam=lam, task=task)


def examples() -> list[Example]:
    """A quadratic, a smooth problem, the smooth one on minibatches and in float32, pieces with kinks, an encoder,
    linear classifiers that declare their structure, and nested trees."""
    data, val, lam = _data()
    smooth = Problem(inner=_smooth_inner, outer=_outer, init=_init)
    return [
        Example("quadratic", Problem(_quadratic_inner, _outer, _init), lam, Task(data, val), quadratic=True),
        Example("smooth", smooth, lam, Task(data, val)),
        Example("minibatches", smooth, lam, Task(Minibatches(data, size=5, seed=3), val)),
        Example("piecewise", Problem(_piecewise_inner, _kinked_outer, _init), lam, Task(data, val)),
        encoded(),
        classifiers(),
        nested(),
        replace(Example("smooth", smooth, lam, Task(data, val)).to(torch.float32), name="float32"),
    ]


def closed_form(example: Example) -> tuple[Tree, Tree]:
    """w_λ and ∇f(λ) of the quadratic example, by linear algebra and autograd on the solution formula."""
    values, spec = trees.flatten(example.lam)
    leaves = [leaf.detach().requires_grad_() for leaf in values]
    lam = spec.unflatten(leaves)
    x, y = example.task.train
    matrix = x.T @ x / len(x) + torch.diag(0.5 + lam["penalty"].exp())
    w = torch.linalg.solve(matrix, x.T @ (y + lam["shift"]) / len(x))
    value = _outer({"a": w[:3], "b": w[3:]}, lam, example.task.val)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return {"a": w[:3].detach(), "b": w[3:].detach()}, spec.unflatten(
        torch.zeros_like(v) if g is None else g for v, g in zip(leaves, grads, strict=True)
    )


def encoded() -> Example:
    """Ridge regression on features tanh(x @ λ), which `encode` computes; quadratic in w."""
    normal = _normal(13)
    lam = {"map": normal(3, 2) * 0.6, "penalty": normal() * 0.3}

    def loss(w: Tree, lam: Tree, features: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((features @ w - y) ** 2).mean() + (0.25 + 0.25 * lam["penalty"].exp()) * (w**2).sum()

    def features(lam: Tree, batch: Tree) -> Tree:
        return torch.tanh(batch[0] @ lam["map"]), batch[1]

    problem = Problem(
        inner=lambda w, lam, batch: loss(w, lam, *batch),
        outer=lambda w, lam, batch: ((batch[0] @ w - batch[1]) ** 2).mean(),
        init=lambda lam: 0 * lam["map"][0].detach(),
        encode=lambda lam, task: Task(features(lam, task.train), features(lam, task.val)),
    )
    written = Problem(
        inner=lambda w, lam, batch: problem.inner(w, lam, features(lam, batch)),
        outer=lambda w, lam, batch: problem.outer(w, lam, features(lam, batch)),
        init=problem.init,
    )
    task = Task((normal(6, 3), normal(6)), (normal(4, 3), normal(4)))
    places: dict[str, frozenset[Part]] = {"map": PLACES["shift"], "penalty": PLACES["penalty"]}
    return Example("encode", problem, lam, task, quadratic=True, enters=places, written=written)


def classifiers() -> Example:
    """Two episodes of three classes on features tanh(x @ λ), with a class weight in the outer objective."""
    normal = _normal(19)
    lam = {"map": normal(3, 7) * 0.6, "weights": normal(3) * 0.3}
    inner = LinearClassifiers(l2=0.5)

    def features(lam: Tree, batch: Tree) -> Tree:
        return torch.tanh(batch[0] @ lam["map"]), batch[1]

    def outer(w: Tree, lam: Tree, batch: Tree) -> Tensor:
        probabilities = torch.log_softmax(batch[0] @ w, -1).gather(-1, batch[1][..., None])[..., 0]
        return -(torch.softmax(lam["weights"], 0)[batch[1]] * probabilities).mean()

    problem = Problem(
        inner=inner,
        outer=outer,
        init=lambda lam: torch.zeros(2, 7, 3, dtype=lam["map"].dtype),
        encode=lambda lam, task: Task(features(lam, task.train), features(lam, task.val)),
    )
    written = Problem(
        inner=lambda w, lam, batch: inner(w, lam, features(lam, batch)),
        outer=lambda w, lam, batch: outer(w, lam, features(lam, batch)),
        init=problem.init,
    )
    labels = torch.tensor([[0, 1, 2, 1], [2, 0, 1, 0]])
    task = Task((normal(2, 4, 3), labels), (normal(2, 4, 3), labels.flip(0)))
    places: dict[str, frozenset[Part]] = {"map": PLACES["shift"], "weights": frozenset({"the outer objective"})}
    return Example("classifiers", problem, lam, task, enters=places, written=written)


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
