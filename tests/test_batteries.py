"""Everything found by walking the folders passes the public batteries."""

import pytest
import torch

import bilevel as bl
from bilevel import constraints, dynamics, linear_solvers, methods, testing
from bilevel.methods.process import Process
from bilevel.testing.batteries import exact_methods
from bilevel.testing.problems import examples


def instances(find):
    return [
        pytest.param(example, id=f"{name}-{i}")
        for name, cls in find().items()
        for i, example in enumerate(cls.examples())
    ]


@pytest.mark.parametrize("example", instances(dynamics.find))
def test_dynamics(example):
    testing.check_dynamics(example)


@pytest.mark.parametrize("example", instances(methods.find))
def test_method(example):
    testing.check_method(example)


@pytest.mark.parametrize("example", instances(linear_solvers.find))
def test_linear_solver(example):
    testing.check_solver(example)


@pytest.mark.parametrize("example", instances(constraints.find))
def test_constraint(example):
    testing.check_constraint(*example)


def test_the_folders_hold_what_the_paper_and_the_peers_need():
    assert {
        "GradientDescent",
        "HeavyBall",
        "Nesterov",
        "Adam",
        "AdamW",
        "RMSProp",
        "ISTA",
        "FISTA",
        "TorchOptim",
        "StepFunction",
    } <= set(dynamics.find())
    assert {"Unrolled", "Reverse", "Truncated", "Forward", "Implicit", "FirstOrder", "Spectral", "Reversible"} <= set(
        methods.find()
    )
    assert {"CG", "Neumann", "FixedPoint", "Nystrom", "Direct"} <= set(linear_solvers.find())
    assert {"Box", "NonNegative", "Simplex", "Ball", "PerLeaf"} <= set(constraints.find())


@pytest.mark.parametrize("example", instances(methods.find))
def test_what_a_method_says_of_itself_is_what_it_sees(example):
    quadratic = examples()[0]
    process = Process(quadratic.problem, quadratic.lam, quadratic.task, bl.GradientDescent(0.1), 5)
    assert example.sees_dynamics == ("the dynamics" in example.sees(process))


@pytest.mark.parametrize("method", exact_methods(), ids=str)
@pytest.mark.parametrize("step", [bl.GradientDescent(0.3), bl.HeavyBall(0.2, 0.9)], ids=lambda d: type(d).__name__)
def test_no_exact_method_refuses_heavy_ball_on_a_quadratic(method, step):
    if isinstance(method, bl.Reversible) and isinstance(step, bl.GradientDescent):
        with pytest.raises(bl.BilevelError, match="momentum"):
            bl.hypergradient(
                examples()[0].problem, examples()[0].lam, examples()[0].task, dynamics=step, steps=3, method=method
            )
        return
    example = examples()[0]
    grad = bl.hypergradient(example.problem, example.lam, example.task, dynamics=step, steps=9, method=method).grad
    reference = bl.hypergradient(
        example.problem, example.lam, example.task, dynamics=step, steps=9, method=bl.Unrolled()
    ).grad
    assert testing.relative_error(grad, reference) < 1e-10


class TestABatteryFails:
    """A battery that cannot fail proves nothing."""

    def test_on_a_dynamics_that_detaches_its_velocity(self):
        def step(loss, w, state, t):
            velocity = (
                {k: 0.9 * state[k].detach() - 0.1 * g for k, g in bl.gradient(loss, w).items()}
                if isinstance(w, dict)
                else None
            )
            return {k: w[k] + velocity[k] for k in w}, velocity

        start = lambda w: {k: torch.zeros_like(v) for k, v in w.items()}  # noqa: E731
        with pytest.raises(AssertionError, match="central differences"):
            testing.check_dynamics(bl.StepFunction(step, start))

    def test_on_a_method_that_is_not_exact(self):
        class Half(bl.Unrolled):
            def __call__(self, process):
                import dataclasses

                result = super().__call__(process)
                return dataclasses.replace(result, grad={k: 0.5 * v for k, v in result.grad.items()})

        with pytest.raises(AssertionError, match="differs from Unrolled"):
            testing.check_method(Half())

    def test_on_a_constraint_that_is_not_a_projection(self):
        class Scaled(bl.Box):
            def project(self, lam):
                return {k: v * 0.5 for k, v in lam.items()}

        with pytest.raises(AssertionError):
            testing.check_constraint(Scaled(-1, 1), {"a": torch.zeros(3)})

    def test_on_a_solver_that_stops_early(self):
        with pytest.raises(AssertionError, match="wrong"):
            testing.check_solver(bl.CG(tol=1e-2))
