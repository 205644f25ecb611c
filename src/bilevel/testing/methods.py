"""What every method must satisfy, ours and yours."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bilevel import trees
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.dynamics.heavy_ball import HeavyBall
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.hypergradients import hypergradient
from bilevel.methods import Hypergradient, Method
from bilevel.methods.base import EVERYTHING
from bilevel.methods.checks import check_process
from bilevel.methods.reverse import Reverse
from bilevel.methods.samplers import same
from bilevel.methods.unrolled import Unrolled
from bilevel.problem import Problem, Task
from bilevel.testing.differences import agree
from bilevel.testing.references import (
    DIFFERENCES,
    EXACT,
    LIMIT,
    SINGLE,
    STEPS,
    Pair,
    along,
    at_rest,
    exact_gradient,
    pairs,
    slopes,
)
from bilevel.trees import Tree


def check_method(method: Method, *, tolerance: float = DIFFERENCES, among: Sequence[Pair] | None = None) -> None:
    """Try a method on every example with every dynamics; raise an `AssertionError` that says what is wrong.

    What is asked of an answer follows from what the class declares. In the parts of λ that it `sees`

    - an `exact` method equals another exact method to 1e-10, and central differences to 1e-6;
    - a method that is not exact, but sees every place where λ can enter, equals ∇f_T to `tolerance`;
    - a method that sees the outer objective alone equals ∇_λ E(w_T, λ) with w_T held fixed, to 1e-10;
    - any other (implicit, truncated) equals ∇f_T to `tolerance` where w has come to rest.

    A method may refuse a pair with a `BilevelError`: in `check` or `look`, which is declaring it, or while it runs, as
    long as that is not gradient descent or heavy ball on a quadratic problem. It may not refuse all of them.
    Besides, a list of tasks gives the mean, `encode` runs once, no argument is changed, two calls agree, and a leaf of
    λ that reaches nothing is refused or gives exactly 0.

    Args:
        tolerance: what a method that is not exact is held to; pass an instance that comes so close (a k, a number of
            terms, a width of differences).
        among: some of `bilevel.testing.references()`, for a method that is slow to begin (one that compiles).
    """
    tried = pairs() if among is None else among
    answered: list[Pair] = []
    refusals: list[BilevelError] = []
    for pair in tried:
        for visible, steps in _claims(method, pair, tolerance):
            answer = _answer(method, visible, steps)
            if isinstance(answer, BilevelError):
                refusals.append(answer)
                continue
            _check_answer(method, visible, steps, answer, tolerance)
            answered.append(visible)
    assert answered, f"{method} answered none of {len(tried)} pairs of an example and a dynamics. " + (
        f"Its last refusal: {refusals[-1]}" if refusals else "It sees no part of λ in any of them."
    )
    if among is None:
        allowed = EXACT if method.exact else tolerance
        _check_calls(method, answered[0], allowed)
        _check_encode(method, answered, allowed)
        _check_unused(method, answered[0])


def _claims(method: Method, pair: Pair, tolerance: float) -> Iterator[tuple[Pair, int]]:
    """What a method can be asked about a pair: the parts of λ that it sees, and a number of steps at which they are
    known."""
    for steps in (STEPS, LIMIT):
        seen = method.sees(pair.process(steps))
        visible = pair.visible(seen)
        anywhere = method.exact or seen in (EVERYTHING, {"the outer objective"})
        if visible is not None and anywhere == (steps == STEPS) and (anywhere or at_rest(pair, tolerance)):
            yield visible, steps


def _answer(method: Method, pair: Pair, steps: int) -> Hypergradient | BilevelError:
    """The hypergradient, or the refusal if the method was free to refuse."""
    (problem, lam, task), settings = pair.arguments(steps)
    # Copies, so that a method that changes its arguments does not spoil the examples for others.
    given = trees.clone((lam, task))
    try:
        check_process(pair.process(steps), method)
    except BilevelError as refusal:
        return refusal
    try:
        with warnings.catch_warnings():
            # A method may doubt its answer; whether it is good enough is decided below.
            warnings.simplefilter("ignore", BilevelWarning)
            result = hypergradient(problem, *given, method=method, **settings)
    except BilevelError as refusal:
        if pair.example.quadratic and isinstance(pair.dynamics, (GradientDescent, HeavyBall)):
            raise AssertionError(
                f"{method} accepted {pair} and refused it while it ran. A quadratic problem holds no surprises: let "
                f"`check` or `sees` declare what the method cannot do. The refusal: {refusal}"
            ) from refusal
        return refusal
    assert same(given, (lam, task)), f"{method} with {pair} changed λ or the data"
    return result


def _check_answer(method: Method, pair: Pair, steps: int, result: Hypergradient, tolerance: float) -> None:
    example = pair.example
    assert result.value.ndim == 0 and not result.value.requires_grad, f"{method} must return a plain scalar value"
    kinds = [[leaf.dtype for leaf in trees.leaves(tree)] for tree in (result.grad, example.lam)]
    assert kinds[0] == kinds[1], f"{method} with {pair} returned a gradient of another structure or dtype than λ"
    allowed = max(EXACT if method.exact else tolerance, SINGLE if example.single else 0.0)
    if method.sees(pair.process(steps)) == {"the outer objective"}:
        what = f"{method} sees the outer objective alone, but with {pair} it is not ∇_λ E(w_T, λ) at a fixed w_T"
        agree(result.grad, _partial(pair, result.inner), SINGLE if example.single else EXACT, what)
        return
    other = Reverse() if type(method) is Unrolled else Unrolled()
    claim = "exact" if method.exact else "close to ∇f_T" if steps == STEPS else "right where w has come to rest"
    what = f"{method} should be {claim}, but with {pair} it differs from {other}"
    agree(result.grad, exact_gradient(pair, steps, other), allowed, what)
    if steps == STEPS and isinstance(pair.dynamics, HeavyBall):
        what = f"{method} with {pair} differs from central differences"
        agree(along(result.grad), slopes(pair, steps), max(DIFFERENCES, allowed), what)


def _partial(pair: Pair, w: Tree) -> Tree:
    """∇_λ E(w, λ) for a w that is held fixed."""
    problem, values, spec = pair.example.problem, *trees.flatten(pair.example.lam)
    leaves = [value.detach().requires_grad_() for value in values]
    lam = spec.unflatten(leaves)
    task = pair.example.task if problem.encode is None else problem.encode(lam, pair.example.task)
    return spec.unflatten(torch.autograd.grad(problem.outer(w, lam, task.val), leaves))


def _check_calls(method: Method, pair: Pair, allowed: float) -> None:
    """Two calls agree, and a list of tasks gives the mean."""
    (problem, lam, task), settings = pair.arguments(STEPS)
    changed = trees.map(lambda leaf: leaf * 1.5 if leaf.is_floating_point() else leaf, task.val)
    other = Task(task.train, changed)
    one, again, two = (hypergradient(problem, lam, t, method=method, **settings) for t in (task, task, other))
    agree(again.grad, one.grad, allowed, f"{method} gives two gradients in two calls with the same arguments")
    both = hypergradient(problem, lam, [task, other], method=method, **settings)
    mean = trees.map(lambda a, b: (a + b) / 2, one.grad, two.grad)
    agree(both.grad, mean, allowed, f"{method}: the gradient of a list of tasks is not the mean of their gradients")
    agree(both.value, (one.value + two.value) / 2, allowed, f"{method}: the value of a list of tasks is no mean", "f_T")
    assert len(both.inner) == 2, f"{method}: a list of tasks must give a list of w_T"


def _check_encode(method: Method, answered: Sequence[Pair], allowed: float) -> None:
    """A problem with `encode` equals the same problem with the encoding written into the objectives, and encodes
    once."""
    pair = next((pair for pair in answered if pair.example.written is not None), None)
    if pair is None:
        return
    (base, lam, task), settings = pair.arguments(STEPS)
    calls = 0

    def encode(lam: Tree, task: Task) -> Task:
        nonlocal calls
        calls += 1
        return base.encode(lam, task)

    problem = Problem(base.inner, base.outer, base.init, encode)
    found = hypergradient(problem, lam, task, method=method, **settings).grad
    assert calls == 1, f"{method} called encode {calls} times instead of once"
    written: Any = pair.example.written
    # Written out, the inner objective is no longer the one that such a method is for.
    other = method if method.structure is None else Unrolled()
    expected = hypergradient(written, lam, task, method=other, **settings).grad
    agree(found, expected, allowed, f"{method}: a problem with encode differs from the same problem without")


def _check_unused(method: Method, pair: Pair) -> None:
    (problem, lam, task), settings = pair.arguments(STEPS)
    lam = {**lam, "unused": torch.ones(2, dtype=torch.float64)}
    try:
        hypergradient(problem, lam, task, method=method, **settings)
    except BilevelError as error:
        assert "unused" in str(error), f"{method} does not name the unused leaf: {error}"
    else:
        raise AssertionError(f"{method} says nothing about a leaf of λ that reaches nothing")
    grad = hypergradient(problem, lam, task, method=method, allow_unused=True, **settings).grad
    assert float(grad["unused"].abs().max()) == 0, f"{method} gives an unused leaf a gradient that is not exactly zero"
