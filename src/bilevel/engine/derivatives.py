"""An independent check of autograd: compare its derivatives with differences, once per problem and code path.

Every hypergradient is made of second derivatives of the inner objective and first derivatives of the outer one. An
operation may hide its second derivative (a custom `autograd.Function`, compiled code, `.detach()`), and torch then
differentiates the rest without an error. A difference of two gradients is not affected.

The check must not report a kink as an error. Derivatives are compared at a point that was moved at random, so that no
kink lies exactly there, with central differences of decreasing width. Agreement at one width is enough. A problem is
refused only if autograd disagrees at three points (two, if the functions fail at one), and at each of them two
differences agree with each other ten times better than with autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.engine.graphs import graph_nodes
from bilevel.engine.memory import kind_of
from bilevel.engine.process import Process, State
from bilevel.errors import BilevelError
from bilevel.trees import Tree

# Tensors are moved by this relative size, away from points that are symmetric or lie exactly on a kink.
PERTURBATION = 0.01
# Up to this number of leaves, each leaf of λ is tested by itself; beyond it, all together.
ONE_BY_ONE = 4
# Below 10³ times the rounding error of the two numbers, their difference is not used.
ROUNDING = 1e3
# Errors that a user's function may raise at another point or in another precision.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError)

Tensors = list[Tensor]
# The orders that hypergradients do not need.
HIGHER = {"inner": "third", "outer": "second"}


class InDouble(TorchFunctionMode):
    """Inside this mode, every operation computes in double precision: constants that a function reads from a closure
    (the frozen weights and the buffers of a module) are converted, and casts to another precision have no effect."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func in (Tensor.float, Tensor.half, Tensor.bfloat16) else func
        args, kwargs = trees.map(_doubled, (args, kwargs or {}))
        return func(*args, **kwargs)


