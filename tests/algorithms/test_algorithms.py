"""Algorithms for the outer problem: known minimisers, a loop written out by hand, and scipy itself."""

import math
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import bilevel as bl
from bilevel import algorithms
from bilevel.constraints import as_constraint
from bilevel.testing import check_algorithm, relative_error
from bilevel.testing.problems import examples

TARGET = torch.tensor([1.0, 5.0, -4.0], dtype=torch.float64)
WEIGHT = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
NOTHING = bl.Task(None, None)


def quadratic(outer=None):
    """w_1 = λ after one step of 0.5, so that f_1(λ) = outer(λ)."""
    return bl.Problem(
        inner=lambda w, lam, x: sum(((w[k] - lam[k]) ** 2).sum() for k in w),
        outer=outer or (lambda w, lam, x: (WEIGHT * (flat(w) - TARGET) ** 2).sum() / 2),
        init=lambda lam: {k: torch.zeros_like(v) for k, v in lam.items()},
    )


def solve(algorithm, problem=None, lam=None, **settings):
    lam = lam or {"a": torch.tensor([0.5], dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    settings = {"dynamics": bl.GradientDescent(0.5), "steps": 1, "iterations": 400, "tol": 1e-9, **settings}
    return bl.solve(problem or quadratic(), lam, NOTHING, algorithm=algorithm, **settings)


def instances(all_kinds=False):
    """Those that follow hypergradients, or all."""
    return [
        pytest.param(example, id=f"{name}-{i}")
        for name, cls in algorithms.find().items()
        for i, example in enumerate(cls.examples())
        if all_kinds or not cls.moves_w
    ]


def flat(lam):
    return torch.cat([lam["a"], lam["b"]])


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def test_the_folder_is_read():
    assert set(algorithms.find()) >= {"Descent", "LBFGSB"}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", instances(all_kinds=True))
def test_battery(algorithm):
    check_algorithm(algorithm)


@pytest.mark.parametrize("algorithm", instances())
def test_minimisers_with_and_without_a_box(algorithm):
    free = solve(algorithm)
    assert torch.allclose(flat(free.outer), TARGET, atol=1e-5) and free.value < 1e-9
    seen = []
    boxed = solve(algorithm, constraint=bl.Box(-3, 3), callbacks=seen.append)
    assert torch.allclose(flat(boxed.outer), TARGET.clamp(-3, 3), atol=1e-5)
    assert boxed.value == pytest.approx(3 * 2**2 / 2 + 0.5 * 1 / 2, rel=1e-9)
    assert all(bool((flat(here.lam).abs() <= 3).all()) for here in seen)
    assert len(seen) <= len(boxed.history["value"]) == len(boxed.history["gradient_norm"])
    # ‖λ − P(λ − ∇f)‖ vanishes at the minimiser over the box, where ∇f does not.
    assert boxed.history["gradient_norm"][-1] < 1e-5 < float(seen[-1].hypergradient.grad["b"].norm())


@pytest.mark.parametrize("algorithm", instances())
def test_the_parts_of_the_loop_work_with_every_algorithm(algorithm):
    assert len(solve(algorithm, iterations=3).history["value"]) == 3
    assert solve(algorithm, iterations=3).outcome == "Ran all 3 hyperiterations."
    stopped = solve(algorithm, callbacks=[lambda here: here.k == 2])
    assert stopped.outcome == "Stopped early by a callback at hyperiteration 2." and len(stopped.history["value"]) == 3
    loose = solve(algorithm, tol=1.0)
    assert loose.outcome.kind == "converged" and loose.history["gradient_norm"][-1] <= 1.0 < min(
        loose.history["gradient_norm"][:-1]
    )
    assert bool((np.diff(loose.history["seconds"]) > 0).all())

    def interrupt(here):
        if here.k == 1:
            raise KeyboardInterrupt

    assert solve(algorithm, callbacks=interrupt).outcome.kind == "interrupted"
    constant = bl.Problem(
        quadratic().inner, lambda w, lam, x: 0 * w["a"].sum() + w["b"].sum() * 0 + 1, quadratic().init
    )
    impatient = solve(algorithm, constant, patience=3, tol=None, iterations=10)
    assert impatient.value == 1 and impatient.outcome.kind in ("stopped early", "converged")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop], ids=lambda k: k.__name__)
