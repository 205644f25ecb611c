"""The battery for algorithms of the outer problem."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.algorithms import Algorithm, OuterProblem
from bilevel.algorithms.single_loop import SingleLoop
from bilevel.constraints.box import Box
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.method import Hypergradient, Stats
from bilevel.errors import Outcome
from bilevel.hyperiterations import LoopEnded
from bilevel.outer_loop import Iteration, Solution, solve
from bilevel.problem import Problem, Task
from bilevel.testing.single_loop import check_single_loop
from bilevel.trees import Tree

MINIMISER = (1.0, 5.0, -4.0)
WEIGHTS = (1.0, 3.0, 0.5)


def check_algorithm(algorithm: Algorithm) -> None:
    """Check that an algorithm minimises a quadratic, free and in a box; raise an `AssertionError` that says what is
    wrong.

    Within 400 hyperiterations it comes within 1e-4 of the known minimiser. With a box, every λ that it evaluates lies
    in the box. It stops when the loop ends, after the last hyperiteration or by a callback. The user's λ is not
    changed. An algorithm that `resumes` continues from a saved state with the same numbers. An algorithm that takes
    inner steps of its own is checked by `check_single_loop` instead.
    """
    if isinstance(algorithm, SingleLoop):
        check_single_loop(algorithm)
        return
    lam = {"a": torch.tensor([0.5], dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    for low, high in ((-9, 9), (-3, 3)):
        begin, seen = trees.clone(lam), list[Iteration]()
        free = high == 9
        found = _solve(algorithm, begin, constraint=None if free else Box(low, high), callbacks=[seen.append])
        where = "a quadratic" if free else f"a quadratic in the box from {low} to {high}"
        expected = _vector(lam).new_tensor(MINIMISER).clamp(low, high)
        distance = float((_vector(found.outer) - expected).abs().max())
        assert distance < 1e-4, f"{algorithm} did not minimise {where}: λ is {distance:.3g} away. {found.outcome}"
        outside = max(float((_vector(here.lam).abs() - high).max()) for here in seen)
        assert free or outside <= 0, f"{algorithm} evaluated a λ outside of the constraint, by {outside:.3g}"
        assert torch.equal(_vector(begin), _vector(lam)), f"{algorithm} changed the λ that it was given"
    for count, stopped in ((3, {"iterations": 3}), (3, {"callbacks": [lambda here: here.k == 2]})):
        done = len(_solve(algorithm, lam, **stopped).history["value"])
        assert done == count, f"{algorithm} went on after the loop ended: {done} hyperiterations instead of {count}"
    if algorithm.resumes:
        whole, states = _evaluated(algorithm, lam, None, 6)
        resumed, _ = _evaluated(algorithm, lam, states[3], 3)
        assert all(map(torch.equal, whole[3:], resumed)), f"{algorithm} resumed from a saved state with other numbers"


def _evaluated(algorithm: Algorithm, lam: Tree, saved: Tree | None, count: int) -> tuple[list[Tensor], list[Tree]]:
    """The first `count` points that the algorithm evaluates, from a saved state if there is one, and its states."""
    points, states, kept = list[Tensor](), list[Tree](), list[Callable[[], Tree]]()

    def hyperiteration(lam: Tree) -> Hypergradient:
        if len(points) == count:
            raise LoopEnded(Outcome("finished", "Enough."))
        points.append(_vector(lam).clone())
        # Through bytes, as in a checkpoint.
        file = io.BytesIO()
        torch.save(kept[0](), file)
        file.seek(0)
        states.append(torch.load(file, weights_only=True))
        return evaluate(lam)

    def evaluate(lam: Tree) -> Hypergradient:
        leaves, spec = trees.flatten(lam)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        vector = trees.to_vector(leaves)
        value = (vector.new_tensor(WEIGHTS) * (vector - vector.new_tensor(MINIMISER)) ** 2).sum() / 2
        grad = spec.unflatten(torch.autograd.grad(value, leaves))
        return Hypergradient(value.detach(), grad, lam, Stats("known"))

    outer = OuterProblem(trees.clone(lam), None, hyperiteration, evaluate, saved, kept.append)
    with contextlib.suppress(LoopEnded):
        algorithm.minimise(outer)
    return points, states


def _solve(algorithm: Algorithm, lam: Tree, **settings: Any) -> Solution:
    """Minimise ½ Σ weight (λ − minimiser)², through an inner problem that sets w = λ in its one step."""

    def outer(w: Tree, lam: Tree, data: Any) -> Tensor:
        vector = _vector(w)
        return (vector.new_tensor(WEIGHTS) * (vector - vector.new_tensor(MINIMISER)) ** 2).sum() / 2

    problem = Problem(
        inner=lambda w, lam, data: sum(((w[key] - lam[key]) ** 2).sum() for key in w),
        outer=outer,
        init=lambda lam: trees.map(torch.zeros_like, lam),
    )
    settings = {"iterations": 400, "dynamics": GradientDescent(0.5), "steps": 1, **settings}
    return solve(problem, lam, Task(None, None), algorithm=algorithm, progress=False, **settings)


def _vector(lam: Tree) -> Tensor:
    return trees.to_vector(trees.leaves(lam))
