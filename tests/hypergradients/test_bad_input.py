"""What bad input gets: a BilevelError that names the thing, before any long work, with nothing of the user's
changed."""

from dataclasses import dataclass

import pytest
import torch

import bilevel as bl
from asking import ask, data, learned_start, refused, ridge


def test_the_baseline_works():
    assert ask().grad.shape == (3,)


@dataclass(eq=False)
class Pair:
    """A class that torch and this library know nothing about."""

    one: torch.Tensor
    two: torch.Tensor


class TestObjectives:
    def test_not_scalar(self):
        with refused("inner", r"\[6\]", "mean"):
            ask(ridge(inner=lambda w, lam, b: (b[0] @ w - b[1]) ** 2 + lam.exp().sum()))
        with refused("outer", r"\[4\]"):
            ask(ridge(outer=lambda w, lam, b: b[0] @ w))

    def test_not_a_tensor(self):
        with refused("outer", "float"):
            ask(ridge(outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean().item()))

    def test_not_differentiable(self):
        with refused("outer", "not differentiable in w"):
            ask(ridge(outer=lambda w, lam, b: ((b[0] @ w > 0) == (b[1] > 0)).double().mean()))
        with refused("inner", "not differentiable in w"):
            ask(ridge(inner=lambda w, lam, b: (lam**2).sum()))

    def test_shapes_that_do_not_fit(self):
        with refused("inner", "failed", "batch"):
            ask(task=bl.Task((torch.randn(6, 4), torch.randn(6)), data(4)))

    def test_dtypes_that_do_not_fit(self):
        with refused("inner", "float32"):
            ask(task=bl.Task(data(dtype=torch.float32), data(4)))

    def test_devices_that_do_not_fit(self):
        with refused("inner", "meta"):
            ask(task=bl.Task(tuple(x.to("meta") for x in data()), data(4)))


class TestLam:
    @pytest.mark.parametrize("dtype", [torch.complex128, torch.int64, torch.bool])
    def test_no_real_number(self, dtype):
        with refused(r"λ\['a'\]", "complex|int64|bool"):
            ask(lam={"a": torch.zeros(3).to(dtype)})

    def test_a_plain_number(self):
        with refused(r"λ\['lr'\]", "torch.tensor"):
            ask(lam={"lr": 0.1})

    @pytest.mark.parametrize("make", [Pair, lambda *parts: {"all": set(parts)}, lambda *parts: {"a": parts}.values()])
    def test_something_else_around_tensors(self, make):
        with refused("λ", "is no tensor", "a dict, list or tuple of tensors"):
            ask(lam=make(torch.zeros(3), torch.ones(3)))

    def test_no_leaves(self):
        with refused("no tensors"):
            ask(lam={})

    def test_reaches_nothing(self):
        problem = ridge(inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam["used"] ** 2 * w**2).sum())
        lam = {"used": torch.ones(3), "lost": {"deep": torch.ones(2)}}
        with refused(r"λ\['lost'\]\['deep'\]", "allow_unused"):
            ask(problem, lam)
        assert float(ask(problem, lam, allow_unused=True).grad["lost"]["deep"].abs().sum()) == 0

    def test_cut_off_by_detach(self):
        with refused("λ", "detach"):
            ask(ridge(inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam.detach() * w**2).sum()))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, value):
        with refused("λ", "1 of 3", error=bl.DivergenceError):
            ask(lam=torch.tensor([0.0, value, 0.0]))


class TestSteps:
    @pytest.mark.parametrize("steps", [-1, 2.5, "3", True])
    def test_no_number_of_steps(self, steps):
        with refused("steps"):
            ask(steps=steps)

    def test_zero_steps_is_the_start(self):
        lam = torch.ones(3)
        result = ask(ridge(init=lambda lam: lam), lam, steps=0)
        x, y = data(4)
        assert torch.allclose(result.value, ((x @ lam - y) ** 2).mean())
        assert torch.allclose(result.grad, 2 * x.T @ (x @ lam - y) / 4)


