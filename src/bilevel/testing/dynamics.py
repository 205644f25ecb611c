"""The battery for dynamics."""

from __future__ import annotations

import dataclasses

import torch

from bilevel import trees
from bilevel.dynamics import Dynamics, gradient
from bilevel.dynamics.base import Loss
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.dynamics.picard import Picard
from bilevel.engine.process import Process
from bilevel.engine.samplers import same
from bilevel.errors import BilevelError
from bilevel.hypergradients import hypergradient
from bilevel.methods.implicit import Implicit
from bilevel.methods.unrolled import Unrolled
from bilevel.problem import Problem, Task
from bilevel.testing.differences import agree
from bilevel.testing.problems import Example, as_fixed_point, examples
from bilevel.testing.references import (
    DIFFERENCES,
    EXACT,
    LIMIT,
    SINGLE,
    STEPS,
    BatteryCase,
    along,
    exact_methods,
    slopes,
    with_setting,
)
from bilevel.trees import Tree


def check_dynamics(dynamics: Dynamics) -> None:
    """Run a dynamics on every example with every kind of exact method; raise an `AssertionError` that says what is
    wrong.

    A step is a pure function: it changes no argument, keeps structure, shape and dtype of w, and gives the same result
    when it is called again, with gradients recorded or not, whatever was drawn or called in between. Its derivative
    equals central differences to 1e-6, in λ and in every numeric setting of the dynamics, and all exact
    methods agree on it to 1e-10. Weights without a gradient give finite hypergradients. `heavy_ball_form` and
    `stationary_step` describe what the dynamics does. For a solver that runs to a tolerance and is not
    `differentiable`, methods that differentiate steps are refused, and `Implicit` gives the gradient at the minimiser.
    """
    _check_step(dynamics)
    if not dynamics.differentiable:
        _check_solver(dynamics)
        _check_limit(dynamics)
        return
    for example in examples():
        _check_derivative(BatteryCase(example.for_dynamics(dynamics), dynamics, str(dynamics)))
    _check_learned_settings(dynamics)
    _check_zero_gradient(dynamics)
    _check_heavy_ball_form(dynamics)
    _check_limit(dynamics)


def _check_step(dynamics: Dynamics) -> None:
    example, loss, w = _quadratic(dynamics)
    before = trees.clone((w, example.lam, example.task))
    with torch.no_grad():
        state = dynamics.init(w)
        for t in (1, 2):
            kept = trees.clone(state)
            first = dynamics.step(loss, w, state, t)
            assert same(before[0], w) and same(kept, state), f"{dynamics} changed w or its auxiliary variables in place"
            # Other random draws and another step come between the two calls.
            torch.rand(3)
            dynamics.step(loss, trees.scale(w, 2.0), dynamics.init(w), t + 5)
            again = dynamics.step(loss, w, state, t)
            assert same(first, again), (
                f"{dynamics}: two calls of step {t} with the same arguments differ. A step may depend on (loss, w, "
                "state, t) only: not on a counter, a buffer of its own or torch's random state"
            )
            kinds = [[(x.shape, x.dtype) for x in trees.leaves(tree)] for tree in (first[0], w)]
            assert trees.flatten(first[0])[1] == trees.flatten(w)[1] and kinds[0] == kinds[1], (
                f"{dynamics} changes the structure, a shape or a dtype of w"
            )
            assert not any(leaf.requires_grad for leaf in trees.tensors(first)), (
                f"{dynamics} keeps a graph where gradients are switched off"
            )
            with torch.enable_grad():
                recorded = dynamics.step(loss, w, state, t)[0]
            agree(recorded, first[0], 1e-14, f"{dynamics} gives another step when gradients are recorded", "w")
            state = first[1]
    assert same(before, (w, example.lam, example.task)), f"{dynamics} changed w, λ or the data in place"


def _check_solver(dynamics: Dynamics) -> None:
    """One step reaches the minimiser, and its gradient equals that of many recorded small steps."""
    slow: Dynamics = Picard() if dynamics.equations else GradientDescent(0.3)
    for example in (one for one in examples() if one.name in ("quadratic", "smooth", "encode", "nested")):
        case = BatteryCase(example.for_dynamics(dynamics), dynamics, str(dynamics))
        case = case.visible(frozenset({"the inner objective", "the outer objective"})) or case
        args, settings = case.arguments(1)
        try:
            hypergradient(*args, method=Unrolled(), **settings)
        except BilevelError:
            pass
        else:
            raise AssertionError(f"{dynamics} declares that it is not differentiable, but Unrolled() was not refused")
        found = hypergradient(*args, method=Implicit(), **settings)
        exact = hypergradient(*args, method=Unrolled(), dynamics=slow, steps=2 * LIMIT)
        agree(found.inner, exact.inner, DIFFERENCES, f"{case}: one step does not reach the minimiser", "w")
        agree(found.grad, exact.grad, 10 * DIFFERENCES, f"{case}: Implicit differs from many recorded steps")
        assert found.stats.iterations, f"{case}: stats.iterations does not say how many steps it took"


