"""Small problems that carry what the batteries need: trees on both levels, λ in every place, curvature in [0.5, 4]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel import trees
from bilevel.problem import Problem, Task
from bilevel.tasks.minibatches import Minibatches
from bilevel.trees import Tree


@dataclass(frozen=True)
class Example:
    """A problem with a λ, a task and what is known about it."""

    name: str
    problem: Problem
    lam: Tree
    task: Task
    quadratic: bool


def examples() -> list[Example]:
    """A quadratic, a smooth non-quadratic problem, and the latter on minibatches."""
    data, val, lam = _data()
    smooth = Problem(inner=_smooth_inner, outer=_outer, init=_init)
    return [
        Example("quadratic", Problem(inner=_quadratic_inner, outer=_outer, init=_init), lam, Task(data, val), True),
        Example("smooth", smooth, lam, Task(data, val), False),
        Example("minibatches", smooth, lam, Task(Minibatches(data, size=5, seed=3), val), False),
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


def _data() -> tuple[Tree, Tree, Tree]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

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


def _outer(w: Tree, lam: Tree, batch: Tree) -> Tensor:
    x, y = batch
    return ((x @ _vector(w) - y) ** 2).mean() + 0.1 * lam["shift"] ** 2
