"""Where a dynamics comes to rest: whether its limits are the points where the slope of the inner objective is zero.

The step itself is asked. It is tried at w on losses whose slope at w is chosen, ½‖x − w‖² + ⟨slope, x⟩, so the user's
objective is not called and a trial costs little. With the slope zero w must stay: a weight decay, a shrinkage or a
projection would move it. And there must be no slope that the step ignores: a bound, a simplex or a frozen weight
ignores some, and then w rests where the slope is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import random_directions
from bilevel.methods.process import Bound, Process
from bilevel.trees import Tree

# The fastest weight moves as far in one step as a weight that counts as staying does in ten thousand.
STAYS = 1e-4


def objective_at_rest(bound: Bound, t: int) -> Callable[[Tree], Tensor]:
    """L, with the weight decay that the dynamics adds to its slope: what the dynamics minimises."""
    loss, decay = bound.loss(t), bound.dynamics.slope_decay(t)
    if not decay:
        return loss
    return lambda w: loss(w) + sum(decay / 2 * leaf.square().sum() for leaf in trees.leaves(w))


def reached_at_rest(bound: Bound, variables: list[Tensor], w: Tree, t: int) -> set[int]:
    """The indices of those variables that a step depends on where the loss has no slope: what of the dynamics is left
    at a fixed point."""
    # Near w and not at w: a start of zeros hides what is multiplied with it.
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
    """Whether a step looks at the inner objective at all."""
    called: list[Tree] = []
    with torch.no_grad():
        _step(bound, w, [torch.zeros_like(x) for x in trees.leaves(w)], 1, called.append)
    return bool(called)


def refuse_other_limits(process: Process, w: Tree, slope: Tensor) -> None:
    """Raise a `BilevelError` where w_T tends to other points than those where the slope, here `slope`, is zero."""
    bound, times = process.bound, process.times or range(1, 2)
    name, decay = type(bound.dynamics).__name__, bound.dynamics.slope_decay(times[-1])
    size, steep, epsilon = float(trees.norm(w)), float(slope.norm()), torch.finfo(slope.dtype).eps
    advice = (
        'Write Implicit(condition="fixed-point"), which differentiates w = Φ(w, λ), or Reverse(); or move what else '
        "the step does to w into the inner objective, a weight decay as an L2 term."
    )
    # A schedule may end, or begin, with steps of size zero.
    asked = (times[-1], times[len(times) // 2], times[0])
    for t in asked:
        drift = float(_moved(bound, w, t, torch.zeros_like(slope)).norm())
        if drift > 100 * epsilon * size and not decay:
            raise BilevelError(
                f"Implicit() differentiates ∇L = 0, but {name} moves w also where ∇L = 0, by {drift / size:.1g} of its "
                f"size: by a weight decay, a shrinkage or a projection of its own. It comes to rest elsewhere. {advice}"
            )
    ignored = 0.0
    if steep > 1e3 * epsilon * abs(decay) * size:
        ignored = _ignored_share(process, w, slope, asked, 1e3 * epsilon * size)
    if ignored > 0.02:
        part = "it" if ignored > 0.99 else f"{ignored:.0%} of it"
        raise BilevelError(
            f"Implicit() differentiates ∇L = 0, but at w_T the slope has the norm {steep:.2g}, and {name} does not "
            f"follow {part}: a projection, a mirror map or a frozen weight keeps w from where ∇L = 0. {advice}"
        )


def _ignored_share(process: Process, w: Tree, slope: Tensor, times: Sequence[int], rounding: float) -> float:
    """Which share of the slope at w the step ignores; 0 where w has converged and steps are as short as `rounding`."""
    signs = random_directions(3, slope, seed=8).sign() * (slope.norm() / slope.numel() ** 0.5)

    def responds(move: Callable[[Tensor], Tensor], least: float = rounding) -> bool:
        return any(float(move(row).norm()) > least for row in (signs[0], -signs[0]))

    for t in times:
        move = partial(_moved, process.bound, w, t)
        if responds(move):
            return _ignored_part(move, slope, _gains(move, signs))
    # Nothing moves w, whatever the slope. If such a slope moves the start by much more, w has come to a corner.
    with torch.no_grad():
        start = process.bound.start()[0]
    return float(any(responds(partial(_moved, process.bound, start, t), 100 * rounding) for t in times))


def _gains(move: Callable[[Tensor], Tensor], signs: Tensor) -> Tensor:
    """How far each weight moves for a slope of one, from a few slopes with random signs."""
    gains = torch.stack([move(row).abs() / row.abs() for row in (*signs, *-signs)]).amax(0)
    # A weight that moves this little stays: one that a multiplicative step has brought close to zero, say.
    return torch.where(gains > STAYS * gains.amax(), gains, 0)


def _ignored_part(move: Callable[[Tensor], Tensor], slope: Tensor, gains: Tensor) -> float:
    """The share of a slope that the step ignores, 0 if it ignores none or this cannot be told.

    What the step follows is taken off, and what is left tried again. For gradient descent nothing is left after the
    first time, and for a projection what is normal to the set.
    """
    if float(move(slope).norm()) < 1e-3 * float((gains * slope).norm()):
        return 1.0  # at rest, whatever weights too small to be seen do: mirror descent has some at a corner
    left, whole, before = slope, float(slope.norm()), math.inf
    for _ in range(30):
        followed = torch.where(gains > 0, -move(left) / gains, 0)
        size, rest = float(followed.norm()), float(left.norm())
        if not size > 1e-3 * whole:
            return rest / whole
        # A step that does not get shorter as the slope does, such as one along the signs, cannot be taken off.
        if not rest > 0.01 * whole or size > 0.98 * before:
            break
        left, before = left - followed, size
    return 0.0


@torch.no_grad()
def _moved(bound: Bound, w: Tree, t: int, slope: Tensor) -> Tensor:
    """How far a step without a history moves w if the slope there is this one."""
    leaves = trees.leaves(w)
    after = trees.leaves(_step(bound, w, trees.from_vector(slope, leaves), t))
    return trees.to_vector(after) - trees.to_vector(leaves)


def _step(bound: Bound, w: Tree, slope: list[Tensor], t: int, called: Callable[[Tree], None] = lambda x: None) -> Tree:
    leaves, decay = trees.leaves(w), bound.dynamics.slope_decay(t)

    def loss(x: Tree) -> Tensor:
        called(x)
        rows = zip(trees.leaves(x), leaves, slope, strict=True)
        return torch.stack([((a - b).square() / 2 + (s - decay * b) * a).sum() for a, b, s in rows]).sum()

    return bound.dynamics.step(loss, w, bound.dynamics.init(w), t)[0]
