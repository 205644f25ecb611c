"""Methods without second derivatives: what they approximate, how the error falls, and what they need."""

import math
from itertools import pairwise

import pytest
import torch

import bilevel as bl
from bilevel.testing import methods as battery
from bilevel.testing import relative_error
from bilevel.testing.problems import encoded, examples


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def smooth():
    """A strongly convex problem in four weights, not quadratic, with a penalty for each."""
    generator = torch.Generator().manual_seed(2)
    X, y = torch.randn(12, 4, generator=generator), torch.randn(12, generator=generator)
    problem = bl.Problem(
        inner=lambda w, lam, d: torch.log(torch.cosh(d[0] @ w - d[1])).mean() + 0.5 * (lam.exp() * w**2).sum(),
        outer=lambda w, lam, d: torch.log(torch.cosh(d[0] @ w - d[1])).mean() + 0.1 * (w**4).sum(),
        init=lambda lam: torch.zeros(4),
    )
    return problem, torch.linspace(-1, 0.5, 4), bl.Task((X[:6], y[:6]), (X[6:], y[6:]))


SETTINGS = {"dynamics": bl.GradientDescent(0.4), "steps": 200}


def limit():
    """∇f to rounding: Newton's method and a direct solver."""
    method = bl.Implicit(bl.Direct(), newton=1e-13)
    return bl.hypergradient(*smooth(), method=method, **SETTINGS).grad


class TestF2SA:
    @pytest.mark.parametrize("order", [1, 2, 4])
    def test_the_error_falls_with_the_order(self, order):
        exact, errors = limit(), []
        for weight in (0.16, 0.08, 0.04):
            found = bl.hypergradient(*smooth(), method=bl.F2SA(order, weight), **SETTINGS)
            errors.append(relative_error(found.grad, exact))
        slopes = [math.log2(a / b) for a, b in pairwise(errors)]
        assert all(abs(slope - order) < 0.35 * order for slope in slopes), (errors, slopes)

    @pytest.mark.parametrize("order, allowed", [(1, 1e-3), (2, 1e-5), (4, 1e-6)])
    def test_the_default_weight_is_close_to_the_limit(self, order, allowed):
        assert relative_error(bl.hypergradient(*smooth(), method=bl.F2SA(order), **SETTINGS).grad, limit()) < allowed

    @pytest.mark.parametrize("order", [2, 4])
    @pytest.mark.parametrize("weight, steps", [(0.16, 200), (0.05, 200), (1e-3, 10), (1e-3, 20), (0.05, 30)])
    def test_its_own_estimate_is_no_smaller_than_its_error(self, order, weight, steps):
        found = bl.hypergradient(*smooth(), method=bl.F2SA(order, weight), **{**SETTINGS, "steps": steps})
        exact = limit()
        error = float((found.grad - exact).norm())
        assert error <= 1.5 * found.stats.error + 1e-9
        assert found.stats.error < 0.7 * float(exact.norm())

    def test_certify_measures_its_distance_from_the_limit(self):
        method = bl.F2SA(1, 0.05)
        certificate = bl.certify(*smooth(), method=method, **SETTINGS)
        error = float((bl.hypergradient(*smooth(), method=method, **SETTINGS).grad - limit()).norm())
        assert certificate.applies and certificate.hypergradient_error == pytest.approx(error, rel=1e-3)

    @pytest.mark.parametrize("steps", [20, 200])
    def test_its_certificate_holds_and_falls_with_the_order(self, steps):
        exact, bounds = limit(), []
        for order in (1, 2, 4):
            method, settings = bl.F2SA(order, 0.08), {**SETTINGS, "steps": steps}
            error = float((bl.hypergradient(*smooth(), method=method, **settings).grad - exact).norm())
            bounds.append(bl.certify(*smooth(), method=method, **settings).hypergradient_bound)
            assert error <= bounds[-1] < 1.01 * error
        assert bounds[0] > 5 * bounds[1] > 25 * bounds[2]

    def test_it_counts_its_runs_and_takes_first_derivatives_only(self):
        class Once(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.cosh()

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, grad):
                return grad * ctx.saved_tensors[0].sinh()

        problem, lam, task = smooth()
        once = bl.Problem(
            inner=lambda w, lam, d: torch.log(Once.apply(d[0] @ w - d[1])).mean() + 0.5 * (lam.exp() * w**2).sum(),
            outer=problem.outer,
            init=problem.init,
        )
        for method, runs in ((bl.F2SA(1), 3), (bl.F2SA(), 4), (bl.F2SA(4), 6)):
            found = bl.hypergradient(once, lam, task, method=method, **SETTINGS)
            assert found.stats.steps == runs * 200 and relative_error(found.grad, limit()) < 1e-3
        with pytest.raises(bl.BilevelError, match="derivative"):
            bl.hypergradient(once, lam, task, method=bl.Reverse(), **SETTINGS)
        exact = bl.hypergradient(problem, lam, task, method=bl.Reverse(), **SETTINGS).grad
        found = bl.hypergradient(once, lam, task, method=bl.FiniteDifference(), **SETTINGS).grad
        assert relative_error(found, exact) < 1e-8

    def test_what_cannot_work_is_refused(self):
        problem, lam, task = smooth()
        for method, says in ((bl.F2SA(3), "1, 2 or 4"), (bl.F2SA(weight=0), "adds nothing")):
            with pytest.raises(bl.BilevelError, match=says):
                bl.hypergradient(problem, lam, task, method=method, **SETTINGS)
        with pytest.raises(bl.BilevelError, match="function of t"):
            bl.hypergradient(problem, lam, bl.Task(lambda t: task.train, task.val), method=bl.F2SA(), **SETTINGS)
        with pytest.raises(bl.BilevelError, match="F2SA\\(\\) differentiates ∇L = 0"):
            bl.hypergradient(problem, lam, task, dynamics=bl.AdamW(0.1, weight_decay=0.1), steps=300, method=bl.F2SA())
        equation = bl.Problem(
            fixed_point=lambda w, lam, d: 0.5 * w + lam, outer=lambda w, lam, d: w.sum(), init=lambda lam: lam
        )
        with pytest.raises(bl.BilevelError, match=r"Picard.* solves equations.*Use Implicit\(\)"):
            bl.hypergradient(equation, lam, task, dynamics=bl.Picard(), steps=9, method=bl.F2SA())
        both = bl.Problem(lambda w, lam, d: problem.inner(w, lam, d), problem.outer, problem.init)
        with pytest.raises(bl.BilevelError, match="penalty of the dynamics"):
            bl.hypergradient(
                both,
                lam,
                task,
                dynamics=lambda lam: bl.ISTA(0.4, bl.L1(lam.exp().sum() / 100)),
                steps=50,
                method=bl.F2SA(),
            )

    def test_a_weight_that_leaves_no_minimiser_is_refused(self):
        problem, lam, task = smooth()
        with pytest.raises(bl.DivergenceError, match="smaller F2SA"):
            bl.hypergradient(problem, lam, task, method=bl.F2SA(weight=50.0), **SETTINGS)