def test_descent_is_a_torch_loop_to_the_last_bit(kind):
    example = examples()[0]
    settings = {"dynamics": bl.GradientDescent(0.3), "steps": 20, "method": bl.Reverse()}
    leaves = {key: value.clone().requires_grad_() for key, value in example.lam.items()}
    optimizer = kind(list(leaves.values()), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    values = []
    for _ in range(8):
        lam = {key: leaf.detach() for key, leaf in leaves.items()}
        result = bl.hypergradient(example.problem, lam, example.task, **settings)
        values.append(float(result.value))
        for key, leaf in leaves.items():
            leaf.grad = result.grad[key].clone()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            leaves["penalty"].clamp_(-0.5, 0.2)
    sol = bl.solve(
        example.problem,
        example.lam | {"penalty": example.lam["penalty"].clamp(-9, 9)},
        example.task,
        algorithm=bl.Descent(
            lambda p: kind(p, lr=0.05), lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        ),
        constraint={"penalty": _AfterTheFirst(-0.5, 0.2)},
        iterations=8,
        **settings,
    )
    assert sol.history["value"].tolist() == values
    assert all(torch.equal(sol.outer[key], leaf.detach()) for key, leaf in leaves.items())
    assert float(sol.outer["penalty"].min()) == -0.5  # the box was felt


class _AfterTheFirst(bl.Box):
    """A box that leaves the first λ alone, as the loop written out does."""

    calls = 0

    def project(self, lam):
        type(self).calls += 1
        return lam.clone() if type(self).calls == 1 else super().project(lam)


@pytest.fixture(autouse=True)
def new_box():
    _AfterTheFirst.calls = 0


@pytest.mark.parametrize("box", [None, (-1.0, 2.5)], ids=["free", "box"])
def test_lbfgsb_is_scipys(box):
    """Rosenbrock's function in four variables, evaluation by evaluation."""
    start = torch.tensor([0.5, 1.5, 0.5, 2.0], dtype=torch.float64)
    asked = []

    def function(x, scale):
        asked.append(x.copy())
        x = torch.tensor(x, requires_grad=True)
        value = rosenbrock(x)
        (grad,) = torch.autograd.grad(value, x)
        return scale * float(value.detach()), scale * grad.numpy()

    value, grad = function(start.numpy(), 1.0)
    scale = max(0.1 * math.sqrt(4) / np.linalg.norm(grad), 1 / value)
    asked.clear()
    bounds = None if box is None else [box] * 4
    options = {"maxiter": 200, "ftol": 1e-14, "gtol": 0.0, "maxcor": 7}
    expected = minimize(function, start.numpy(), (scale,), jac=True, bounds=bounds, method="L-BFGS-B", options=options)
    seen = []
    sol = solve(
        bl.LBFGSB(200, 1e-14, first_step=0.1, memory=7),
        quadratic(lambda w, lam, x: rosenbrock(flat(w))),
        {"a": start[:1], "b": start[1:]},
        constraint=box and bl.Box(*box),
        tol=None,
        callbacks=lambda here: seen.append(flat(here.lam).numpy()),
        method=bl.Unrolled(),
    )
    # The same points, until rounding is amplified.
    assert len(asked) > 20 and np.allclose(seen[:10], asked[:10], rtol=1e-9)
    assert sol.outcome.kind == "converged" and np.allclose(flat(sol.outer), expected.x, atol=1e-5)
    assert np.allclose(flat(sol.outer), np.ones(4), atol=1e-4)
    assert sol.value == min(sol.history["value"])


def test_lbfgsb_needs_fewer_hypergradients_than_descent():
    example = examples()[0]
    settings = {
        "dynamics": bl.GradientDescent(0.3),
        "steps": 20,
        "iterations": 100,
        "tol": 1e-4,
        "constraint": bl.Box(-2, 1),
    }
    quasi = bl.solve(example.problem, example.lam, example.task, algorithm=bl.LBFGSB(), **settings)
    plain = bl.solve(
        example.problem, example.lam, example.task, optimizer=lambda p: torch.optim.SGD(p, lr=0.3), **settings
    )
    assert quasi.outcome.kind == "converged" and quasi.value <= plain.value + 1e-6
    assert 3 * len(quasi.history["value"]) < len(plain.history["value"])


@pytest.mark.parametrize(
    "constraint", [None, bl.Box(-0.5, 0.9), bl.Ball(1.0), {"a": bl.Box(0, 0.2), "b": bl.Simplex()}]
)
def test_spg_finds_the_minimiser_over_any_set(constraint):
    """Rosenbrock's function, whose curvatures differ a thousandfold: where λ = P(λ − ∇f), the gradient by autograd."""
    start = {"a": torch.tensor([0.1]).double(), "b": torch.tensor([0.4, 0.6]).double()}
    problem = quadratic(lambda w, lam, x: rosenbrock(flat(w)))
    sol = solve(bl.SPG(1e-13), problem, start, constraint=constraint, tol=None, iterations=500)
    point = flat(sol.outer).requires_grad_()
    (grad,) = torch.autograd.grad(rosenbrock(point), point)
    moved = {"a": (point - grad)[:1].detach(), "b": (point - grad)[1:].detach()}
    limit = as_constraint(constraint)
    assert sol.outcome.kind == "converged"
    assert torch.allclose(flat(moved if limit is None else limit.project(moved)), point.detach(), atol=1e-4)
    assert sol.value < 0.9 * float(rosenbrock(flat(start)))


def test_spg_ends_in_words():
    zero = {"a": torch.zeros(1, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    rising = quadratic(lambda w, lam, x: flat(w).sum())
    corner = solve(bl.SPG(), rising, zero, tol=None, constraint=bl.Box(0, 1))
    assert corner.outcome == "Converged after 0 steps: the projected gradient step does not move λ."

    def wrong_slope(w, lam, x):
        return sum(v.abs().sum() + (v - v.detach()).sum() for v in w.values())

    problem = bl.Problem(rising.inner, wrong_slope, rising.init, check_derivatives=False)
    stuck = solve(bl.SPG(), problem, zero, tol=None)
    assert "no step along the hypergradient improves f_T" in stuck.outcome and stuck.value == 0


def test_lbfgsb_ends_in_words():
    assert solve(bl.LBFGSB(max_iter=1), tol=None).outcome == (
        "Ran all 1 iterations of L-BFGS-B; raise max_iter to go on."
    )
    done = solve(bl.LBFGSB(tol=1e-3), tol=None)
    assert done.outcome.startswith("Converged after") and done.outcome.kind == "converged"

    def wrong_slope(w, lam, x):
        """|λ| at 0 with a subgradient that is no descent direction."""
        return sum(v.abs().sum() + (v - v.detach()).sum() for v in w.values())

    zero = {"a": torch.zeros(1, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    problem = quadratic(wrong_slope)
    problem = bl.Problem(problem.inner, problem.outer, problem.init, check_derivatives=False)
    stuck = solve(bl.LBFGSB(), problem, zero, tol=None)
    assert "no step along the hypergradient improves f_T" in stuck.outcome and stuck.value == 0


@pytest.mark.parametrize(
    "constraint",
    [bl.NonNegative(), {"a": bl.Box(0, 2), "b": None}, bl.Box({"a": [0.0], "b": [0.0, -9.0]}, math.inf)],
    ids=["non-negative", "per leaf", "tree"],
)
def test_lbfgsb_takes_everything_that_is_a_box(constraint):
    if isinstance(constraint, bl.Box):
        constraint = bl.Box({"a": torch.zeros(1), "b": torch.tensor([0.0, -9.0])}, math.inf)
    sol = solve(bl.LBFGSB(), constraint=constraint)
    expected = solve(bl.Descent(lambda p: torch.optim.SGD(p, lr=0.3)), constraint=constraint)
    assert relative_error(sol.outer, expected.outer) < 1e-6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"constraint": bl.Ball(1.0)}, "Ball.*Pass a Box"),
        ({"constraint": {"a": bl.Box(0, 1), "b": bl.Simplex()}}, "Simplex.*Descent projects onto any"),
        ({"tasks": lambda k: NOTHING}, "LBFGSB compares values"),
        ({"start": "online", "method": bl.Forward()}, "LBFGSB compares values"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=1)}, "settings of Descent"),
        ({"algorithm": bl.LBFGSB}, "Pass an instance"),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused(settings, words):
    arguments = {"algorithm": bl.LBFGSB(), "dynamics": bl.GradientDescent(0.5), "steps": 1, **settings}
    lam = {"a": torch.zeros(1), "b": torch.zeros(2)}
    with pytest.raises(bl.BilevelError, match=words):
        bl.solve(quadratic(), lam, arguments.pop("tasks", NOTHING), **arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bl.LBFGSB(max_iter=0),
        lambda: bl.LBFGSB(tol=-1),
        lambda: bl.LBFGSB(first_step=0),
        lambda: bl.LBFGSB(memory=1.5),
        lambda: bl.SPG(memory=0),
        lambda: bl.SPG(tol=-1),
        lambda: bl.SPG(first_step=math.inf),
        lambda: bl.Descent(torch.optim.SGD([torch.zeros(1)], lr=1)),
        lambda: bl.SRBA(period=2.5),
    ],
)
def test_settings_that_make_no_sense(make):
    with pytest.raises(bl.BilevelError):
        make()


def test_without_scipy_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(bl.BilevelError, match="LBFGSB needs scipy"):
        solve(bl.LBFGSB())


def test_single_precision_stays_single():
    lam = {"a": torch.tensor([0.5]), "b": torch.zeros(2)}
    problem = bl.Problem(
        quadratic().inner,
        lambda w, lam, x: ((flat(w) - TARGET.float()) ** 2).sum(),
        quadratic().init,
    )
    sol = solve(bl.LBFGSB(), problem, {k: v.float() for k, v in lam.items()}, constraint=bl.Box(-0.1, 0.7), tol=None)
    assert flat(sol.outer).dtype == torch.float32
    assert torch.equal(flat(sol.outer), torch.tensor([0.7, 0.7, -0.1], dtype=torch.float32))
