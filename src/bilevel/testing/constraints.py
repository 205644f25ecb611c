"""The battery for constraints."""

from __future__ import annotations

import itertools

import torch

from bilevel import trees
from bilevel.constraints import Constraint
from bilevel.engine.samplers import same
from bilevel.trees import Tree


def check_constraint(constraint: Constraint, like: Tree) -> None:
    """Check that `project` gives the nearest point of a convex set; raise an `AssertionError` that says what is wrong.

    A projected point is not moved again. ⟨x − Px, z − Px⟩ ≤ 0 for points z of the set, which characterises the nearest
    point. ⟨Px − Py, x − y⟩ ≥ ‖Px − Py‖², which only projections onto convex sets satisfy. Structure, shapes and dtypes
    are kept, also in float32; the argument is not changed; two calls agree.

    Args:
        like: a tree with the structure and shapes of λ.
    """
    generator = torch.Generator().manual_seed(11)

    def draw(scale: float) -> Tree:
        return trees.map(lambda leaf: scale * torch.randn(leaf.shape, generator=generator, dtype=torch.float64), like)

    points = [draw(scale) for scale in (0.1, 1.0, 3.0, 10.0) for _ in range(3)]
    pairs = [(x, _projected(constraint, x)) for x in points]
    for (x, px), (y, py) in itertools.product(pairs, pairs):
        rounding = 1e-10 * (1 + _length(x) * _length(y))
        away = float(trees.dot(trees.subtract(x, px), trees.subtract(py, px)))
        assert away <= rounding, (
            f"{constraint} does not return the nearest point: there is one in the direction of another point of the "
            f"set (⟨x − Px, Py − Px⟩ = {away:.3g} > 0)"
        )
        moved, apart = trees.subtract(px, py), trees.subtract(x, y)
        gain = float(trees.dot(moved, moved) - trees.dot(moved, apart))
        assert gain <= rounding, (
            f"{constraint} is not firmly nonexpansive, as projections onto convex sets are: ‖Px − Py‖² exceeds "
            f"⟨Px − Py, x − y⟩ by {gain:.3g}"
        )
    _projected(constraint, trees.map(torch.Tensor.float, points[4]))


def _projected(constraint: Constraint, x: Tree) -> Tree:
    """Px, after the checks that need one point only."""
    copy = trees.clone(x)
    px = constraint.project(x)
    assert same(x, copy), f"{constraint} changed its argument"
    assert same(px, constraint.project(x)), f"{constraint} projects the same point to two points"
    assert trees.flatten(px)[1] == trees.flatten(x)[1], f"{constraint} changed the structure of λ"
    for before, after in zip(trees.leaves(x), trees.leaves(px), strict=True):
        assert before.shape == after.shape, f"{constraint} changed a shape: {list(before.shape)} to {list(after.shape)}"
        assert before.dtype == after.dtype, f"{constraint} changed a dtype: {before.dtype} to {after.dtype}"
    rounding = 1e4 * max(torch.finfo(leaf.dtype).eps for leaf in trees.leaves(x)) * (1 + _length(x))
    assert _length(trees.subtract(constraint.project(px), px)) <= rounding, (
        f"{constraint} is not idempotent: it moves a point that it has projected"
    )
    return px


def _length(tree: Tree) -> float:
    return float(trees.norm(tree))
