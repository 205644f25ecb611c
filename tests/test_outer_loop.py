"""The outer loop."""

import signal

import numpy as np
import pytest
import torch

import bilevel as bl
from bilevel.testing import relative_error
from bilevel.testing.problems import examples

STEP = bl.GradientDescent(0.3)


def run(example=None, **settings):
    example = example or examples()[0]
    settings = {
        "dynamics": STEP,
        "steps": 20,
        "iterations": 10,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        **settings,
    }
    return bl.solve(example.problem, example.lam, settings.pop("tasks", example.task), **settings)


def test_gradient_descent_by_hand():
    example = examples()[0]
    lam = {k: v.clone() for k, v in example.lam.items()}
    values = []
    for _ in range(5):
        result = bl.hypergradient(example.problem, lam, example.task, dynamics=STEP, steps=20)
        values.append(float(result.value))
        lam = {k: v - 0.1 * result.grad[k] for k, v in lam.items()}
    sol = run(iterations=5)
    assert relative_error(sol.outer, lam) < 1e-12
    assert np.allclose(sol.history["value"], values, rtol=1e-12)
    final = bl.hypergradient(example.problem, lam, example.task, dynamics=STEP, steps=20)
    assert sol.value == pytest.approx(float(final.value)) and relative_error(sol.inner, final.inner) < 1e-12
    assert sol.outcome == "Ran all 5 hyperiterations." and sol.outcome.kind == "finished"
    assert all(isinstance(array, np.ndarray) and len(array) == 5 for array in sol.history.values())


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad], ids=lambda o: o.__name__
)
def test_any_torch_optimiser(optimizer):
    sol = run(optimizer=lambda p: optimizer(p, lr=0.05), iterations=15)
    assert sol.value < sol.history["value"][0]


def test_an_optimiser_that_evaluates_f_several_times():
    sol = run(
        optimizer=lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
        dynamics=bl.GradientDescent(0.05),
        iterations=4,
    )
    plain = run(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), dynamics=bl.GradientDescent(0.05), iterations=4)
    assert sol.outcome.ok and sol.value < plain.value


def test_schedulers():
    rates = []
    make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731

    def watch(kind):
        def build(optimizer):
            rates.append(optimizer)
            return kind(optimizer)

        return build

    run(optimizer=make, scheduler=watch(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)), iterations=3)
    assert rates[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    run(
        optimizer=make,
        scheduler=watch(lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1e9)),
        iterations=4,
    )
    assert rates[1].param_groups[0]["lr"] < 0.1


def test_lam_stays_in_the_constraint():
    example = examples()[0]
    seen = []
    box = {"penalty": bl.Box(-0.5, 0.2), "shift": bl.NonNegative(), "start": bl.Ball(0.3)}
    sol = run(
        constraint=box,
        callbacks=[lambda it: seen.append(it.lam)],
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        iterations=20,
    )
    for lam in [*seen, sol.outer]:
        assert (
            bool(((lam["penalty"] >= -0.5) & (lam["penalty"] <= 0.2)).all())
            and float(lam["shift"]) >= 0
            and float(lam["start"].norm()) <= 0.3 + 1e-12
        )
    assert float(example.lam["penalty"].min()) < -0.5, "the start lay outside, and was projected"


def test_converged_at_a_constrained_minimiser():
    problem = bl.Problem(lambda w, lam, _: (w - lam) ** 2, lambda w, lam, _: (w - 3) ** 2, lambda lam: torch.zeros(()))
    sol = bl.solve(
        problem,
        torch.tensor(0.0),
        bl.Task(None, None),
        dynamics=bl.GradientDescent(0.5),
        steps=1,
        constraint=bl.Box(-1, 1),
        iterations=50,
        tol=1e-8,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.2),
    )
    assert float(sol.outer) == 1.0 and sol.outcome.kind == "converged" and len(sol.history["value"]) < 10


