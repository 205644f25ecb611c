"""The user's preconditioner, an approximate inverse of the inner Hessian, as a map of vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import random_directions
from bilevel.problem import Task
from bilevel.trees import Tree

Inverse = Callable[[Tree], Tree]
Preconditioner = Callable[[Tree, Tree, Task], Inverse]


def inverse_at(preconditioner: Preconditioner, process: Process, w: Tree) -> Callable[[Tensor], Tensor]:
    """The map v ↦ roughly (∇²_w L)⁻¹ v that the preconditioner builds at w, on vectors instead of trees like w."""
    with torch.no_grad():
        inverse: Any = preconditioner(trees.detach(w), trees.detach(process.bound.lam), process.bound.task)
    if not callable(inverse):
        raise BilevelError(
            f"preconditioner(w, lam, task) returned a {type(inverse).__name__}, but it must return a function: "
            "v ↦ roughly H⁻¹ v, for v a tree like w. Write `return lambda v: …`."
        )
    points, spec = trees.flatten(w)
    names = trees.paths(w)

    def apply(vector: Tensor) -> Tensor:
        with torch.no_grad():
            parts, found = trees.flatten(inverse(spec.unflatten(trees.from_vector(vector, points))))
        if found != spec or not all(isinstance(part, Tensor) for part in parts):
            raise BilevelError(
                f"The preconditioner maps v to {trees.describe(found.unflatten(parts))}, but must map it to a tree "
                f"like w: {trees.describe(w)}."
            )
        for name, part, point in zip(names, parts, points, strict=True):
            if part.shape != point.shape:
                raise BilevelError(
                    f"The preconditioner maps v{name} to a tensor of shape {list(part.shape)}, but must keep the shape "
                    f"{list(point.shape)} that w{name} has."
                )
        return trees.to_vector(parts)

    _refuse_unless_symmetric(apply, trees.to_vector(points))
    return apply


def _refuse_unless_symmetric(apply: Callable[[Tensor], Tensor], like: Tensor) -> None:
    """Compare ⟨u, Mv⟩ with ⟨v, Mu⟩, with a tolerance that allows a factor computed in another precision."""
    u, v = random_directions(2, like, seed=1)
    mu, mv = apply(u), apply(v)
    left, right = float(torch.dot(u, mv)), float(torch.dot(v, mu))
    if abs(left - right) > 1e-3 * float(u.norm() * mv.norm() + v.norm() * mu.norm()):
        raise BilevelError(
            f"The preconditioner M is not symmetric: ⟨u, M v⟩ = {left:.6g} but ⟨v, M u⟩ = {right:.6g}, and conjugate "
            "gradients would not converge with it. Solve with a Cholesky factor on both sides (torch.cholesky_solve), "
            "or divide by a diagonal."
        )