class TestFiniteDifference:
    def test_one_step_is_the_architecture_gradient_of_darts(self):
        problem, lam, task = smooth()
        w, lr, h = torch.linspace(-1, 1, 4), 0.3, 1e-5

        def slope(function, *inputs):
            live = [x.clone().requires_grad_() for x in inputs]
            return torch.autograd.grad(function(*live), live, allow_unused=True)

        inner, outer = (lambda w, lam: problem.inner(w, lam, task.train)), (lambda w: problem.outer(w, lam, task.val))
        after = w - lr * slope(inner, w, lam)[0]
        v = slope(outer, after)[0]
        above, below = (slope(inner, w + sign * h * v, lam)[1] for sign in (1, -1))
        expected = -lr * (above - below) / (2 * h)
        found = bl.hypergradient(
            problem, lam, task, dynamics=bl.GradientDescent(lr), steps=1, start=w, method=bl.FiniteDifference()
        )
        assert relative_error(found.grad, expected) < 1e-6

    def test_it_learns_step_sizes_and_truncates(self):
        problem, lam, task = smooth()
        wide = bl.Problem(
            lambda w, lam, d: problem.inner(w, lam["penalty"], d),
            lambda w, lam, d: problem.outer(w, lam["penalty"], d),
            lambda lam: torch.zeros(4),
        )
        settings = {"dynamics": lambda lam: bl.Adam(lam["lr"].exp()), "steps": 30}
        lam = {"penalty": lam, "lr": torch.tensor(-2.0)}
        for ours, exact in ((bl.FiniteDifference(), bl.Reverse()), (bl.FiniteDifference(k=7), bl.Truncated(7))):
            found, expected = (bl.hypergradient(wide, lam, task, method=m, **settings).grad for m in (ours, exact))
            assert relative_error(found, expected) < 1e-7

    def test_its_memory_does_not_hold_activations(self):
        generator = torch.Generator().manual_seed(0)
        X = torch.randn(4000, 5, generator=generator)
        problem = bl.Problem(
            inner=lambda w, lam, X: torch.tanh(X @ w - 1).square().mean() + lam.exp() * w.square().sum(),
            outer=lambda w, lam, X: (X @ w).square().mean(),
            init=lambda lam: torch.ones(5),
        )
        args = problem, torch.tensor(-2.0), bl.Task(X, X)
        settings = {"dynamics": bl.GradientDescent(0.1), "steps": 50}
        ours = bl.hypergradient(*args, method=bl.FiniteDifference(), **settings)
        full = bl.hypergradient(*args, method=bl.Unrolled(), **settings)
        assert relative_error(ours.grad, full.grad) < 1e-7
        assert ours.stats.peak_memory < full.stats.peak_memory / 100


