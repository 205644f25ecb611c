"""Derivatives of `objective` beyond the first: Hessians and gradient penalties, against plain torch and differences."""

import functools

import pytest
import torch
from torch.autograd.functional import hessian

import bilevel as bl
from bilevel import dynamics, methods, trees
from bilevel.testing import central_differences, relative_error
from bilevel.testing.problems import examples

TASK = bl.Task(None, None)


def scalar(inner_calls=None):
    """inner (w − 3)² + e^λ w²: every step is affine in w, so that f_T is a formula."""

    def inner(w, lam, batch):
        if inner_calls is not None:
            inner_calls.append(1)
        return (w - 3) ** 2 + lam.exp() * w**2

    return bl.Problem(inner, outer=lambda w, lam, batch: (w - 1) ** 2, init=lambda lam: torch.zeros_like(lam))


def by_hand(lam, steps, lr):
    w = torch.zeros_like(lam)
    for _ in range(steps):
        w = w - lr * (2 * (w - 3) + 2 * lam.exp() * w)
    return (w - 1) ** 2


def unrolled(problem, lam, task, steps, lr):
    """f_T by gradient descent in plain torch."""
    w = {name: leaf.clone().requires_grad_() for name, leaf in problem.init(lam).items()}
    for _ in range(steps):
        slopes = torch.autograd.grad(problem.inner(w, lam, task.train), list(w.values()), create_graph=True)
        w = {name: leaf - lr * slope for (name, leaf), slope in zip(w.items(), slopes, strict=True)}
    return problem.outer(w, lam, task.val)


def hessian_of(f, lam):
    """The Hessian as one matrix, for a λ that is a tree."""
    leaves, spec = trees.flatten(lam)
    return hessian(lambda v: f(spec.unflatten(trees.from_vector(v, leaves))), trees.to_vector(leaves))


def test_the_hessian_of_a_scalar_problem():
    lam = torch.tensor(0.3)

    def f(lam):
        return bl.objective(scalar(), lam, TASK, dynamics=bl.GradientDescent(0.1), steps=20)

    expected = hessian(lambda lam: by_hand(lam, 20, 0.1), lam)
    assert abs(float(expected)) > 0.1
    assert relative_error(hessian(f, lam), expected) < 1e-12
    assert relative_error(hessian(f, lam, vectorize=True), expected) < 1e-12
    slopes = central_differences(
        lambda lam: bl.hypergradient(scalar(), lam, TASK, dynamics=bl.GradientDescent(0.1), steps=20).grad, lam
    )
    assert relative_error(slopes, expected) < 1e-8


def exact_methods():
    general = [cls for cls in methods.find().values() if cls.exact and cls.structure is None]
    found = [method for cls in general for method in cls.examples()]
    return [*found, "auto", None]


@functools.cache
def hessian_of_25_steps(method, dynamics):
    example = examples()[0]
    settings = {"method": method, "dynamics": dynamics, "steps": 25}
    return hessian_of(lambda lam: bl.objective(example.problem, lam, example.task, **settings), example.lam)


@functools.cache
def hessian_by_torch():
    example = examples()[0]
    return hessian_of(lambda lam: unrolled(example.problem, lam, example.task, 25, 0.2), example.lam)


@pytest.mark.parametrize("method", exact_methods(), ids=repr)
def test_every_exact_method_has_the_hessian_of_f_t(method):
    # Reversible needs momentum; the others run the steps that plain torch runs.
    if isinstance(method, bl.Reversible):
        dynamics = bl.HeavyBall(0.2, 0.5)
        expected = hessian_of_25_steps(bl.Unrolled(), dynamics)
    else:
        dynamics, expected = bl.GradientDescent(0.2), hessian_by_torch()
    assert relative_error(hessian_of_25_steps(method, dynamics), expected) < 1e-9


DYNAMICS = [each for cls in dynamics.find().values() for each in cls.examples() if each.differentiable]


