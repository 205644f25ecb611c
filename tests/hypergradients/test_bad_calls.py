"""Bad input that comes late: in a second call, from encode, in what surrounds the problem."""

import itertools

import pytest
import torch

import bilevel as bl
from asking import ask, data, learned_start, refused, ridge
from bilevel.hypergradients import value_of


class TestASecondCall:
    """The checks are remembered for a problem; what another task brings is still noticed."""

    def test_nan_in_another_task(self):
        problem = ridge()
        ask(problem)
        x, y = data()
        y[3] = float("inf")
        with refused("inner", "1 entries NaN", r"\[3\]", error=bl.DivergenceError):
            ask(problem, task=bl.Task((x, y), data(4)))

    def test_another_dtype(self):
        problem = ridge()
        ask(problem)
        with refused("inner", "float32"):
            ask(problem, task=bl.Task(data(dtype=torch.float32), data(4)))

    def test_a_stateful_sampler_after_a_pure_one(self):
        problem = ridge()
        x, y = data(12)
        ask(problem, task=bl.Task(lambda t: (x[t : t + 4], y[t : t + 4]), data(4)))
        calls = iter(range(1000))
        with refused("not a pure function of t"):
            ask(problem, task=bl.Task(lambda t: (x[(i := next(calls) % 8) : i + 4], y[i : i + 4]), data(4)))

    def test_a_loader_in_place_of_a_batch(self):
        rows = torch.utils.data.TensorDataset(*data(12))
        loader = torch.utils.data.DataLoader(rows, 4)
        for given in (loader, rows, iter(loader)):
            with refused(f"task.train is a {type(given).__name__}", "Minibatches", "tune"):
                ask(ridge(), task=bl.Task(given, data(4)))
        with refused("task.val is a DataLoader", "Minibatches"):
            bl.solve(ridge(), torch.zeros(3).double(), bl.Task(data(12), loader), algorithm=bl.SOBA())

    def test_a_sampler_that_cycles_through_two_batches(self):
        batches = itertools.cycle([data(5), data(4)])
        with refused("not a pure function of t"):
            ask(task=bl.Task(lambda t: next(batches), data(4)))


class TestEncode:
    def test_that_does_not_return_a_task(self):
        with refused("encode", "Task"):
            ask(ridge(encode=lambda lam, task: (task.train, task.val)))

    def test_that_fails(self):
        with refused("encode failed", "RuntimeError"):
            ask(ridge(encode=lambda lam, task: bl.Task(task.train[0] @ torch.zeros(7, 7), task.val)))