@pytest.mark.parametrize("method", [bl.ZeroOrder(2), bl.F2SA()], ids=str)
def test_the_error_of_a_list_of_tasks_is_not_that_of_its_first(method):
    problem, lam, task = smooth()
    X, y = task.train
    found = bl.hypergradient(problem, lam, [bl.Task((X / 100, y), task.val), task], method=method, **SETTINGS)
    errors = [one.stats.error for one in found.tasks]
    assert found.stats.error == pytest.approx(sum(errors) / 2) and errors[0] != pytest.approx(errors[1])


class TestZeroOrder:
    def test_a_leaf_that_matters_only_later(self):
        """At the first call it has no effect within reach, and its gradient is zero; at the second it has."""
        hinge = bl.Problem(
            lambda w, lam, x: (w - lam["a"]).square().sum(),
            lambda w, lam, x: w.square().sum() + torch.relu(lam["b"]).sum(),
            lambda lam: torch.zeros(2),
        )
        slopes = []
        for at in (-1.0, 1.0):
            lam = {"a": torch.ones(2), "b": torch.full((2,), at), "c": torch.zeros(1)}
            settings = {"dynamics": bl.GradientDescent(0.2), "steps": 5, "allow_unused": True}
            found = bl.hypergradient(hinge, lam, bl.Task(None, None), method=bl.ZeroOrder(pairs=5), **settings)
            slopes.append(found.grad["b"])
            assert not found.grad["c"].any()
        assert not slopes[0].any()
        torch.testing.assert_close(slopes[1], torch.ones(2), rtol=1e-5, atol=0)

    def test_the_calls_of_the_battery(self):
        from bilevel.testing import battery_cases

        method = bl.ZeroOrder(pairs=24)
        case = battery_cases()[0]
        battery._check_calls(method, case, method.tolerance)
        battery._check_unused(method, case)
        here = encoded()
        found, written = (
            bl.hypergradient(p, here.lam, here.task, dynamics=bl.GradientDescent(0.3), steps=5, method=method).grad
            for p in (here.problem, here.without_encode)
        )
        assert relative_error(found, written) < 1e-8

    def test_few_directions_are_unbiased_and_say_their_error(self):
        args, settings = smooth(), {"dynamics": bl.GradientDescent(0.4), "steps": 3}
        exact = bl.hypergradient(*args, method=bl.Reverse(), **settings).grad
        found = [bl.hypergradient(*args, method=bl.ZeroOrder(1, seed=seed), **settings) for seed in range(150)]
        grads = torch.stack([hg.grad for hg in found])
        errors = (grads - exact).norm(dim=1)
        # With one of four directions the error is √(4 − 1) ‖∇f_T‖; the mean of 150 has a twelfth of it.
        assert float((grads.mean(0) - exact).norm()) < 2 * 3**0.5 / 150**0.5 * float(exact.norm())
        assert float(errors.square().mean().sqrt()) == pytest.approx(3**0.5 * float(exact.norm()), rel=0.15)
        said = torch.tensor([hg.stats.error for hg in found]).square().mean().sqrt()
        assert float(said) == pytest.approx(3**0.5 * float(exact.norm()), rel=0.15)

    def test_directions_change_with_lam_and_seed_and_with_nothing_else(self):
        problem, lam, task = smooth()
        settings = {"dynamics": bl.GradientDescent(0.4), "steps": 5}
        one, two, other, elsewhere = (
            bl.hypergradient(problem, at, task, method=bl.ZeroOrder(2, seed=seed), **settings).grad
            for at, seed in ((lam, 0), (lam, 0), (lam, 1), (lam + 1e-9, 0))
        )
        assert torch.equal(one, two) and not torch.allclose(one, other) and not torch.allclose(one, elsewhere)

    def test_an_accuracy_can_be_the_outer_objective(self):
        generator = torch.Generator().manual_seed(0)
        X = torch.randn(400, 2, generator=generator)
        y = (X[:, 0] > 0.3).double()
        problem = bl.Problem(
            inner=lambda w, lam, d: torch.nn.functional.binary_cross_entropy_with_logits(d[0] @ w + lam, d[1]),
            outer=lambda w, lam, d: ((d[0] @ w + lam > 0).double() != d[1]).double().mean(),
            init=lambda lam: torch.zeros(2),
        )
        lam, task = torch.tensor(2.0), bl.Task((X[:200], y[:200]), (X[200:], y[200:]))
        settings = {"dynamics": bl.GradientDescent(0.5), "steps": 40}
        with pytest.raises(bl.BilevelError, match="accuracy cannot be an objective"):
            bl.hypergradient(problem, lam, task, method=bl.Reverse(), **settings)
        sol = bl.solve(
            problem,
            lam,
            task,
            method=bl.ZeroOrder(1, sigma=0.5),
            optimizer=lambda leaves: torch.optim.SGD(leaves, lr=4.0),
            iterations=60,
            **settings,
        )
        assert sol.history["value"][0] >= 0.3 and sol.value < 0.05

    def test_a_move_out_of_the_domain_of_lam_is_named(self):
        problem, _, task = smooth()
        rooted = bl.Problem(lambda w, lam, d: problem.inner(w, lam.sqrt(), d), problem.outer, problem.init)
        with pytest.raises(bl.DivergenceError, match="λ left its domain"):
            bl.hypergradient(rooted, torch.full((4,), 0.1), task, method=bl.ZeroOrder(sigma=1.0), **SETTINGS)

    def test_a_leaf_that_changes_nothing_is_refused(self):
        example = examples()[0]
        lam = {**example.lam, "idle": torch.ones(3)}
        settings = {"dynamics": bl.GradientDescent(0.3), "steps": 3, "method": bl.ZeroOrder()}
        with pytest.raises(bl.BilevelError, match=r"λ\['idle'\] moved"):
            bl.hypergradient(example.problem, lam, example.task, **settings)
        found = bl.hypergradient(example.problem, lam, example.task, allow_unused=True, **settings)
        assert float(found.grad["idle"].abs().max()) == 0 and float(found.grad["penalty"].abs().max()) > 0

    @pytest.mark.parametrize("settings, says", [({"pairs": 0}, "number of directions"), ({"sigma": -1}, "change λ")])
    def test_settings_that_cannot_work(self, settings, says):
        with pytest.raises(bl.BilevelError, match=says):
            bl.hypergradient(*smooth(), method=bl.ZeroOrder(**settings), **SETTINGS)


