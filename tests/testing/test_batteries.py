"""Everything found by walking the folders passes the public batteries."""

import pytest

import bilevel as bl
from battery_shares import share
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


def cases_for(method):
    """Which cases a method meets: all of the structure that it is written for, and a fifth of the others.

    Each method meets every dynamics and every example, and the exact methods together meet every case; `test_dynamics`
    compares all of these on every case. Further instances of a class, and methods that need dozens of runs for a case,
    meet one case in eleven.
    """
    whole = method == type(method).examples()[0] and method.outer_derivatives
    # The exact methods come first, so that no two of them meet the same fifth.
    kinds = sorted(methods.find().values(), key=lambda cls: not cls.exact or cls.structure is not None)
    met = set(share(5 if whole else 11, shift=kinds.index(type(method)), alone=whole))

    def declared(case):
        return method.structure is not None and isinstance(case.example.problem.inner, method.structure)

    return [case for case in testing.battery_cases() if case in met or declared(case)]


@pytest.mark.parametrize("example", instances(methods.find))
def test_method(example):
    testing.check_method(example, among=cases_for(example), further=example == type(example).examples()[0])


def test_which_cases_are_met():
    cases = testing.battery_cases()
    for cls in methods.find().values():
        met = cases_for(cls.examples()[0])
        assert {case.example.name for case in met} >= {case.example.name for case in cases} - {"left out"}
        assert {case.label for case in met} == {case.label for case in cases} or not cls.outer_derivatives
    exact = [cls.examples()[0] for cls in methods.find().values() if cls.exact and cls.structure is None]
    assert {case for method in exact for case in cases_for(method)} == set(cases)


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