class TestOtherThings:
    @pytest.mark.parametrize("call", [bl.hypergradient, bl.objective, bl.certify, bl.solve])
    def test_inference_mode(self, call):
        """Under no_grad the inner steps switch gradients on again; in inference mode nothing can."""
        problem, task, lam = ridge(), bl.Task(data(), data(4)), torch.zeros(3)
        settings = {"dynamics": bl.GradientDescent(0.1), "steps": 3}
        with torch.no_grad():
            call(problem, lam, task, **settings)
        with torch.inference_mode(), refused("inference_mode", "no_grad", "inference_mode=False"):
            call(problem, lam, task, **settings)

    def test_a_module_as_lam(self):
        with refused("nn.Module", "functional"):
            ask(lam=torch.nn.Linear(3, 1))

    def test_tensors_without_plain_numbers(self):
        with refused("meta device"):
            ask(lam=torch.zeros(3, device="meta"))
        with refused("sparse tensor", "sparse_coo_tensor"):
            ask(lam=torch.eye(3).to_sparse())
        with refused("nested"):
            ask(lam=torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged))
        with refused("sparse"):
            ask(ridge(init=lambda lam: torch.zeros(3).to_sparse()))

    def test_a_result_of_forward_mode_for_another_lam(self):
        """It carries ∂w/∂λ, which is of use for the same λ only."""
        problem = ridge(inner=lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + (lam["a"].exp() * w**2).sum())
        one = ask(problem, {"a": torch.zeros(3)}, method=bl.Forward())
        ask(problem, {"a": torch.zeros(3)}, method=bl.Forward(), start=one)
        with refused(r"\['a'\] float64\[3\]", r"\['a'\] float64\[\]", "start=result.inner"):
            ask(problem, {"a": torch.tensor(0.0)}, method=bl.Forward(), start=one)
        two = ridge(inner=lambda w, lam, b: problem.inner(w, lam, b) + lam["b"] ** 2 * w.sum())
        with refused(r"start= is a result", r"\['b'\] float64\[\]", "start=result.inner"):
            ask(two, {"a": torch.zeros(3), "b": torch.tensor(1.0)}, method=bl.Forward(), start=one)

    def test_a_start_that_is_no_tensor(self):
        with refused("start", "float"):
            ask(ridge(init=lambda lam: 0.0))

    def test_a_function_of_lam_that_fails(self):
        with refused("dynamics", "IndexError"):
            ask(dynamics=lambda lam: bl.GradientDescent(lam[7]))

    def test_a_complex_objective(self):
        with refused("outer", "complex"):
            ask(ridge(outer=lambda w, lam, b: (b[0] @ w).sum() * 1j))

    @pytest.mark.parametrize(
        "constraint", [bl.Box(torch.zeros(2, 3), 1.0), bl.Box({"a": 0}, 1), bl.Ball(1.0, {"a": torch.zeros(3)})]
    )
    def test_a_constraint_of_another_shape(self, constraint):
        settings = {"dynamics": bl.GradientDescent(0.1), "steps": 1}
        with refused("Box|Ball", "λ"):
            bl.solve(ridge(), torch.zeros(3), bl.Task(data(), data(4)), constraint=constraint, **settings)

    def test_an_optimiser_that_is_already_made(self):
        made = torch.optim.Adam([torch.zeros(3, requires_grad=True)])
        with refused("optimizer", "lambda params"):
            bl.solve(
                ridge(),
                torch.zeros(3),
                bl.Task(data(), data(4)),
                dynamics=bl.GradientDescent(0.1),
                steps=1,
                optimizer=made,
            )

    def test_nan_in_a_later_minibatch(self):
        x, y = data(12)
        y[9] = float("nan")
        with refused("step 4", "1 entries NaN", error=bl.DivergenceError):
            ask(task=bl.Task(lambda t: (x[3 * t - 3 : 3 * t], y[3 * t - 3 : 3 * t]), data(4)), steps=4)

    def test_a_learned_start_that_a_warm_start_ignores(self):
        with refused("the start", "cold start"):
            ask(learned_start(), torch.zeros(3), start=torch.ones(3))

    @pytest.mark.parametrize("call", [bl.hypergradient, value_of, bl.certify])
    def test_a_start_from_another_dynamics(self, call):
        problem, task, lam = ridge(), bl.Task(data(), data(4)), torch.zeros(3)
        adam = {"dynamics": bl.Adam(0.1), "steps": 3}
        before = bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(0.1), steps=3)
        call(problem, lam, task, **adam)
        with refused("another dynamics", "start="):
            call(problem, lam, task, start=before, **adam)
        call(problem, lam, task, start=bl.hypergradient(problem, lam, task, **adam), **adam)

    def test_a_start_whose_auxiliary_variables_fit_by_chance(self):
        """The velocity of heavy ball would be taken for the mean square of RMSProp."""
        before = ask(dynamics=bl.HeavyBall(0.1, 0.9))
        with refused("a result of HeavyBall", "RMSProp", "start=result.inner"):
            ask(dynamics=bl.RMSProp(0.1), start=before)
        with refused("a result of HeavyBall", r"Until\(HeavyBall\)"):
            ask(dynamics=bl.Until(bl.HeavyBall(0.1, 0.9), tol=1e-9), start=before)
        ask(dynamics=bl.HeavyBall(0.05, 0.5), start=before)
        ask(dynamics=bl.RMSProp(0.1), start=before.inner)

    @pytest.mark.parametrize("adjoint", [3, 0.5, "zero", {"x": torch.zeros(3)}, [torch.zeros(3)]], ids=str)
    def test_what_is_no_adjoint(self, adjoint):
        with refused("adjoint", r"`\.adjoint` of an earlier result"):
            ask(method=bl.Implicit(), adjoint=adjoint)

    def test_a_result_as_the_adjoint(self):
        result = ask(method=bl.Implicit())
        with refused("adjoint", r"`\.adjoint` of an earlier result"):
            ask(method=bl.Implicit(), adjoint=result)


def test_a_constant_without_steps_has_the_gradient_zero():
    problem = bl.Problem(lambda w, lam, _: ((w - lam) ** 2).sum(), lambda w, lam, _: w.sum(), lambda lam: torch.ones(2))
    for method in (bl.Unrolled(), bl.Reverse()):
        call = {"dynamics": bl.GradientDescent(0.1), "steps": 0, "method": method, "allow_unused": True}
        assert bl.hypergradient(problem, torch.ones(2), bl.Task(None, None), **call).grad.tolist() == [0, 0]