def _doubled(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value.double() if trees.is_variable(value) and value.dtype != torch.float64 else value


@contextmanager
def in_double() -> Iterator[None]:
    """The context in which functions compute in double precision, whatever the caller's autocast is."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(InDouble())
        yield


@dataclass(frozen=True)
class Precision:
    """How differences are computed: the dtype (None keeps the user's), the widths, the tolerance, and the context."""

    dtype: torch.dtype | None
    widths: tuple[float, ...]
    tolerance: float
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


DOUBLE = Precision(torch.float64, (1e-4, 1e-6, 1e-8), 1e-4)
# For functions that mix double precision with another.
ALL_DOUBLE = Precision(torch.float64, DOUBLE.widths, DOUBLE.tolerance, in_double)
# For functions that do not work in double precision.
SINGLE = Precision(None, (1e-1, 3e-2, 1e-2), 5e-2)


class Noise:
    """Normal numbers like a tensor. torch's own cannot be drawn inside `vmap`."""

    def __init__(self, seed: int) -> None:
        self.source = np.random.default_rng(seed)

    def __call__(self, like: Tensor) -> Tensor:
        return torch.as_tensor(self.source.standard_normal(tuple(like.shape)), device="cpu").to(like)


@dataclass(frozen=True)
class Point:
    """Where derivatives are compared: values and directions for the leaves of w and the variables; weights u like w."""

    tensors: Tensors
    directions: Tensors
    u: Tensors

    def moved(self, group: range, step: float) -> Tensors:
        return [x + step * self.directions[i] if i in group else x for i, x in enumerate(self.tensors)]


@dataclass(frozen=True)
class Disagreement:
    """A derivative for which autograd and differences disagree."""

    group: str
    by_autograd: float
    found: float


class Objectives:
    """∇_w L of step t, the first one by default, and E, as functions of the leaves of w and the variables."""

    def __init__(self, process: Process, w: Tree, t: int | None = None) -> None:
        self.process, (leaves, self.spec) = process, trees.flatten(w)
        self.count = len(leaves)
        self.t = process.times.start if t is None else t

    def loss(self, tensors: Tensors) -> Tensor:
        bound = self.process.bind(tensors[self.count :])
        batch = cast(bound.batch(self.t), tensors[0].dtype)
        with bound.user_context():
            return bound.inner(self.spec.unflatten(tensors[: self.count]), bound.lam, batch)

    def slope(self, tensors: Tensors) -> Tensors:
        w, variables = tensors[: self.count], tensors[self.count :]
        return gradient(lambda w: self.loss([*w, *variables]), w)

    def value(self, tensors: Tensors) -> Tensors:
        bound = self.process.bind(tensors[self.count :])
        val = cast(bound.task.val, tensors[0].dtype)
        with bound.user_context():
            return [bound.outer_objective(self.spec.unflatten(tensors[: self.count]), bound.lam, val)]

    def groups(self) -> dict[str, range]:
        """The tensors that are moved together: w; the leaves of λ, one by one if they are few; the encoded data."""
        lam, end = self.count + self.process.outer_count, self.count + len(self.process.variables)
        groups = {"w": range(self.count)}
        if self.process.outer_count <= ONE_BY_ONE:
            paths = trees.paths(self.process.lam)
            groups |= {f"λ{path}": range(self.count + i, self.count + i + 1) for i, path in enumerate(paths)}
        else:
            groups["λ"] = range(self.count, lam)
        return groups | ({"the encoded data": range(lam, end)} if end > lam else {})


def check_derivatives(process: Process, state: State, after: State, second: bool) -> None:
    """Refuse a problem whose derivatives differ from those of autograd.

    It costs a recorded gradient of the inner objective, two gradients for w and for each of up to four leaves of λ, and
    as many values of the outer objective. If a derivative disagrees, it costs up to nine times as much. The inner
    objective is compared once for each kind of batch that is found.

    Args:
        process: what will be differentiated.
        state, after: its start, and the state after one step; derivatives are compared between the two.
        second: whether the method differentiates gradients of the inner objective.
    """
    objectives = Objectives(process, state[0])
    ends = trees.leaves(state[0]), trees.leaves(trees.detach(after[0]))
    if second:
        for t in steps_with_other_batches(process):
            at = Objectives(process, state[0], t)
            compare_with_differences("inner", "second", at.slope, at.loss, at, ends)
    value = objectives.value
    compare_with_differences("outer", "first", value, lambda tensors: value(tensors)[0], objectives, ends)


def steps_with_other_batches(process: Process) -> list[int]:
    """The first step, and of a few later steps those whose batches are of another kind: `inner` may run other code.

    Numbers in a batch, such as t itself, do not make another kind.
    """
    times = process.times or range(process.times.start, process.times.start + 1)
    if not callable(process.bound.task.train):
        return [times[0]]
    steps: dict[Any, int] = {}
    for t in sorted({*times[:3], times[len(times) // 2], times[-1]}):
        batch = process.bound.batch(t)
        steps.setdefault(kind_of(trees.map(lambda leaf: type(leaf) if type(leaf) in (int, float) else leaf, batch)), t)
    return list(steps.values())


# What is differentiated, and the differences of what it is compared with, by objective and order.
WORDS = {
    ("inner", "second"): ("its gradient in w", "gradients"),
    ("outer", "first"): ("it", "values"),
    ("inner", "third"): ("products with its Hessian", "products"),
    ("outer", "second"): ("its gradient", "gradients"),
}


def compare_with_differences(
    name: str,
    order: str,
    function: Callable[[Tensors], Tensors],
    scalar: Callable[[Tensors], Tensor],
    objectives: Objectives,
    ends: tuple[Tensors, Tensors],
) -> None:
    """Refuse an objective if the derivatives of `function`, which is computed from `scalar`, differ from differences.

    `order` is the order of these derivatives as derivatives of the objective.
    """
    what, of = WORDS[name, order]
    where = f" on the batch of step {objectives.t}" if objectives.t > objectives.process.times.start else ""
    first_order = ", or use FirstOrder(), which takes first derivatives only." if order == "second" else "."
    try:
        disagreement = find_disagreement(objectives, function, scalar, ends)
    except Undefined as error:
        raise BilevelError(
            f"{name} has no {order} derivative, and {'Hessians of f_T' if order == HIGHER[name] else 'hypergradients'} "
            f"are made of them. torch says: {str(error).rstrip('.')}. Write that operation of {name} in terms of others"
            f"{first_order if name == 'inner' else '.'}"
        ) from error
    if disagreement is not None:
        raise BilevelError(
            f"The derivatives of {name}{where} are not what autograd says: the derivative of {what} with respect to "
            f"{disagreement.group}, along a random direction, is {disagreement.by_autograd:.6g} by autograd and "
            f"{disagreement.found:.6g} by differences of {of}. "
            f"{'Second derivatives of f_T' if order == HIGHER[name] else 'Hypergradients'} would be wrong. Something "
            f"in {name} hides a derivative: a custom autograd.Function with once_differentiable or an incomplete "
            "backward; .detach(), .data or torch.no_grad() around what depends on w or λ; rounding or a "
            "straight-through estimator. Write it in differentiable operations. If you mean it, pass "
            "check_derivatives=False to Problem or tune."
        )


def find_disagreement(
    objectives: Objectives,
    function: Callable[[Tensors], Tensors],
    scalar: Callable[[Tensors], Tensor],
    ends: tuple[Tensors, Tensors],
) -> Disagreement | None:
    """A derivative of `function`, which is computed from `scalar`, that differences contradict; or None."""
    precision = _precision(scalar, [*ends[0], *objectives.process.variables])
    if precision is None:
        return None
    disagreeing, disagreement, computed = objectives.groups(), None, 0
    for point in points(objectives.process, ends, precision.dtype):
        try:
            with precision.context():
                derivatives, size = _by_autograd(function, point)
                found = {
                    name: _compare(name, sum(derivatives[i] for i in group), size, function, point, group, precision)
                    for name, group in disagreeing.items()
                }
        except FAILURES:
            continue  # the function may be undefined there, for example at a negative λ
        computed += 1
        disagreeing = {name: group for name, group in disagreeing.items() if found[name] is not None}
        if not disagreeing:
            return None
        disagreement = next(item for item in found.values() if item is not None)
    if computed < 2:
        return None
    # Differences in single precision are so wide that they cross many kinks of a large network. So in single precision
    # only custom Python functions can be refused.
    return disagreement if precision is not SINGLE or _has_python_node(scalar, objectives, ends[0]) else None


def _compare(
    name: str,
    by_autograd: float,
    size: float,
    function: Callable[[Tensors], Tensors],
    point: Point,
    group: range,
    precision: Precision,
) -> Disagreement | None:
    """Compare with central differences of falling width; None if one agrees, or if no two of them agree."""
    before, result = math.nan, None
    rounding = ROUNDING * max(torch.finfo(x.dtype).eps for x in point.tensors) * size
    for width in precision.widths:
        with torch.no_grad():
            above, below = (function(point.moved(group, step)) for step in (width, -width))
        found = _weighted([a - b for a, b in zip(above, below, strict=True)], point) / (2 * width)
        gap = abs(by_autograd - found)
        if not gap > precision.tolerance * max(abs(by_autograd), abs(found)):
            return None  # also if a number is not finite
        if gap > rounding / width:
            if abs(found - before) <= 0.1 * gap:
                result = Disagreement(name, by_autograd, found)
            before = found
    return result


class Undefined(Exception):
    """torch has no formula for a derivative."""


def _by_autograd(function: Callable[[Tensors], Tensors], point: Point) -> tuple[list[float], float]:
    """The derivative of Σ ⟨u, outputs⟩ along the direction of each tensor according to autograd, and the size of the
    sum's terms."""
    live = [x.detach().requires_grad_() for x in point.tensors]
    with torch.enable_grad():
        outputs = function(live)
    factors = weights(outputs, point)
    size = sum(float((u * out.detach()).abs().sum()) for u, out in zip(factors, outputs, strict=True))
    pairs = [(out, u) for out, u in zip(outputs, factors, strict=True) if out.requires_grad]
    if not pairs:
        return [0.0] * len(live), size
    heads, cotangents = zip(*pairs, strict=True)
    try:
        parts = torch.autograd.grad(heads, live, cotangents, allow_unused=True)
    except RuntimeError as error:
        raise Undefined(str(error)) from error
    return [
        0.0 if part is None else float((part * d).sum()) for part, d in zip(parts, point.directions, strict=True)
    ], size


def weights(outputs: Tensors, point: Point) -> Tensors:
    """The weights of the sum: u for a gradient, 1 for a value, others for anything else."""
    if len(outputs) == len(point.u) and all(out.shape == u.shape for out, u in zip(outputs, point.u, strict=True)):
        return point.u
    noise = Noise(1)
    return [torch.ones_like(out) if out.ndim == 0 else noise(out) for out in outputs]


def _weighted(outputs: Tensors, point: Point) -> float:
    return sum(float((u * out).sum()) for u, out in zip(weights(outputs, point), outputs, strict=True))


def points(process: Process, ends: tuple[Tensors, Tensors], dtype: torch.dtype | None) -> Iterator[Point]:
    """Two points near the segment from w_0 to w_1, with random directions; then one on the segment, with w and λ
    themselves as directions, which keep symmetric matrices symmetric."""
    noise = Noise(0)
    start, end, variables = ([x.detach().to(dtype or x.dtype) for x in part] for part in (*ends, process.variables))
    moves = [b - a for a, b in zip(start, end, strict=True)]
    if not trees.all_finite(moves):
        moves = [torch.zeros_like(move) for move in moves]
    for share, sign in ((0.25, 1.0), (0.75, -1.0), (0.5, 0.0)):
        w = [a + share * move for a, move in zip(start, moves, strict=True)]
        sizes = [max(_rms(x), _rms(move)) for x, move in zip(w, moves, strict=True)]
        sizes = [size or max(sizes) or 1.0 for size in sizes] + [_rms(x) or 1.0 for x in variables]
        tensors, directions = [], []
        for x, own, size in zip((*w, *variables), (*moves, *variables), sizes, strict=True):
            if not sign and _rms(own):
                tensors.append(x + PERTURBATION * own)
                directions.append(own)
                continue
            # Values are multiplied, so that positive numbers stay positive. Zeros become positive at one point and
            # negative at the other.
            up = (sign or 1.0) * PERTURBATION * size * noise(x).abs()
            tensors.append(torch.where(x == 0, up, x * (1 + PERTURBATION * noise(x).clamp(-3, 3))))
            directions.append(size * noise(x))
        yield Point(tensors, directions, [size * noise(x) for size, x in zip(sizes, w, strict=False)])


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def cast(batch: Tree, dtype: torch.dtype) -> Tree:
    return trees.map(lambda leaf: leaf.to(dtype) if trees.is_variable(leaf) else leaf, batch)


def _precision(scalar: Callable[[Tensors], Tensor], tensors: Tensors) -> Precision | None:
    """Double precision if the function can be computed in it, whatever the precision of its arguments; None if
    differences would be too inaccurate."""
    live = [x.detach().double().requires_grad_() for x in tensors]
    for precision in (DOUBLE, ALL_DOUBLE):
        try:
            with torch.enable_grad(), precision.context():
                value = scalar(live)
        except FAILURES:
            continue
        # A cast inside the function, for example by autocast, rounds: the function is piecewise constant.
        if value.dtype == torch.float64 and not any(node.name() == "ToCopyBackward0" for node in graph_nodes([value])):
            return precision
    return SINGLE if {x.dtype for x in tensors} <= {torch.float32, torch.float64} else None


def _has_python_node(scalar: Callable[[Tensors], Tensor], objectives: Objectives, w: Tensors) -> bool:
    """Whether a custom `autograd.Function`, or compiled code, takes part."""
    live = [x.detach().requires_grad_() for x in (*w, *objectives.process.variables)]
    with torch.enable_grad():
        nodes = graph_nodes([scalar(live)])
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)
