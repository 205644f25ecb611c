"""The compiled path of `Spectral`, and the check that the compiled code is still that of the user's objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel.errors import BilevelError
from bilevel.methods.kernels import Kernel, build_once, compile_function, forget, key_orders
from bilevel.methods.process import Bound, Process
from bilevel.methods.spectral_gradients import Found, Start, differentiate
from bilevel.methods.spectral_proof import refuse_unless_quadratic
from bilevel.methods.spectral_quadratic import tolerance_of
from bilevel.methods.watch import Watch, is_plain


@dataclass(frozen=True)
class Code:
    """The whole derivative as a compiled function; `reached` says which variables it returns a gradient for, `live`
    whether it returns the cotangent of w_0, `watch` whether the objectives are still those that were compiled."""

    kernel: Kernel
    reached: list[bool]
    live: bool
    watch: Watch

    def current(self) -> bool:
        return self.watch.unchanged() and self.kernel.current()


def differentiate_compiled(process: Process, start: Start, axis: int | None) -> tuple[Found, Code]:
    """`differentiate` in one compiled function of λ, w_0, the settings and the data.

    Only the two objectives are compiled. What init and the dynamics make of λ is an input, computed at every call.
    Objectives may read numbers elsewhere, and these may change: where Python can tell that they have not, it is asked,
    and where it cannot, both objectives are evaluated and their values compared.
    """
    live = any(leaf.requires_grad for leaf in start.leaves)
    inputs = [*process.variables, *start.leaves, *start.settings, *process.data()]
    w = start.spec.unflatten(start.leaves)
    key = ("spectral", process.steps, axis, start.spec, key_orders(w), len(start.settings), live, start.learned)
    for _ in range(2):
        code = build_once(process, key, inputs, lambda: _compile(process, start, axis, live, inputs))
        if code.current():
            found, point, values = run_code(code, inputs, start)
            if code.watch.complete or all(map(_agree, values, _values(process.bound, start, point))):
                return found, code
        forget(process, key, inputs)
    raise BilevelError(
        "inner or outer gave another number than the code that was compiled from it a moment ago, so it is not a pure "
        "function of (w, λ, batch): dropout without a seed, or a counter. Make it one, or use Spectral() without "
        "`compiled`."
    )


def _compile(process: Process, start: Start, axis: int | None, live: bool, inputs: list[Tensor]) -> Code:
    refuse_unless_quadratic(process.bound.loss(1), start.spec.unflatten(start.leaves))
    count, size = len(process.variables), len(start.leaves)
    rest = count + size + len(start.settings)
    reached = [False] * count
    watch = Watch(process.problem.inner, process.problem.outer)
    task = process.bound.task
    watch.complete &= is_plain([process.lam, task.train, task.val, start.spec.unflatten(start.leaves)])

    def function(*flat: Tensor) -> list[Tensor]:
        variables = [x.detach().requires_grad_() for x in flat[:count]]
        settings = [x.detach().requires_grad_(start.learned) for x in flat[count + size : rest]]
        begin = Start([x.detach() for x in flat[count : count + size]], start.spec, settings)
        bound = process.bind(variables, flat[rest:])
        found = differentiate(bound, variables, begin, process.steps, axis)
        reached[:] = [g is not None for g in found.gradients]
        # Not at w_T itself, where an objective may be a difference of equal numbers.
        point = [] if watch.complete else [leaf + 1 for leaf in found.leaves]
        values = _values(bound, begin, point) if point else []
        parts = [g for g in (*found.gradients, *found.cotangents[0 if live else size :]) if g is not None]
        return [found.value, found.misfit, *found.leaves, *parts, *point, *values]

    return Code(compile_function(function, inputs, "Spectral() without `compiled`"), reached, live, watch)


def run_code(code: Code, inputs: list[Tensor], start: Start) -> tuple[Found, list[Tensor], list[Tensor]]:
    """What the code finds; where the objectives cannot be watched, also a point and their values there."""
    results = iter(code.kernel(*inputs))
    value, misfit = next(results), next(results)
    leaves = [next(results) for _ in start.leaves]
    gradients = [next(results) if reached else None for reached in code.reached]
    cotangents = [next(results) if code.live else None for _ in leaves]
    if start.learned:
        cotangents += [next(results) for _ in start.settings]
    point = [] if code.watch.complete else [next(results) for _ in leaves]
    return Found(value, leaves, misfit, gradients, cotangents), point, list(results)


@torch.no_grad()
def _values(bound: Bound, start: Start, point: list[Tensor]) -> list[Tensor]:
    w = start.spec.unflatten(point)
    return [bound.loss(1)(w), bound.outer((w, ()))]


def _agree(one: Tensor, two: Tensor) -> bool:
    a, b = float(one), float(two)
    return math.isclose(a, b, rel_tol=tolerance_of(one)) or (a != a and b != b)