def test_patience_returns_the_best():
    sol = run(optimizer=lambda p: torch.optim.SGD(p, lr=3.0), iterations=60, patience=5, constraint=bl.Box(-3, 3))
    assert sol.outcome.kind == "stopped early"
    assert sol.value == min(sol.history["value"])
    assert len(sol.history["value"]) < 60


def test_the_last_update_can_be_the_best():
    def one(**settings):
        return run(iterations=1, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), **settings)

    assert one(patience=5).value == one().value < one().history["value"][0]


def test_callbacks_can_stop():
    seen = []
    sol = run(callbacks=[lambda it: seen.append(it.k), lambda it: it.k == 3])
    assert seen == [0, 1, 2, 3] and sol.outcome.kind == "stopped early" and len(sol.history["value"]) == 4


def test_ctrl_c_returns_what_was_reached(ctrl_c):
    def interrupt(iteration):
        if iteration.k == 2:
            signal.raise_signal(signal.SIGINT)

    sol = run(callbacks=[interrupt])
    assert sol.outcome.kind == "interrupted" and "3 of 10" in sol.outcome
    assert relative_error(sol.outer, run(iterations=2).outer) < 1e-12


def test_a_stochastic_source_and_an_iterator():
    example = examples()[0]
    tasks = [example.task, bl.Task(example.task.train, tuple(2 * x for x in example.task.val))]
    by_function = run(tasks=lambda k: tasks[k % 2], iterations=6)
    by_iterator = run(tasks=iter([tasks[k % 2] for k in range(6)]), iterations=6)
    assert relative_error(by_function.outer, by_iterator.outer) == 0
    ended = run(tasks=iter(tasks), iterations=6)
    assert len(ended.history["value"]) == 2 and "ended after 2" in ended.outcome


def test_a_list_of_tasks_is_a_mean():
    example = examples()[0]
    doubled = run(tasks=[example.task, example.task])
    assert relative_error(doubled.outer, run().outer) < 1e-12 and len(doubled.inner) == 2


def test_a_warm_start_follows_the_minimiser_with_few_steps():
    example = examples()[0]
    base, start = example.problem, example.lam["start"]
    problem = bl.Problem(base.inner, base.outer, lambda lam: base.init({"start": start}))
    lam = {k: example.lam[k] for k in ("penalty", "shift")}
    settings = {
        "dynamics": STEP,
        "method": bl.Implicit(bl.CG(tol=1e-10)),
        "iterations": 40,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }
    exact = bl.solve(problem, lam, example.task, steps=100, **settings)
    warm = bl.solve(problem, lam, example.task, steps=5, start="warm", **settings)
    cold = bl.solve(problem, lam, example.task, steps=5, **settings)
    assert relative_error(warm.outer, exact.outer) < 0.1 * relative_error(cold.outer, exact.outer)