class TestTasks:
    def test_empty(self):
        with refused("empty", r"train\[0\]", r"\[0, 3\]"):
            ask(task=bl.Task((torch.zeros(0, 3), torch.zeros(0)), data(4)))
        with refused("empty"):
            ask(task=[])

    def test_not_a_task(self):
        with refused("Task", "tuple"):
            ask(task=[(data(), data(4))])

    def test_a_stateful_sampler(self):
        x, y = data(12)
        calls = iter(range(1000))

        def train(t):
            rows = torch.arange(4) + next(calls) % 8
            return x[rows], y[rows]

        with refused("not a pure function of t", "manual_seed"):
            ask(task=bl.Task(train, data(4)))

    def test_a_random_sampler_without_a_seed(self):
        x, y = data(12)

        def train(t):
            rows = torch.randperm(12)[:4]
            return x[rows], y[rows]

        with refused("not a pure function of t"):
            ask(task=bl.Task(train, data(4)))

    @pytest.mark.parametrize("part", ["train", "val"])
    def test_nan_in_the_data(self, part):
        x, y = data()
        x[2, 1] = float("nan")
        bad = (x, y)
        task = bl.Task(bad, data(4)) if part == "train" else bl.Task(data(), bad)
        with refused("inner" if part == "train" else "outer", "1 entries NaN", r"\[2, 1\]", error=bl.DivergenceError):
            ask(task=task)


class TestImpureSteps:
    def test_dropout_without_a_seed_is_noticed_when_a_step_is_replayed(self):
        layer = torch.nn.Dropout()

        def inner(w, lam, b):
            return (layer(torch.ones(6)) * (b[0] @ w - b[1]) ** 2).mean() + (lam.exp() * w**2).sum()

        problem, method = ridge(inner=inner), bl.Reverse(group_bytes=0)
        with refused("Step 1 gave another result", "pure"):
            ask(problem, method=method)
        # What was checked is remembered; the steps that are replayed tell.
        layer.eval()
        ask(problem, method=method)
        layer.train()
        with refused("gave another result when it was computed again", "pure"):
            ask(problem, method=method)


class TestWrongPairs:
    def test_implicit_cannot_see_a_step_size(self):
        with refused("Implicit cannot see", r"λ\['lr'\]", "the dynamics", "Reverse"):
            ask(
                ridge(inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam["l2"].exp() * w**2).sum()),
                {"l2": torch.zeros(3), "lr": torch.tensor(-2.0)},
                dynamics=lambda lam: bl.GradientDescent(lam["lr"].exp()),
                method=bl.Implicit(),
            )

    def test_implicit_cannot_see_a_start(self):
        with refused("Implicit cannot see", "the start"):
            ask(learned_start(), torch.zeros(3), method=bl.Implicit())

    def test_first_order_cannot_see_the_inner_problem(self):
        with refused("FirstOrder cannot see", "the inner objective"):
            ask(method=bl.FirstOrder())

    def test_truncated_cannot_see_a_start(self):
        with refused("Truncated cannot see", "the start"):
            ask(learned_start(), torch.zeros(3), method=bl.Truncated(2))

    def test_spectral_needs_a_quadratic(self):
        with refused("Spectral", "quadratic", "Reverse"):
            ask(
                ridge(inner=lambda w, lam, b: torch.cosh(b[0] @ w - b[1]).mean() + (lam.exp() * w**2).sum()),
                method=bl.Spectral(),
            )

    @pytest.mark.parametrize(
        "dynamics",
        [bl.Adam(0.1), bl.GradientDescent(lambda t: 0.1 / t), bl.GradientDescent(torch.full((3,), 0.1))],
        ids=["adam", "schedule", "per weight"],
    )
    def test_spectral_needs_constant_plain_steps(self, dynamics):
        with refused("Spectral"):
            ask(dynamics=dynamics, method=bl.Spectral())

    def test_cg_needs_a_symmetric_map(self):
        with refused("CG", "not symmetric", "Direct"):
            ask(dynamics=bl.HeavyBall(0.1, 0.5), method=bl.Implicit(bl.CG(), condition="fixed-point"))

    def test_cg_needs_positive_curvature(self):
        problem = ridge(inner=lambda w, lam, b: (lam.exp() * w**2).sum() - 5 * (w**2).sum() + w.sum())
        with refused("CG", "curvature", "positive"):
            ask(problem, steps=2, dynamics=bl.GradientDescent(0.01), method=bl.Implicit())

    def test_a_word_that_is_no_method(self):
        with refused("'reverse'", "Reverse()"):
            ask(method="reverse")

    def test_a_class_instead_of_an_instance(self):
        with refused("not a dynamics", r"GradientDescent\(lr"):
            ask(dynamics=bl.GradientDescent)
        with refused("not a method"):
            ask(method=bl.Reverse)

    def test_settings_with_another_structure_than_w(self):
        with refused("setting", "w"):
            ask(dynamics=bl.GradientDescent({"a": 0.1}))

    def test_a_step_that_changes_the_shape_of_w(self):
        with refused("dynamics changed w", r"\[3\]", r"\[2, 3\]"):
            ask(dynamics=bl.GradientDescent(torch.full((2, 3), 0.1)))

    @pytest.mark.parametrize(
        "make",
        [lambda: bl.Reverse(0), lambda: bl.Reverse("half"), lambda: bl.Truncated(0), lambda: bl.Forward(chunk=0)],
    )
    def test_impossible_settings_of_methods(self, make):
        with refused("[Pp]ass"):
            ask(method=make())


