"""What every dynamics, method, linear solver and constraint must satisfy, ours and yours.

Each battery raises `AssertionError` with the figure that is off. They run in float64 and take well under a second.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bilevel import methods, trees
from bilevel.constraints import Constraint
from bilevel.dynamics import Dynamics, gradient
from bilevel.errors import BilevelError
from bilevel.hypergradients import hypergradient, value_of
from bilevel.linear_solvers import LinearSolver, Operator
from bilevel.methods import Method
from bilevel.methods.checks import same
from bilevel.methods.unrolled import Unrolled
from bilevel.problem import Problem, Task
from bilevel.testing.differences import central_differences, relative_error
from bilevel.testing.problems import Example, closed_form, examples

# Not a multiple of anything, so that checkpoint segments come out uneven.
STEPS = 7
EXACT = 1e-10
DIFFERENCES = 1e-6


def check_dynamics(dynamics: Dynamics) -> None:
    """Purity, shapes, agreement of every exact method with every other and with central differences, learnable
    settings, zero gradients."""
    _check_step(dynamics)
    for example in examples():
        _check_agreement(example, dynamics)
    _check_learned_settings(dynamics)
    _check_zero_gradient(dynamics)
    _check_claims(dynamics)


def check_method(method: Method) -> None:
    """One result for all: exact methods are exact, the others converge; lists are means; `encode` runs once; nothing is
    mutated; unused λ gives zero."""
    from bilevel.dynamics.gradient_descent import GradientDescent
    from bilevel.dynamics.heavy_ball import HeavyBall

    example = examples()[0]
    dynamics = HeavyBall(0.2, 0.5)
    before = trees.clone(example.lam)
    settings: dict[str, Any] = {"dynamics": dynamics, "steps": 400 if not method.exact else STEPS, "method": method}
    fit = _visible_to(method, example)
    result = hypergradient(fit.problem, fit.lam, fit.task, **settings)
    assert same(before, example.lam), f"{method} changed λ"
    assert trees.flatten(result.grad)[1] == trees.flatten(fit.lam)[1], (
        f"{method} returned a gradient with another structure than λ"
    )
    assert result.value.ndim == 0 and not result.value.requires_grad, f"{method} must return a plain scalar value"
    if method.exact:
        expected = hypergradient(fit.problem, fit.lam, fit.task, **{**settings, "method": Unrolled()}).grad
        _close(result.grad, expected, EXACT, f"{method} is declared exact but differs from Unrolled")
    elif method.sees(_process(fit, dynamics)) != frozenset({"the outer objective"}):
        _close(
            result.grad,
            {key: closed_form(example)[1][key] for key in fit.lam},
            1e-6,
            f"{method} does not converge to the closed form",
        )
    _check_mean(method, fit, settings)
    _check_encode(method, GradientDescent(0.2))
    _check_unused(method, fit, settings)


def check_solver(solver: LinearSolver) -> None:
    """A x = b on a positive definite system, the reported residual, warm starts, b = 0."""
    generator = torch.Generator().manual_seed(5)
    q = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64)).Q
    matrix = q @ torch.diag(torch.linspace(0.5, 4, 12, dtype=torch.float64)) @ q.T
    b = torch.randn(12, generator=generator, dtype=torch.float64)
    operator = Operator(lambda v: matrix @ v, symmetric=True)
    solution = solver.solve(operator, b)
    exact = torch.linalg.solve(matrix, b)
    _close(solution.x, exact, 1e-8, f"{solver} is wrong")
    measured = float((b - matrix @ solution.x).norm() / b.norm())
    assert abs(solution.residual - measured) <= 1e-12 + 1e-3 * measured, (
        f"{solver} reports the residual {solution.residual}, but it is {measured}"
    )
    warm = solver.solve(operator, b, exact)
    _close(warm.x, exact, 1e-8, f"{solver} leaves a warm start at the solution")
    assert warm.products <= solution.products + 2, (
        f"{solver} spends {warm.products} products from the solution and {solution.products} from nowhere"
    )
    assert float(solver.solve(operator, torch.zeros_like(b)).x.norm()) == 0, f"{solver} does not give x = 0 for b = 0"


def check_constraint(constraint: Constraint, like: trees.Tree) -> None:
    """The projection is idempotent, nearest, non-expansive, and leaves its argument alone; `like` shows the structure
    of λ."""
    generator = torch.Generator().manual_seed(11)

    def draw(scale: float) -> trees.Tree:
        return trees.map(lambda leaf: scale * torch.randn(leaf.shape, generator=generator, dtype=torch.float64), like)

    for scale in (0.1, 1.0, 10.0):
        x, y = draw(scale), draw(scale)
        copy = trees.clone(x)
        px, py = constraint.project(x), constraint.project(y)
        assert same(x, copy), f"{constraint} changed its argument"
        assert trees.flatten(px)[1] == trees.flatten(x)[1], f"{constraint} changed the structure of λ"
        again = constraint.project(px)
        assert float(trees.norm(trees.subtract(again, px))) <= 1e-12 * (1 + scale), (
            f"{constraint} moves a point that it has projected"
        )
        moved, apart = trees.norm(trees.subtract(px, py)), trees.norm(trees.subtract(x, y))
        assert float(moved) <= float(apart) * (1 + 1e-12), (
            f"{constraint} is not a projection: it moved two points apart"
        )
        # ⟨x − Px, z − Px⟩ ≤ 0 for every z in the set characterises the nearest point of a convex set.
        angle = float(trees.dot(trees.subtract(x, px), trees.subtract(py, px)))
        assert angle <= 1e-10 * (1 + scale**2), f"{constraint} does not return the nearest point"


def _check_step(dynamics: Dynamics) -> None:
    example = examples()[1]
    w = {"a": torch.ones(3, dtype=torch.float64), "b": torch.full((2,), 0.5, dtype=torch.float64)}
    copy = trees.clone(w)

    def loss(w: trees.Tree) -> torch.Tensor:
        return example.problem.inner(w, example.lam, example.task.train)

    with torch.no_grad():
        state = dynamics.init(w)
        for t in (1, 2):
            first, first_state = dynamics.step(loss, w, state, t)
            second, second_state = dynamics.step(loss, w, state, t)
            assert same(first, second) and same(first_state, second_state), (
                f"{dynamics}: two calls of step {t} with the same arguments differ"
            )
            assert trees.flatten(first)[1] == trees.flatten(w)[1], f"{dynamics} changes the structure of w"
            assert all(a.shape == b.shape for a, b in zip(trees.leaves(first), trees.leaves(w), strict=True)), (
                f"{dynamics} changes the shape of w"
            )
            with torch.enable_grad():
                recorded = dynamics.step(loss, w, state, t)[0]
            _close(trees.detach(recorded), first, 1e-14, f"{dynamics} steps elsewhere when gradients are recorded")
            assert not any(leaf.requires_grad for leaf in trees.tensors((first, first_state))), (
                f"{dynamics} keeps a graph where gradients are switched off"
            )
            state = first_state
    assert same(w, copy), f"{dynamics} changed w in place"


def _check_agreement(example: Example, dynamics: Any) -> None:
    settings: dict[str, Any] = {"dynamics": dynamics, "steps": STEPS}
    reference = hypergradient(example.problem, example.lam, example.task, method=Unrolled(), **settings)
    differences = central_differences(lambda lam: value_of(example.problem, lam, example.task, **settings), example.lam)
    _close(
        reference.grad,
        differences,
        DIFFERENCES,
        f"{dynamics} on the {example.name} problem: Unrolled differs from central differences",
    )
    for method in exact_methods():
        try:
            found = hypergradient(example.problem, example.lam, example.task, method=method, **settings)
        except BilevelError:
            # A method may refuse a pair; it may not be wrong about it.
            continue
        _close(found.grad, reference.grad, EXACT, f"{method} with {dynamics} on the {example.name} problem")


def exact_methods() -> list[Method]:
    """Every instance of every exact method found in the folder."""
    return [instance for cls in methods.find().values() for instance in cls.examples() if instance.exact]


def _check_learned_settings(dynamics: Dynamics) -> None:
    """Every numeric setting, taken from λ, has the derivative that central differences give, or is refused."""
    example = examples()[1]
    for field in dataclasses.fields(dynamics):
        value = getattr(dynamics, field.name)
        if not isinstance(value, float):
            continue
        lam = {**example.lam, "setting": torch.tensor(value, dtype=torch.float64)}

        def learned(lam: trees.Tree, name: str = field.name) -> Dynamics:
            return dataclasses.replace(dynamics, **{name: lam["setting"]})

        _check_agreement(dataclasses.replace(example, lam=lam), learned)


def _check_zero_gradient(dynamics: Dynamics) -> None:
    """A weight that never receives a gradient must not make the hypergradient NaN (FAR-HO's issue 13)."""
    problem = Problem(
        inner=lambda w, lam, batch: 0.5 * (lam * w[:2] ** 2).sum() + 0.0 * w[2:].sum(),
        outer=lambda w, lam, batch: (w**2).sum(),
        init=lambda lam: torch.ones(4, dtype=torch.float64),
    )
    grad = hypergradient(problem, torch.ones(2, dtype=torch.float64), Task(None, None), dynamics=dynamics, steps=3).grad
    assert bool(torch.isfinite(grad).all()), (
        f"{dynamics} gives a non-finite hypergradient when some weights have no gradient"
    )


def _check_claims(dynamics: Dynamics) -> None:
    """`heavy_ball_form` and `stationary_step` must describe the step that is taken."""
    example = examples()[0]

    def loss(w: trees.Tree) -> torch.Tensor:
        return example.problem.inner(w, example.lam, example.task.train)

    w = {"a": torch.ones(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    form = dynamics.heavy_ball_form(1)
    with torch.no_grad():
        if form is not None:
            moved = dynamics.step(loss, w, dynamics.init(w), 1)[0]
            expected = trees.map(lambda x, g: x - form[0] * g, w, gradient(loss, w))
            _close(moved, expected, 1e-12, f"{dynamics}.heavy_ball_form(1) does not describe its first step")
        if dynamics.stationary_step(loss, w, 1) is not None:
            state = dynamics.init(w)
            for t in range(1, 3000):
                w, state = dynamics.step(loss, w, state, t)
            fixed = dynamics.stationary_step(loss, w, 3000)
            _close(fixed, w, 1e-6, f"{dynamics}: its limit is not a fixed point of stationary_step")


def _visible_to(method: Method, example: Example) -> Example:
    """The example with those leaves of λ only that the method can see; the others become constants."""
    from bilevel.dynamics.heavy_ball import HeavyBall

    seen = method.sees(_process(example, HeavyBall(0.2, 0.5)))
    where = {"penalty": "the inner objective", "shift": "the outer objective", "start": "the start"}
    kept = {key: value for key, value in example.lam.items() if where[key] in seen}
    fixed = {key: value for key, value in example.lam.items() if key not in kept}
    base = example.problem
    problem = Problem(
        inner=lambda w, lam, batch: base.inner(w, {**fixed, **lam}, batch),
        outer=lambda w, lam, batch: base.outer(w, {**fixed, **lam}, batch),
        init=lambda lam: base.init({**fixed, **lam}),
    )
    return dataclasses.replace(example, problem=problem, lam=kept)


def _process(example: Example, dynamics: Dynamics) -> Any:
    from bilevel.methods.process import Process

    return Process(example.problem, example.lam, example.task, dynamics, 400)


def _check_mean(method: Method, example: Example, settings: dict[str, Any]) -> None:
    other = Task(example.task.train, trees.map(lambda leaf: leaf * 1.5, example.task.val))
    both = hypergradient(example.problem, example.lam, [example.task, other], **settings)
    singles = [hypergradient(example.problem, example.lam, task, **settings) for task in (example.task, other)]
    mean = trees.map(lambda a, b: (a + b) / 2, singles[0].grad, singles[1].grad)
    _close(both.grad, mean, 1e-12, f"{method}: the gradient of a list of tasks is not the mean")
    assert len(both.inner) == 2, f"{method}: a list of tasks must give a list of w_T"


def _check_encode(method: Method, dynamics: Dynamics) -> None:
    """A problem with `encode` equals the same problem with the encoding written into the objectives, and encodes
    once."""
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(10, generator=generator, dtype=torch.float64)
    lam = torch.randn(4, 3, generator=generator, dtype=torch.float64) * 0.4
    calls = 0

    def objective(w: trees.Tree, features: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((features @ w - y) ** 2).mean() + 0.25 * (w**2).sum()

    def encode(lam: trees.Tree, task: Task) -> Task:
        nonlocal calls
        calls += 1
        return Task((torch.tanh(task.train[0] @ lam), task.train[1]), (torch.tanh(task.val[0] @ lam), task.val[1]))

    def start(lam: trees.Tree) -> trees.Tree:
        return torch.zeros(3, dtype=torch.float64)

    encoded = Problem(lambda w, lam, b: objective(w, *b), lambda w, lam, b: objective(w, *b), start, encode)
    written = Problem(
        lambda w, lam, b: objective(w, torch.tanh(b[0] @ lam), b[1]),
        lambda w, lam, b: objective(w, torch.tanh(b[0] @ lam), b[1]),
        start,
    )
    task = Task((x[:5], y[:5]), (x[5:], y[5:]))
    try:
        expected = hypergradient(written, lam, task, dynamics=dynamics, steps=30, method=method).grad
    except BilevelError:
        return
    found = hypergradient(encoded, lam, task, dynamics=dynamics, steps=30, method=method).grad
    _close(found, expected, EXACT, f"{method}: a problem with encode differs from the same problem without")
    assert calls == 1, f"{method} called encode {calls} times instead of once"


def _check_unused(method: Method, example: Example, settings: dict[str, Any]) -> None:
    lam = {**example.lam, "unused": torch.ones(2, dtype=torch.float64)}
    try:
        hypergradient(example.problem, lam, example.task, **settings)
    except BilevelError as error:
        assert "unused" in str(error), f"{method} does not name the unused leaf: {error}"
    else:
        raise AssertionError(f"{method} says nothing about a leaf of λ that reaches nothing")
    grad = hypergradient(example.problem, lam, example.task, allow_unused=True, **settings).grad
    assert float(grad["unused"].abs().max()) == 0, f"{method} gives an unused leaf a gradient that is not exactly zero"


def _close(found: trees.Tree, expected: trees.Tree, tolerance: float, what: str) -> None:
    error = relative_error(found, expected)
    assert error <= tolerance, f"{what}: relative error {error:.3g}, allowed {tolerance:.0e}"