@pytest.mark.parametrize("each", DYNAMICS, ids=lambda each: type(each).__name__)
def test_every_dynamics_has_the_hessian_of_its_run(each):
    """Products with the Hessian against differences of the gradient along the same direction."""
    for example in (one.for_dynamics(each) for one in examples()):
        leaves, spec = trees.flatten(example.lam)
        if any(leaf.dtype != torch.float64 for leaf in leaves):
            continue
        directions = [torch.randn(leaf.shape) for leaf in leaves]
        settings = {"dynamics": each, "steps": 7, "allow_unused": True}
        live = [leaf.clone().requires_grad_() for leaf in leaves]
        value = bl.objective(example.problem, spec.unflatten(live), example.task, **settings)
        slopes = torch.autograd.grad(value, live, create_graph=True)
        along = sum((slope * direction).sum() for slope, direction in zip(slopes, directions, strict=True))
        products = torch.autograd.grad(along, live)

        def slope_at(step, example=example, leaves=leaves, spec=spec, directions=directions, settings=settings):
            moved = spec.unflatten([x + step * v for x, v in zip(leaves, directions, strict=True)])
            return trees.to_vector(
                trees.leaves(bl.hypergradient(example.problem, moved, example.task, **settings).grad)
            )

        near, far = (slope_at(h) - slope_at(-h) for h in (1e-5, 2e-5))
        assert relative_error(trees.to_vector(products), (8 * near - far) / 12e-5) < 1e-6, example.name


def test_torchs_own_check():
    f = lambda lam: bl.objective(scalar(), lam, TASK, dynamics=bl.HeavyBall(0.1, 0.5), steps=6)  # noqa: E731
    assert torch.autograd.gradcheck(f, torch.tensor(0.3, requires_grad=True))
    assert torch.autograd.gradgradcheck(f, torch.tensor(0.3, requires_grad=True))


def test_a_gradient_penalty():
    example = examples()[1]
    settings = {"dynamics": bl.GradientDescent(0.3), "steps": 8}

    def penalised(f, lam):
        leaves = list(lam.values())
        value = f(lam)
        return value + sum((slope**2).sum() for slope in torch.autograd.grad(value, leaves, create_graph=True))

    found = {k: v.clone().requires_grad_() for k, v in example.lam.items()}
    penalised(lambda lam: bl.objective(example.problem, lam, example.task, **settings), found).backward()
    expected = {k: v.clone().requires_grad_() for k, v in example.lam.items()}
    penalised(lambda lam: unrolled(example.problem, lam, example.task, 8, 0.3), expected).backward()
    assert relative_error({k: v.grad for k, v in found.items()}, {k: v.grad for k, v in expected.items()}) < 1e-9


def test_lists_of_tasks_encode_and_learned_dynamics():
    x, y = torch.randn(10, 3), torch.randn(10)
    problem = bl.Problem(
        inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + lam["penalty"].exp() * (w**2).sum(),
        outer=lambda w, lam, b: torch.log(torch.cosh(b[0] @ w - b[1])).mean(),
        init=lambda lam: lam["start"],
        encode=lambda lam, task: bl.Task(
            (torch.tanh(task.train[0] @ lam["map"]), task.train[1]), (torch.tanh(task.val[0] @ lam["map"]), task.val[1])
        ),
    )
    lam = {"map": torch.randn(3, 2), "penalty": torch.tensor(-1.0), "start": torch.randn(2), "lr": torch.tensor(-1.5)}
    tasks = [bl.Task((x[:4], y[:4]), (x[4:7], y[4:7])), bl.Task((x[3:8], y[3:8]), (x[8:], y[8:]))]

    def f(lam):
        return bl.objective(problem, lam, tasks, dynamics=lambda lam: bl.GradientDescent(lam["lr"].exp()), steps=6)

    def plain(lam):
        values = []
        for task in tasks:
            encoded, w = problem.encode(lam, task), lam["start"].clone()
            for _ in range(6):
                loss = problem.inner(w, lam, encoded.train)
                w = w - lam["lr"].exp() * torch.autograd.grad(loss, w, create_graph=True)[0]
            values.append(problem.outer(w, lam, encoded.val))
        return sum(values) / 2

    assert relative_error(hessian_of(f, lam), hessian_of(plain, lam)) < 1e-9