def test_a_warm_start_goes_on_from_an_earlier_solution():
    example = examples()[0]
    base, start = example.problem, example.lam["start"]
    problem = bl.Problem(base.inner, base.outer, lambda lam: base.init({"start": start}))
    lam = {k: example.lam[k] for k in ("penalty", "shift")}
    settings = {"dynamics": STEP, "steps": 5, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    settings["method"] = bl.Reverse()
    whole = bl.solve(problem, lam, example.task, start="warm", iterations=6, **settings)
    first = bl.solve(problem, lam, example.task, start="warm", iterations=3, callbacks=lambda it: it.k == 2, **settings)
    again = bl.hypergradient(problem, first.outer, example.task, dynamics=STEP, steps=5, start=first.inner)
    for tasks, begin in ((example.task, first.inner), ([example.task] * 2, [first.inner] * 2)):
        rest = bl.solve(problem, first.outer, tasks, start=begin, iterations=3, **settings)
        assert rest.history["value"][0] == pytest.approx(float(again.value), rel=1e-12)
        # At the same λ, w is five steps further on; then the two runs descend alike.
        assert rest.history["value"][0] != whole.history["value"][2] and rest.outcome.kind == "finished"


def test_what_cannot_be_looped_over_is_refused(tmp_path):
    for settings in (
        {"iterations": -1},
        {"start": "hot"},
        {"patience": 0},
        {"tasks": 3},
        {"tol": float("nan")},
        {"tol": -1e-3},
        {"tol": "1e-3"},
        {"checkpoint": tmp_path, "checkpoint_every": 0},
        {"checkpoint": tmp_path, "checkpoint_every": 2.5},
    ):
        with pytest.raises(bl.BilevelError):
            run(**settings)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def tuned():
    """`solve` for a problem whose w does not begin at λ, and what it returns when every inner run is restarted."""
    example = examples()[0]
    base, start = example.problem, example.lam["start"]
    problem = bl.Problem(base.inner, base.outer, lambda lam: base.init({"start": start}))
    lam = {k: example.lam[k] for k in ("penalty", "shift")}

    def tune(**settings):
        optimizer = lambda p: torch.optim.SGD(p, lr=0.2)  # noqa: E731
        settings = {"dynamics": STEP, "iterations": 200, "optimizer": optimizer, **settings}
        return bl.solve(problem, lam, example.task, **settings)

    return tune, tune(steps=30)


class TestOnline:
    """λ is updated every k inner steps and the inner run is never restarted."""

    def test_real_time_forward_carries_the_derivative_of_the_whole_past(self):
        example = examples()[1]
        settings = {"dynamics": bl.HeavyBall(0.2, 0.5), "method": bl.Forward()}
        whole = bl.hypergradient(example.problem, example.lam, example.task, steps=9, **settings)
        part = bl.hypergradient(example.problem, example.lam, example.task, steps=4, **settings)
        rest = bl.hypergradient(example.problem, example.lam, example.task, steps=5, start=part, **settings)
        assert rest.t == 9
        assert relative_error(rest.inner, whole.inner) < 1e-12 and relative_error(rest.grad, whole.grad) < 1e-12

    def test_real_time_forward_against_the_recursion_written_out(self):
        """Z ← J Z + B goes on while λ changes underneath it (Franceschi et al., 2017)."""
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(30, 4, generator=generator), torch.randn(30, generator=generator)
        problem = bl.Problem(
            lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam.exp() * w**2).sum(),
            lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
            lambda lam: torch.zeros(4),
        )
        train, val = (x[:15], y[:15]), (x[15:], y[15:])

        def phi(w, lam):
            return w - 0.1 * (2 * train[0].T @ (train[0] @ w - train[1]) / 15 + 2 * lam.exp() * w)

        lam, w, z, values = torch.zeros(4), torch.zeros(4), torch.zeros(4, 4), []
        for _ in range(12):
            for _ in range(3):
                z = torch.func.jacrev(phi, 0)(w, lam) @ z + torch.func.jacrev(phi, 1)(w, lam)
                w = phi(w, lam)
            values.append(float(((val[0] @ w - val[1]) ** 2).mean()))
            lam = lam - 2.0 * z.T @ (2 * val[0].T @ (val[0] @ w - val[1]) / 15)
        settings = {"dynamics": bl.GradientDescent(0.1), "steps": 3, "method": bl.Forward(), "iterations": 12}
        sol = bl.solve(
            problem,
            torch.zeros(4),
            bl.Task(train, val),
            start="online",
            optimizer=lambda p: torch.optim.SGD(p, lr=2.0),
            **settings,
        )
        assert np.allclose(sol.history["value"], values, rtol=1e-12)

    def test_truncated_reverse_sees_the_last_window(self):
        example = examples()[1]
        base, start = example.problem, example.lam["start"]
        problem = bl.Problem(base.inner, base.outer, lambda lam: base.init({"start": start}))
        lam = {k: example.lam[k] for k in ("penalty", "shift")}
        settings = {"dynamics": bl.HeavyBall(0.2, 0.5)}
        part = bl.hypergradient(problem, lam, example.task, steps=4, **settings)
        rest = bl.hypergradient(problem, lam, example.task, steps=5, start=part, method=bl.Reverse(), **settings)
        expected = bl.hypergradient(problem, lam, example.task, steps=9, method=bl.Truncated(5), **settings)
        assert relative_error(rest.grad, expected.grad) < 1e-12

    def test_the_step_number_goes_on(self):
        example = examples()[2]
        times = []
        task = bl.Task(lambda t: (times.append(t), example.task.train(t))[1], example.task.val)
        dynamics = bl.GradientDescent(lambda t: 0.3 / t)
        run(example, tasks=task, start="online", steps=3, iterations=4, dynamics=dynamics, method=bl.Forward())
        assert max(times) == 12

    @pytest.mark.parametrize("method", [bl.Forward(), bl.Reverse(), bl.Truncated(2)], ids=str)
    def test_one_inner_run_tunes_lam(self, method, tuned):
        tune, offline = tuned
        sol = tune(steps=3, method=method, start="online")
        assert sol.value < 1.02 * offline.value < 0.9 * offline.history["value"][0]