def _check_derivative(case: BatteryCase) -> None:
    """Recorded steps against central differences, and every kind of exact method against recorded steps."""
    # The comparison at the first call would refuse it, and would not say on which example and by how much.
    problem = dataclasses.replace(case.example.problem, check_derivatives=False)
    case = dataclasses.replace(case, example=dataclasses.replace(case.example, problem=problem))
    args, settings = case.arguments(STEPS)
    try:
        grad = hypergradient(*args, method=Unrolled(), **settings).grad
    except BilevelError as error:
        raise AssertionError(f"{case} has no hypergradient: {error}") from error
    single = case.example.single
    what = f"{case}: the derivative through its steps differs from central differences"
    agree(along(grad), slopes(case, STEPS), SINGLE if single else DIFFERENCES, what)
    one_of_each = {type(method): method for method in reversed(exact_methods())}
    for method in one_of_each.values():
        try:
            found = hypergradient(*args, method=method, **settings).grad
        except BilevelError:
            # A method may refuse a case, but its result must not be wrong.
            continue
        agree(found, grad, SINGLE if single else EXACT, f"{case}: {method} differs from Unrolled")


def _check_learned_settings(dynamics: Dynamics) -> None:
    """Every numeric setting, read from λ, has the derivative that central differences give."""
    for field in dataclasses.fields(dynamics):
        value = getattr(dynamics, field.name)
        if not isinstance(value, float) or field.name in dynamics.undifferentiated:
            continue
        example = with_setting(examples()[1].for_dynamics(dynamics), "setting", value, frozenset({"the dynamics"}))

        def learned(lam: Tree, name: str = field.name) -> Dynamics:
            return dataclasses.replace(dynamics, **{name: lam["setting"]})

        _check_derivative(BatteryCase(example, learned, f"{dynamics} with {field.name} learned"))


def _check_zero_gradient(dynamics: Dynamics) -> None:
    """A weight whose gradient is zero at every step must not make the hypergradient NaN (FAR-HO's issue 13)."""
    problem = Problem(
        inner=lambda w, lam, batch: 0.5 * (lam * w**2).sum(),
        outer=lambda w, lam, batch: (w**2).sum(),
        init=lambda lam: torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    if dynamics.equations:
        problem = as_fixed_point(problem)
    arguments = problem, torch.tensor(1.0, dtype=torch.float64), Task(None, None)
    try:
        hypergradient(*arguments, dynamics=dynamics, steps=3, method=Unrolled())
    except BilevelError as error:
        raise AssertionError(
            f"{dynamics} fails where some weights have no gradient (the slope of a square root at 0 is infinite; "
            f"`bilevel.dynamics.base.root` has slope 0 there): {error}"
        ) from error


def _check_heavy_ball_form(dynamics: Dynamics) -> None:
    """`heavy_ball_form`, which `Spectral`, `Reversible` and the certificates rely on, is what the steps do."""
    _, loss, w = _quadratic(dynamics)
    if dynamics.heavy_ball_form(1) is None:
        return
    with torch.no_grad():
        state, expected, velocity = dynamics.init(w), w, trees.map(torch.zeros_like, w)
        for t in (1, 2, 3):
            lr, momentum = dynamics.heavy_ball_form(t) or (0.0, 0.0)
            slope = gradient(loss, expected)
            velocity = trees.map(lambda v, g, lr=lr, m=momentum: m * v - lr * g, velocity, slope)
            expected = trees.add(expected, velocity)
            w, state = dynamics.step(loss, w, state, t)
            agree(w, expected, 1e-12, f"{dynamics}.heavy_ball_form({t}) does not describe step {t}", "w")


def _check_limit(dynamics: Dynamics) -> None:
    """The limit of the dynamics is a fixed point of `stationary_step`; without one, ∇L + `slope_decay`·w is zero there.
    `Implicit` relies on it."""
    _, loss, w = _quadratic(dynamics)
    with torch.no_grad():
        state, start, moved = dynamics.init(w), w, [1.0]
        # With momentum, w may be unchanged for one step where its direction reverses.
        while max(moved[-20:]) > 1e-13 and len(moved) < 1000:
            before, (w, state) = w, dynamics.step(loss, w, state, len(moved))
            moved.append(float(trees.norm(trees.subtract(w, before))))
        if max(moved[-20:]) > 1e-9 or dynamics.iterations(state):
            # With a tolerance it stops near its limit, at a point that depends on the tolerance.
            return
        t = len(moved)
        fixed, decay = dynamics.stationary_step(loss, w, t), dynamics.slope_decay(t)
        if fixed is not None:
            agree(fixed, w, 1e-6, f"{dynamics}: its limit is not a fixed point of its stationary_step", "w")
        else:
            slope = trees.map(lambda g, x: g + decay * x, gradient(loss, w), w)
            ratio = float(trees.norm(slope) / trees.norm(gradient(loss, start)))
            assert ratio <= 1e-6, (
                f"{dynamics} converges to a point where ∇L{f' + {decay:g}·w' if decay else ''} is not zero "
                f"({ratio:.2g} of its norm at the start). Describe the limit in stationary_step or slope_decay"
            )


def _quadratic(dynamics: Dynamics) -> tuple[Example, Loss, Tree]:
    """The quadratic example, its inner objective as a loss, and a w to begin at."""
    example = examples()[0].for_dynamics(dynamics)
    loss = Process(example.problem, example.lam, example.task, dynamics, 1).bound.loss(1)
    return example, loss, {"a": torch.ones(3, dtype=torch.float64), "b": torch.full((2,), 0.5, dtype=torch.float64)}
