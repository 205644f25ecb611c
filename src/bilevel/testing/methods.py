"""The battery for methods."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bilevel import trees
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.dynamics.heavy_ball import HeavyBall
from bilevel.engine.checks import check_process
from bilevel.engine.method import EVERYTHING
from bilevel.engine.samplers import same
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.hypergradients import hypergradient
from bilevel.methods import Hypergradient, Method
from bilevel.methods.reverse import Reverse
from bilevel.methods.unrolled import Unrolled
from bilevel.problem import Task
from bilevel.testing.differences import agree
from bilevel.testing.references import (
    DIFFERENCES,
    EXACT,
    LIMIT,
    SINGLE,
    STEPS,
    BatteryCase,
    along,
    at_rest,
    battery_cases,
    exact_gradient,
    slopes,
)
from bilevel.trees import Tree


def check_method(
    method: Method,
    *,
    tolerance: float | None = None,
    among: Sequence[BatteryCase] | None = None,
    further: bool = True,
) -> None:
    """Run a method on every example with every dynamics; raise an `AssertionError` that says what is wrong.

    The requirement depends on what the class declares. In the parts of λ that it `sees`

    - an `exact` method equals another exact method to 1e-10, and central differences to 1e-6;
    - a method that is not exact, but sees every place where λ can enter, equals ∇f_T to `tolerance`;
    - a method that sees the outer objective alone equals ∇_λ E(w_T, λ) with w_T held fixed, to 1e-10;
    - any other (implicit, truncated) equals ∇f_T to `tolerance` where w has converged.

    A method may refuse a case with a `BilevelError`: in `check` always, and while it runs unless the case is
    gradient descent or heavy ball on a quadratic problem. It may not refuse all cases. Besides, a list of tasks gives
    the mean, `encode` runs once, no argument is changed, two calls agree, and a leaf of λ that reaches neither
    objective is refused, or with `allow_unused=True` has gradient exactly 0. A method without derivatives of the outer
    objective may run `encode` more often.

    Args:
        tolerance: the relative error allowed for a method that is not exact, by default the one that its class
            declares; pass an instance that reaches it (by its k, its number of terms, its width of differences).
        among: some of `bilevel.testing.battery_cases()`, for a method that is slow, for example because it compiles.
        further: also check lists of tasks, `encode` and unused leaves of λ, on the first cases that the method answers.
    """
    tolerance = method.tolerance if tolerance is None else tolerance
    tried = battery_cases() if among is None else among
    answered: list[BatteryCase] = []
    refusals: list[BilevelError] = []
    for case in tried:
        for visible, steps in _cases_to_check(method, case, tolerance):
            answer = _answer(method, visible, steps)
            if isinstance(answer, BilevelError):
                refusals.append(answer)
                continue
            _check_answer(method, visible, steps, answer, tolerance)
            answered.append(visible)
    assert answered, f"{method} answered none of {len(tried)} pairs of an example and a dynamics. " + (
        f"Its last refusal: {refusals[-1]}" if refusals else "It sees no part of λ in any of them."
    )
    if further:
        allowed = EXACT if method.exact else tolerance
        _check_calls(method, answered[0], allowed)
        _check_encode(method, answered, allowed)
        _check_unused(method, answered[0])


def _cases_to_check(method: Method, case: BatteryCase, tolerance: float) -> Iterator[tuple[BatteryCase, int]]:
    """The case restricted to the parts of λ that the method sees, with a number of steps for which the right gradient
    is known."""
    for steps in (STEPS, LIMIT):
        seen = method.sees(case.process(steps))
        visible = case.visible(seen)
        anywhere = method.exact or seen in (EVERYTHING, {"the outer objective"})
        if visible is not None and anywhere == (steps == STEPS) and (anywhere or at_rest(case, tolerance)):
            yield visible, steps


def _answer(method: Method, case: BatteryCase, steps: int) -> Hypergradient | BilevelError:
    """The hypergradient, or the refusal if the method was allowed to refuse."""
    (problem, lam, task), settings = case.arguments(steps)
    # Copies, so that a method that changes its arguments does not change the examples of others.
    given = trees.clone((lam, task))
    try:
        check_process(case.process(steps), method)
    except BilevelError as refusal:
        return refusal
    try:
        with warnings.catch_warnings():
            # A method may warn about its accuracy; the comparison below decides.
            warnings.simplefilter("ignore", BilevelWarning)
            result = hypergradient(problem, *given, method=method, **settings)
    except BilevelError as refusal:
        if case.example.quadratic and isinstance(case.dynamics, (GradientDescent, HeavyBall)):
            raise AssertionError(
                f"{method} accepted {case} and refused it while it ran. On a quadratic problem that is known "
                f"before it runs: let `check` or `sees` declare what the method cannot do. The refusal: {refusal}"
            ) from refusal
        return refusal
    assert same(given, (lam, task)), f"{method} with {case} changed λ or the data"
    return result


def _check_answer(method: Method, case: BatteryCase, steps: int, result: Hypergradient, tolerance: float) -> None:
    example = case.example
    assert result.value.ndim == 0 and not result.value.requires_grad, f"{method} must return a plain scalar value"
    kinds = [[leaf.dtype for leaf in trees.leaves(tree)] for tree in (result.grad, example.lam)]
    assert kinds[0] == kinds[1], f"{method} with {case} returned a gradient of another structure or dtype than λ"
    allowed = max(EXACT if method.exact else tolerance, method.single_tolerance if example.single else 0.0)
    if method.sees(case.process(steps)) == {"the outer objective"}:
        what = f"{method} sees the outer objective alone, but with {case} it is not ∇_λ E(w_T, λ) at a fixed w_T"
        agree(result.grad, _partial(case, result.inner), SINGLE if example.single else EXACT, what)
        return
    other = Reverse() if type(method) is Unrolled else Unrolled()
    claim = "exact" if method.exact else "close to ∇f_T" if steps == STEPS else "right where w has converged"
    what = f"{method} should be {claim}, but with {case} it differs from {other}"
    agree(result.grad, exact_gradient(case, steps, other), allowed, what)
    if steps == STEPS and isinstance(case.dynamics, HeavyBall):
        what = f"{method} with {case} differs from central differences"
        agree(along(result.grad), slopes(case, steps), max(DIFFERENCES, allowed), what)


def _partial(case: BatteryCase, w: Tree) -> Tree:
    """∇_λ E(w, λ) for a w that is held fixed."""
    problem, values, spec = case.example.problem, *trees.flatten(case.example.lam)
    leaves = [value.detach().requires_grad_() for value in values]
    lam = spec.unflatten(leaves)
    task = case.example.task if problem.encode is None else problem.encode(lam, case.example.task)
    return spec.unflatten(torch.autograd.grad(problem.outer(w, lam, task.val), leaves))


def _check_calls(method: Method, case: BatteryCase, allowed: float) -> None:
    """Two calls agree, and a list of tasks gives the mean."""
    (problem, lam, task), settings = case.arguments(STEPS)
    changed = trees.map(lambda leaf: leaf * 1.5 if leaf.is_floating_point() else leaf, task.val)
    other = Task(task.train, changed)
    one, again, two = (hypergradient(problem, lam, t, method=method, **settings) for t in (task, task, other))
    agree(again.grad, one.grad, allowed, f"{method} gives two gradients in two calls with the same arguments")
    both = hypergradient(problem, lam, [task, other], method=method, **settings)
    mean = trees.map(lambda a, b: (a + b) / 2, one.grad, two.grad)
    agree(both.grad, mean, allowed, f"{method}: the gradient of a list of tasks is not the mean of their gradients")
    agree(
        both.value,
        (one.value + two.value) / 2,
        allowed,
        f"{method}: the value of a list of tasks is not their mean",
        "f_T",
    )
    assert len(both.inner) == 2, f"{method}: a list of tasks must give a list of w_T"


def _check_encode(method: Method, answered: Sequence[BatteryCase], allowed: float) -> None:
    """A problem with `encode` equals the same problem with the encoding written into the objectives, and encodes
    once."""
    case = next((case for case in answered if case.example.problem.encode is not None), None)
    if case is None:
        return
    (base, lam, task), settings = case.arguments(STEPS)
    calls = 0

    def encode(lam: Tree, task: Task) -> Task:
        nonlocal calls
        calls += 1
        return base.encode(lam, task)

    # The comparison with differences, at the first call with a problem, calls encode too.
    problem = dataclasses.replace(base, encode=encode, check_derivatives=False)
    found = hypergradient(problem, lam, task, method=method, **settings).grad
    assert calls == 1 or not method.outer_derivatives, f"{method} called encode {calls} times instead of once"
    written: Any = case.example.without_encode
    # Without encode, the inner objective no longer has the structure that such a method is written for.
    other = method if method.structure is None else Unrolled()
    expected = hypergradient(written, lam, task, method=other, **settings).grad
    agree(found, expected, allowed, f"{method}: a problem with encode differs from the same problem without")


def _check_unused(method: Method, case: BatteryCase) -> None:
    (problem, lam, task), settings = case.arguments(STEPS)
    lam = {**lam, "unused": torch.ones(2, dtype=torch.float64)}
    try:
        hypergradient(problem, lam, task, method=method, **settings)
    except BilevelError as error:
        assert "unused" in str(error), f"{method} does not name the unused leaf: {error}"
    else:
        raise AssertionError(f"{method} does not refuse a leaf of λ that reaches neither objective")
    grad = hypergradient(problem, lam, task, method=method, allow_unused=True, **settings).grad
    assert float(grad["unused"].abs().max()) == 0, f"{method} gives an unused leaf a gradient that is not exactly zero"