def test_callbacks_may_keep_what_they_are_given():
    seen = []
    sol = run(callbacks=[lambda it: seen.append(it.lam["shift"])])
    assert len({float(value) for value in seen}) == 10 and float(seen[-1]) != float(sol.outer["shift"])


def test_a_failure_on_the_way_keeps_what_was_reached():
    """The curvature turns negative as λ grows, and CG refuses."""
    problem = bl.Problem(
        lambda w, lam, _: ((2 - lam) * w**2).sum() / 2 - w.sum(),
        lambda w, lam, _: -(w**2).sum(),
        lambda lam: torch.zeros(2),
    )
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 5, "method": bl.Implicit(), "iterations": 50}
    sol = bl.solve(
        problem, torch.zeros(2), bl.Task(None, None), optimizer=lambda p: torch.optim.SGD(p, lr=1.0), **settings
    )
    assert sol.outcome.kind == "failed" and "curvature" in sol.outcome and len(sol.history["value"]) >= 1
    assert bool(torch.isfinite(sol.outer).all())


def test_functions_that_write_in_place_cannot_reach_the_users_lam():
    lam = torch.ones(3)
    problem = bl.Problem(
        lambda w, lam, _: (w**2 * lam).sum(), lambda w, lam, _: (w**2).sum(), lambda lam: lam.detach().mul_(1.0) + 1.0
    )
    wild = bl.Problem(problem.inner, problem.outer, lambda lam: lam.detach().zero_())
    for one in (problem, wild):
        with pytest.raises(bl.BilevelError, match="init changed λ in place"):
            bl.hypergradient(one, lam, bl.Task(None, None), dynamics=bl.GradientDescent(0.1), steps=3)
    assert torch.equal(lam, torch.ones(3))


def solve_quadratic(**settings):
    problem = bl.Problem(
        lambda w, lam, _: ((1 + lam.exp()) * w**2).sum() / 2 - w.sum(),
        lambda w, lam, _: ((w - 0.3) ** 2).sum(),
        lambda lam: torch.zeros(4),
    )
    settings = {"dynamics": bl.HeavyBall(0.2, 0.5), "steps": 100, **settings}
    return bl.solve(problem, torch.zeros(4), bl.Task(None, None), **settings)


def test_no_iterations_are_evaluated_by_the_method_that_was_passed():
    sol = solve_quadratic(iterations=0, method=bl.Implicit(bl.CG()))
    assert sol.stats.method == "Implicit"


@pytest.mark.parametrize("method", [bl.Unrolled, lambda: bl.Reverse()], ids=["a class", "a function of nothing"])
def test_what_is_no_method_is_refused(method):
    with pytest.raises(bl.BilevelError, match="method"):
        run(method=method)


def test_warm_starts_across_methods_of_different_kinds():
    """The adjoint of a fixed point includes the velocity and is no guess for that of the minimiser."""

    def method(k):
        return bl.Implicit(bl.FixedPoint(), condition="fixed-point") if k < 2 else bl.Implicit(bl.CG())

    sol = solve_quadratic(method=method, start="warm", iterations=4)
    assert sol.outcome.kind == "finished" and len(sol.history["value"]) == 4, sol.outcome
