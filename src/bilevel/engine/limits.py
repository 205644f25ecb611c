"""The limits of a dynamics: whether they are the points where the gradient of the inner objective is zero.

The test runs the step at w on losses ½‖x − w‖² + ⟨slope, x⟩, whose gradient at w is a chosen slope. The user's
objective is not called, so a trial costs little. If the slope is zero, the step must not change w: a weight decay, a
shrinkage or a projection would change it. And the step must respond to every slope: with a bound, a simplex or a frozen
weight it ignores some, and then w converges to a point where the gradient is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics.base import EquationLoss
from bilevel.engine.process import Bound, Process
from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import random_directions
from bilevel.trees import Tree

# A weight counts as fixed if it moves less than this fraction of what the fastest weight moves.
FIXED_BELOW = 1e-4


def objective_at_rest(bound: Bound, t: int) -> Callable[[Tree], Tensor]:
    """L with the weight decay that the dynamics adds to its gradient: the function that the dynamics minimises."""
    loss, decay = bound.loss(t), bound.dynamics.slope_decay(t)
    if not decay:
        return loss
    return lambda w: loss(w) + sum(decay / 2 * leaf.square().sum() for leaf in trees.leaves(w))


def reached_at_rest(bound: Bound, variables: list[Tensor], w: Tree, t: int) -> set[int]:
    """The indices of the variables that a step depends on where the gradient of the loss is zero: those that matter at
    a fixed point."""
    # Near w and not at w: if w_0 is zero, factors of w have no effect.
    noise = random_directions(1, trees.to_vector(trees.leaves(w)), seed=6)[0]
    leaves, spec = trees.flatten(w)
    pairs = zip(trees.detach(leaves), trees.from_vector(noise, leaves), strict=True)
    near = [x + 0.01 * (1 + x.abs()) * direction for x, direction in pairs]
    with torch.enable_grad():
        after = trees.leaves(_step(bound, spec.unflatten(near), [torch.zeros_like(x) for x in near], t))
    heads = [x for x in after if x.requires_grad]
    if not heads:
        return set()
    cotangents = trees.from_vector(random_directions(1, trees.to_vector(heads).detach(), seed=7)[0], heads)
    parts = torch.autograd.grad(heads, variables, cotangents, allow_unused=True, retain_graph=True)
    return {i for i, part in enumerate(parts) if part is not None and bool((part != 0).any())}


def calls_loss(bound: Bound, w: Tree) -> bool:
    """Whether a step calls the inner objective."""
    called: list[Tree] = []
    with torch.no_grad():
        _step(bound, w, [torch.zeros_like(x) for x in trees.leaves(w)], 1, called.append)
    return bool(called)


def refuse_other_limits(process: Process, w: Tree, slope: Tensor, method: str = "Implicit()") -> None:
    """Raise a `BilevelError` if the limit of w_T is not a point where the gradient, here `slope`, is zero."""
    bound, times = process.bound, process.times or range(1, 2)
    name, decay = type(bound.dynamics).__name__, bound.dynamics.slope_decay(times[-1])
    # The slope is in the most accurate dtype of the leaves of w, and as accurate as the least accurate one.
    epsilon = max(torch.finfo(leaf.dtype).eps for leaf in trees.leaves(w))
    size, slope_norm = float(trees.norm(w)), float(slope.norm())
    advice = (
        'Write Implicit(condition="fixed-point"), which differentiates w = Φ(w, λ), or Reverse(); or write what '
        "else the step does to w as a term of the inner objective, a weight decay as an L2 penalty."
    )
    # Three steps are tested, because a schedule may end or begin with steps of size zero.
    tested = (times[-1], times[len(times) // 2], times[0])
    for t in tested:
        drift = float(_displacement(bound, w, t, torch.zeros_like(slope)).norm())
        if drift > 100 * epsilon * size and not decay:
            raise BilevelError(
                f"{method} differentiates ∇L = 0, but {name} also moves w where ∇L = 0, by {drift / size:.1g}·‖w‖: "
                f"it has a weight decay, a shrinkage or a projection of its own, and another limit. {advice}"
            )
    ignored = 0.0
    if slope_norm > 1e3 * epsilon * abs(decay) * size:
        ignored = _ignored_fraction(process, w, slope, tested, 1e3 * epsilon * size)
    if ignored > 0.02:
        part = "it" if ignored > 0.99 else f"{ignored:.0%} of it"
        raise BilevelError(
            f"{method} differentiates ∇L = 0, but at w_T the slope has the norm {slope_norm:.2g}, and {name} does "
            f"not follow {part}: a projection, a mirror map or a frozen weight keeps w from where ∇L = 0. {advice}"
        )


def _ignored_fraction(process: Process, w: Tree, slope: Tensor, times: Sequence[int], rounding: float) -> float:
    """The fraction of the slope at w that the step ignores; 0 if w has converged and steps are as short as
    `rounding`."""
    signs = random_directions(3, slope, seed=8).sign() * (slope.norm() / slope.numel() ** 0.5)

    def responds(move: Callable[[Tensor], Tensor], least: float = rounding) -> bool:
        return any(float(move(row).norm()) > least for row in (signs[0], -signs[0]))

    for t in times:
        move = partial(_displacement, process.bound, w, t)
        if responds(move):
            return _ignored_part(move, slope, _gains(move, signs))
    # No slope changes w. If the same slopes change the start much more, w is at a corner of a set.
    with torch.no_grad():
        start = process.bound.start()[0]
    return float(any(responds(partial(_displacement, process.bound, start, t), 100 * rounding) for t in times))


def _gains(move: Callable[[Tensor], Tensor], signs: Tensor) -> Tensor:
    """How far each weight moves for a slope of one, from a few slopes with random signs."""
    gains = torch.stack([move(row).abs() / row.abs() for row in (*signs, *-signs)]).amax(0)
    # A weight that moves less counts as fixed, for example one that a multiplicative step has brought close to zero.
    return torch.where(gains > FIXED_BELOW * gains.amax(), gains, 0)


def _ignored_part(move: Callable[[Tensor], Tensor], slope: Tensor, gains: Tensor) -> float:
    """The fraction of a slope that the step ignores; 0 if it ignores none or if the test is not conclusive.

    The part of the slope that the step follows is subtracted, and the rest is tried again. For gradient descent nothing
    is left after the first trial; for a projection the part that is normal to the set is left.
    """
    if float(move(slope).norm()) < 1e-3 * float((gains * slope).norm()):
        return 1.0  # converged, up to weights that are too small to matter: mirror descent has some at a corner
    left, whole, before = slope, float(slope.norm()), math.inf
    for _ in range(30):
        followed = torch.where(gains > 0, -move(left) / gains, 0)
        size, rest = float(followed.norm()), float(left.norm())
        if not size > 1e-3 * whole:
            return rest / whole
        # If the length of a step does not depend on the slope, as for sign descent, there is nothing to subtract.
        if not rest > 0.01 * whole or size > 0.98 * before:
            break
        left, before = left - followed, size
    return 0.0


@torch.no_grad()
def _displacement(bound: Bound, w: Tree, t: int, slope: Tensor) -> Tensor:
    """How far a first step moves w if the gradient there is `slope`."""
    leaves = trees.leaves(w)
    after = trees.leaves(_step(bound, w, trees.from_vector(slope, leaves), t))
    return trees.to_vector(after) - trees.to_vector(leaves)


def _step(bound: Bound, w: Tree, slope: list[Tensor], t: int, called: Callable[[Tree], None] = lambda x: None) -> Tree:
    loss = trial_loss(w, slope, bound.dynamics.slope_decay(t), called)
    return bound.dynamics.step(loss, w, bound.dynamics.init(w), t)[0]


def trial_loss(
    w: Tree, slope: list[Tensor], decay: float = 0.0, called: Callable[[Tree], None] = lambda x: None
) -> EquationLoss:
    """½‖x − w‖² + ⟨slope − decay·w, x⟩, whose gradient at w is `slope` when a dynamics adds the decay to it."""
    leaves = trees.leaves(w)

    def loss(x: Tree) -> Tensor:
        called(x)
        rows = zip(trees.leaves(x), leaves, slope, strict=True)
        return torch.stack([((a - b).square() / 2 + (s - decay * b) * a).sum() for a, b, s in rows]).sum()

    def residual(x: Tree) -> Tree:
        return trees.map(lambda a, b, s: a - b + s, x, w, trees.flatten(w)[1].unflatten(slope))

    # ½‖x − w + slope‖² is the same loss up to a constant, for a dynamics that solves equations.
    return EquationLoss(loss, residual, lambda x: trees.subtract(x, residual(x)))