class TestDivergence:
    def test_names_the_step_the_loss_and_the_cause(self):
        with pytest.raises(bl.DivergenceError) as caught:
            ask(dynamics=bl.GradientDescent(1e30), steps=50)
        assert caught.value.step is not None and 1 < caught.value.step < 50
        assert caught.value.loss is not None
        assert "step size 1e+30 lies above the limit" in str(caught.value)
        assert f"at step {caught.value.step}" in str(caught.value)

    def test_a_step_size_that_is_no_number(self):
        lam = {"l2": torch.zeros(3), "lr": torch.tensor(-0.1)}
        problem = ridge(inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam["l2"].exp() * w**2).sum())
        with refused("diverged", "step size is NaN", error=bl.DivergenceError):
            ask(problem, lam, dynamics=lambda lam: bl.GradientDescent(lam["lr"].log()))

    def test_a_derivative_that_does_not_exist(self):
        with refused("hypergradient is NaN", "square root", error=bl.DivergenceError):
            ask(
                ridge(
                    outer=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam - lam.detach()).square().sum().sqrt()
                )
            )

    def test_solve_returns_it_as_an_outcome_and_leaves_lam_finite(self):
        lam = torch.zeros(3)
        sol = bl.solve(
            ridge(),
            lam,
            bl.Task(data(), data(4)),
            dynamics=bl.GradientDescent(1e30),
            steps=50,
            iterations=3,
            progress=False,
        )
        assert sol.outcome.kind == "diverged" and not sol.outcome.ok and "step" in sol.outcome
        assert torch.equal(sol.outer, lam)
        with pytest.raises(bl.DivergenceError):
            bl.solve(
                ridge(),
                lam,
                bl.Task(data(), data(4)),
                dynamics=bl.GradientDescent(1e30),
                steps=50,
                iterations=3,
                raise_on_failure=True,
            )

    def test_an_update_that_breaks_lam_keeps_the_last_finite_one(self):
        sol = bl.solve(
            ridge(),
            torch.zeros(3),
            bl.Task(data(), data(4)),
            dynamics=bl.GradientDescent(0.1),
            steps=5,
            iterations=4,
            optimizer=lambda params: torch.optim.SGD(params, lr=float("inf")),
        )
        assert (
            sol.outcome.kind == "diverged" and bool(torch.isfinite(sol.outer).all()) and len(sol.history["value"]) == 1
        )

    def test_a_step_above_the_limit_is_a_warning(self):
        with pytest.warns(bl.BilevelWarning, match="above"):
            certificate = bl.certify(
                ridge(), torch.zeros(3), bl.Task(data(), data(4)), dynamics=bl.GradientDescent(0.9), steps=3
            )
        assert certificate.step_ok is False


def test_nothing_of_the_users_is_changed():
    lam = torch.zeros(3, requires_grad=True)
    task = bl.Task(data(), data(4))
    copies = [x.clone() for x in (*task.train, *task.val)]
    ask(lam=lam, task=task)
    bl.solve(ridge(), lam, task, dynamics=bl.GradientDescent(0.1), steps=3, iterations=3)
    assert lam.grad is None and torch.equal(lam, torch.zeros(3))
    assert all(torch.equal(a, b) for a, b in zip((*task.train, *task.val), copies, strict=True))


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Forward(), bl.Spectral(), bl.ZeroOrder(), bl.Implicit()], ids=str)
def test_lam_and_w_without_numbers(method):
    with refused("λ has no numbers in it"):
        ask(ridge(inner=lambda w, lam, b: (w**2).sum() + lam.sum()), torch.zeros(0), method=method)
    with refused("without numbers", "nothing for the inner problem to learn"):
        ask(
            bl.Problem(lambda w, lam, b: (w * lam[0]).sum(), lambda w, lam, b: w.sum(), lambda lam: torch.zeros(0)),
            method=method,
        )
    some = ridge(
        inner=lambda w, lam, b: (b[0] @ w - b[1]).square().mean() + (lam["a"].exp() * w**2).sum() + lam["b"].sum(),
        outer=lambda w, lam, b: (b[0] @ w - b[1]).square().mean() + lam["b"].sum(),
    )
    found = ask(some, {"a": torch.zeros(3), "b": torch.zeros(0)}, method=method)
    torch.testing.assert_close(found.grad["a"], ask(method=method).grad, rtol=1e-6, atol=1e-9)
    assert found.grad["b"].shape == (0,)
