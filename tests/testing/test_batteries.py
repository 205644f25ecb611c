"""Everything found by walking the folders passes the public batteries."""

import pytest

import bilevel as bl
from bilevel import constraints, dynamics, linear_solvers, methods, testing
from bilevel.engine.process import Process
from bilevel.testing.problems import examples
from bilevel.testing.references import exact_methods


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
    # The first instance of a class meets every pair, each of the others a fifth: every example and every dynamics. A
    # method that evaluates f_T alone needs dozens of runs for each pair; its first instance meets a ninth.
    first, *others = type(example).examples()
    among = None if example == first else testing.battery_cases()[others.index(example) % 5 :: 5]
    if not example.outer_derivatives:
        among = testing.battery_cases()[::9]
    testing.check_method(example, among=among)


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
    assert {"F2SA", "FiniteDifference", "ZeroOrder"} <= set(methods.find())
    assert {"CG", "Neumann", "FixedPoint", "Nystrom", "Direct"} <= set(linear_solvers.find())
    assert {"Box", "NonNegative", "Simplex", "Ball", "PerLeaf"} <= set(constraints.find())


@pytest.mark.parametrize("example", instances(methods.find))
def test_what_a_method_says_of_itself_is_what_it_sees(example):
    quadratic = examples()[0]
    process = Process(quadratic.problem, quadratic.lam, quadratic.task, bl.GradientDescent(0.1), 5)
    assert example.sees_dynamics == ("the dynamics" in example.sees(process))


@pytest.mark.parametrize("method", [method for method in exact_methods() if method.structure is None], ids=str)
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