def test_leaves_of_lam_may_be_functions_of_each_other():
    problem = bl.Problem(
        inner=lambda w, lam, b: (w - lam["a"]) ** 2 + lam["b"] * w**2,
        outer=lambda w, lam, b: torch.sin(w) + lam["b"] ** 3,
        init=lambda lam: torch.zeros_like(lam["a"]),
    )

    def f(a):
        return bl.objective(problem, {"a": a, "b": a**2}, TASK, dynamics=bl.GradientDescent(0.1), steps=7)

    def plain(a):
        w = torch.zeros_like(a)
        for _ in range(7):
            w = w - 0.1 * (2 * (w - a) + 2 * a**2 * w)
        return torch.sin(w) + a**6

    a = torch.tensor(0.7)
    assert relative_error(hessian(f, a), hessian(plain, a)) < 1e-12


def test_third_derivatives():
    lam = torch.tensor(0.3, requires_grad=True)

    def third(f):
        value = f(lam)
        for _ in range(3):
            (value,) = torch.autograd.grad(value, lam, create_graph=True)
        return value.detach()

    found = third(lambda lam: bl.objective(scalar(), lam, TASK, dynamics=bl.GradientDescent(0.1), steps=9))
    assert relative_error(found, third(lambda lam: by_hand(lam, 9, 0.1))) < 1e-11


def test_a_slope_that_does_not_depend_on_lam_has_a_zero_hessian():
    problem = bl.Problem(
        inner=lambda w, lam, b: ((w - 1) ** 2).sum(),
        outer=lambda w, lam, b: (w * lam).sum(),
        init=lambda lam: torch.zeros_like(lam),
    )
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 3}
    assert torch.equal(
        hessian(lambda lam: bl.objective(problem, lam, TASK, **settings), torch.ones(2)), torch.zeros(2, 2)
    )


def test_frozen_leaves_stay_frozen():
    example = examples()[1]
    lam = {**example.lam, "shift": example.lam["shift"].clone().requires_grad_()}
    f = bl.objective(example.problem, lam, example.task, dynamics=bl.GradientDescent(0.3), steps=6)
    (slope,) = torch.autograd.grad(f, lam["shift"], create_graph=True)
    slope.backward()
    expected = hessian(
        lambda shift: unrolled(example.problem, {**example.lam, "shift": shift}, example.task, 6, 0.3),
        example.lam["shift"],
    )
    assert relative_error(lam["shift"].grad, expected) < 1e-10
    assert all(leaf.grad is None for name, leaf in lam.items() if name != "shift")


@pytest.mark.parametrize("method", [bl.Implicit(), bl.Truncated(3), bl.FirstOrder()], ids=repr)
def test_a_method_without_second_derivatives_says_so(method):
    problem = bl.Problem(
        inner=lambda w, lam, b: (w - lam) ** 2,
        outer=lambda w, lam, b: w**2 * lam,
        init=lambda lam: torch.zeros(()),
    )
    lam = torch.tensor(0.5, requires_grad=True)
    f = bl.objective(problem, lam, TASK, dynamics=bl.GradientDescent(0.1), steps=40, method=method)
    (slope,) = torch.autograd.grad(f, lam, create_graph=True)
    expected = bl.hypergradient(problem, lam, TASK, dynamics=bl.GradientDescent(0.1), steps=40, method=method).grad
    assert torch.equal(slope.detach(), expected)
    with pytest.raises(bl.BilevelError, match=r"second derivative.*Reverse\(\)"):
        slope.backward()


def test_nothing_is_run_again_until_a_second_derivative_is_asked_for():
    calls = []
    problem, lam = scalar(calls), torch.tensor(0.3, requires_grad=True)
    # The first second derivative of a problem is compared with differences, which takes a few more calls.
    for checks in (10, 0):
        f = bl.objective(problem, lam, TASK, dynamics=bl.GradientDescent(0.1), steps=20)
        once = len(calls)
        f.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(f, lam, create_graph=True)
        assert len(calls) == once
        slope.backward()
        assert 20 <= len(calls) - once <= 20 + checks