class TestRoughness:
    """f_T of gradient descent on (w² − λ)²/4: smooth for short steps, chaotic for long ones."""

    @staticmethod
    def look(lr, steps, lam=2.0, **settings):
        problem = bl.Problem(
            inner=lambda w, lam, d: (w**2 - lam) ** 2 / 4,
            outer=lambda w, lam, d: (w - 1) ** 2,
            init=lambda lam: torch.full_like(lam, 0.3),
        )
        run = {"dynamics": bl.GradientDescent(lr), "steps": steps}
        return bl.roughness(problem, torch.tensor(lam), bl.Task(None, None), **run, **settings)

    def test_it_fires_for_a_chaotic_run_only(self):
        for lr, steps in ((0.1, 10), (0.1, 100), (0.4, 100), (0.8, 10)):
            assert self.look(lr, steps).useful
        for lr, steps in ((0.8, 100), (0.95, 10), (0.95, 100)):
            found = self.look(lr, steps)
            assert not found.useful and found.ratio > 10 and found.kept < found.length / 50
            assert "ZeroOrder" in found.outcome

    def test_a_quadratic_keeps_half_of_its_promise_up_to_the_minimiser(self):
        # w_T = λ, so f_T = (λ − 1)²: a step of s gains 2 s d − s², at least half of 2 s d up to s = d, the distance.
        problem = bl.Problem(
            lambda w, lam, x: (w - lam) ** 2, lambda w, lam, x: (w - 1) ** 2, lambda lam: torch.zeros_like(lam)
        )
        settings = {"dynamics": bl.GradientDescent(0.5), "steps": 1}
        for d in (1.0, 0.25, 1e-3):
            found = bl.roughness(problem, torch.tensor(1.0 + d), bl.Task(None, None), length=1.01, **settings)
            assert d / 4 < found.kept <= d * 1.0001 and found.useful and found.ratio <= 1 + 1e-9

    def test_settings_that_cannot_work(self):
        with pytest.raises(bl.BilevelError, match="nothing to compare"):
            self.look(0.1, 10, length=-1.0)