def test_the_first_derivative_is_that_of_the_call_whatever_happens_to_lam_since():
    lam = torch.tensor(0.3, requires_grad=True)
    f = bl.objective(scalar(), lam, TASK, dynamics=bl.GradientDescent(0.1), steps=5)
    expected = bl.hypergradient(scalar(), lam, TASK, dynamics=bl.GradientDescent(0.1), steps=5).grad
    with torch.no_grad():
        lam.fill_(9.0)
    f.backward(retain_graph=True)
    assert torch.equal(lam.grad, expected)
    with pytest.raises(RuntimeError, match="inplace"):  # torch's word for it, as for any function
        torch.autograd.grad(f, lam, create_graph=True)


def on_data():
    return bl.Problem(
        inner=lambda w, lam, x: (torch.log(torch.cosh(w - x)) + lam * w**2).sum(),
        outer=lambda w, lam, x: ((w - x) ** 2).sum(),
        init=lambda lam: torch.zeros(3),
    )


def on_data_by_hand(lam, x, y, steps):
    w = torch.zeros(3)
    for _ in range(steps):
        w = w - 0.1 * (torch.tanh(w - x) + 2 * lam * w)
    return ((w - y) ** 2).sum()


@pytest.mark.parametrize("method", [None, bl.Unrolled(), bl.Forward(), bl.Reverse("sqrt", group_bytes=0)], ids=repr)
def test_data_that_require_grad_are_differentiated(method):
    x, y, lam = (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), torch.tensor(0.5))
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 4, "method": method}
    f = bl.objective(on_data(), lam, bl.Task(x, y), **settings)
    expected = on_data_by_hand(lam, x, y, 4)
    assert relative_error(f.detach(), expected.detach()) < 1e-12
    slopes = [torch.autograd.grad(value, (x, y), create_graph=True) for value in (f, expected)]
    assert relative_error(*trees.detach(slopes)) < 1e-10
    second = [torch.autograd.grad((gx.sin() * gy).sum(), (x, y)) for gx, gy in slopes]
    assert relative_error(*second) < 1e-9


def test_one_of_several_tasks_has_data_that_require_grad():
    x, lam = torch.randn(3, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    tasks = [bl.Task(torch.ones(3), torch.zeros(3)), bl.Task(x, torch.ones(3))]

    def dynamics(lam):
        return bl.GradientDescent(0.1 + 0 * lam)

    f = bl.objective(on_data(), lam, tasks, dynamics=dynamics, steps=4)
    expected = sum(on_data_by_hand(lam, task.train, task.val, 4) for task in tasks) / 2
    found = torch.autograd.grad(f, (lam, x))
    assert relative_error(found, torch.autograd.grad(expected, (lam, x))) < 1e-10
    with torch.no_grad():
        assert torch.equal(bl.objective(on_data(), lam, tasks, dynamics=dynamics, steps=4), f.detach())


def test_data_that_require_grad_and_an_encoder():
    def encode(lam, task):
        return bl.Task(torch.tanh(lam * task.train), task.val)

    x, lam = torch.randn(3, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    problem = on_data()
    calls = []
    with_encoder = bl.Problem(
        problem.inner, problem.outer, problem.init, lambda *given: calls.append(1) or encode(*given)
    )
    for _ in range(3):
        f = bl.objective(with_encoder, lam, bl.Task(x, torch.ones(3)), dynamics=bl.GradientDescent(0.1), steps=4)
    expected = on_data_by_hand(lam, torch.tanh(lam * x), torch.ones(3), 4)
    found = torch.autograd.grad(f, (lam, x))
    assert relative_error(found, torch.autograd.grad(expected, (lam, x))) < 1e-10
    # What was checked is remembered: later calls encode once.
    before = len(calls)
    bl.objective(with_encoder, lam, bl.Task(x, torch.ones(3)), dynamics=bl.GradientDescent(0.1), steps=4)
    assert len(calls) == before + 1
