"""Broken methods, dynamics, solvers and constraints: the public batteries reject each and say what is wrong.

Every mutant is a part that passes its battery (`test_batteries.py`) with one thing changed.
"""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import bilevel as bl
from bilevel import hypergradients, testing, trees
from bilevel.constraints.base import Constraint
from bilevel.dynamics import adam
from bilevel.dynamics.base import gradient, update, zeros_like
from bilevel.engine.method import EVERYTHING, Method
from bilevel.engine.process import Process
from bilevel.linear_solvers.base import LinearSolution, LinearSolver, as_operator, relative
from bilevel.methods.spectral import method as spectral
from bilevel.problem import Task
from bilevel.testing import central_differences, check_constraint, check_dynamics, check_method, check_solver

VECTOR = torch.zeros(5)
# Of the battery's cases, enough for mutants that pass most of them.
FEW = testing.battery_cases()[::9]


def rejected(check, mutant, match, *args, **settings):
    with pytest.raises(AssertionError, match=match):
        check(mutant, *args, **settings)


# --- methods ---------------------------------------------------------------------------------------------------------


class Changed(bl.Unrolled):
    """Unrolled, whose gradient is changed afterwards."""

    def __call__(self, process):
        result = super().__call__(process)
        return replace(result, grad=self.change(result.grad, process, result))


class WrongSign(Changed):
    def change(self, grad, process, result):
        return trees.scale(grad, -1.0)


class Half(Changed):
    def change(self, grad, process, result):
        return trees.scale(grad, 0.5)


class WithoutTheDirectTerm(Changed):
    """∇_λ E is left out."""

    def change(self, grad, process, result):
        direct = process.pull_back(process.outer_gradients(result.state)[2])
        leaves, spec = trees.flatten(grad)
        return spec.unflatten(g if d is None else g - d for g, d in zip(leaves, direct, strict=True))


class WithoutTheStart(Changed):
    """∂Φ_0/∂λ is left out."""

    def change(self, grad, process, result):
        return {key: 0 * value if key == "start" else value for key, value in grad.items()}


class SwapsLeaves(Changed):
    def change(self, grad, process, result):
        if "start" not in grad or "penalty" not in grad:
            return grad
        return {**grad, "start": grad["penalty"], "penalty": grad["start"]}


class WrongDtype(Changed):
    def change(self, grad, process, result):
        return trees.map(torch.Tensor.double, grad)


class ChangesTheData(Changed):
    def change(self, grad, process, result):
        process.task.val[0].add_(1e-3)
        return grad


class Remembers(Changed):
    """It returns the first gradient of every shape that it has seen."""

    seen: ClassVar[dict] = {}

    def change(self, grad, process, result):
        return self.seen.setdefault(trees.describe(grad), grad)


class StopsOneStepEarly(bl.Unrolled):
    def __call__(self, process):
        return super().__call__(shortened(process, process.steps - 1))


def shortened(process, steps):
    return Process(
        process.problem,
        process.lam,
        process.task,
        process.source,
        steps,
        memory=process.memory,
        check_results=process.check_results,
    )


class StateNotDifferentiated(bl.Unrolled):
    """Velocities and moments are taken for constants."""

    def __call__(self, process):
        step = process.bound.step
        process.bound.step = lambda state, t: step((state[0], trees.detach(state[1])), t)
        return super().__call__(process)


class FirstBatchOnly(bl.Unrolled):
    """Its steps all see the batch of step 1."""

    def __call__(self, process):
        task = Task(process.task.batch(1), process.task.val)
        return super().__call__(replace(process, task=task))


class EncodesTwice(bl.Unrolled):
    def __call__(self, process):
        if process.problem.encode is not None:
            process.problem.encode(process.lam, process.task)
        return super().__call__(process)


class ForgetsTheEncoder(bl.Unrolled):
    """The gradient is not carried through encode."""

    def result(self, process, value, state, gradients, **rest):
        parts = [torch.zeros_like(v) if g is None else g for v, g in zip(process.variables, gradients, strict=True)]
        return super().result(process, value, state, parts[: process.outer_count], pulled=True, **rest)


@dataclass(frozen=True)
class DeclaredExact(bl.Truncated):
    exact: ClassVar[bool] = True


class TooFewSteps(bl.Truncated):
    pass


class RefusesEverything(bl.Unrolled):
    def check(self, process):
        raise bl.BilevelError("not today")


class RefusesWhileItRuns(bl.Unrolled):
    def __call__(self, process):
        raise bl.BilevelError("too late")


class ClaimsToSeeMore(bl.FirstOrder):
    def sees(self, process):
        return EVERYTHING


class WithoutTheMixedDerivative(bl.Implicit):
    """Declared implicit, but only ∇_λ E is returned."""

    def __call__(self, process):
        value, _, direct, _ = process.outer_gradients(state := process.run())
        filled = [torch.zeros_like(v) if g is None else g for v, g in zip(process.variables, direct, strict=True)]
        return self.result(process, value, state, filled)


class ImplicitWithTheWrongSign(bl.Implicit):
    """∇_λ E + ∇²L (∇²L)⁻¹ ∇E instead of the difference."""

    def __call__(self, process):
        result = super().__call__(process)
        parts = WithoutTheMixedDerivative.__call__(self, process).grad
        return replace(result, grad=trees.map(lambda whole, direct: 2 * direct - whole, result.grad, parts))


class NotThePartialDerivative(bl.FirstOrder):
    """It returns the total derivative where it declares to see the outer objective alone."""

    def __call__(self, process):
        return bl.Unrolled()(process)


METHODS = [
    (WrongSign(), r"differs from Unrolled.*opposite sign"),
    (Half(), r"0\.5 times"),
    (WithoutTheDirectTerm(), r"λ\['shift'\]"),
    (WithoutTheStart(), r"λ\['start'\].*exactly zero"),
    (SwapsLeaves(), r"λ\['penalty'\]"),
    (ChangesTheData(), "changed λ or the data"),
    (Remembers(), "should be exact"),
    (StopsOneStepEarly(), "quadratic problem it differs"),
    (StateNotDifferentiated(), "HeavyBall.*differs"),
    (FirstBatchOnly(), "on the minibatches problem"),
    (EncodesTwice(), "encode 2 times"),
    (ForgetsTheEncoder(), r"encode problem.*λ\['map'\]"),
    (DeclaredExact(3), r"DeclaredExact.* should be exact"),
    (TooFewSteps(3), "where w has converged"),
    (RefusesEverything(), r"answered none of \d+ pairs.*not today"),
    (RefusesWhileItRuns(), "refused it while it ran.*too late"),
    (ClaimsToSeeMore(), "refused it while it ran.*found no path"),
    (WithoutTheMixedDerivative(), r"λ\['penalty'\].*exactly zero"),
    (ImplicitWithTheWrongSign(), r"λ\['penalty'\].*opposite sign"),
    (NotThePartialDerivative(), "not ∇_λ E"),
]


@pytest.mark.parametrize(("mutant", "match"), METHODS, ids=lambda value: type(value).__name__)
def test_a_broken_method(mutant, match):
    few = isinstance(mutant, (EncodesTwice, ForgetsTheEncoder, RefusesEverything))
    rejected(check_method, mutant, match, among=FEW if few else None)


def test_a_closed_form_that_holds_for_quadratics_only(monkeypatch):
    monkeypatch.setattr(spectral, "_refuse_unless_exact", lambda found: None)
    monkeypatch.setattr(spectral, "refuse_unless_quadratic", lambda loss, w: None)
    rejected(check_method, bl.Spectral(), "should be exact, but .* on the smooth problem")


def test_a_sum_over_tasks_where_a_mean_is_meant(monkeypatch):
    mean = hypergradients._mean

    def total(results):
        result = mean(results)
        return replace(result, grad=trees.scale(result.grad, float(len(results))))

    monkeypatch.setattr(hypergradients, "_mean", total)
    rejected(check_method, bl.Unrolled(), "list of tasks is not the mean.*2 times", among=FEW)


def test_a_gradient_of_another_precision():
    single = [pair for pair in testing.battery_cases() if pair.example.single]
    with pytest.raises(AssertionError, match=r"float32 problem .* dtype than λ"):
        check_method(WrongDtype(), among=single)


class CentralDifferences(Method):
    """Right, but not exact."""

    exact: ClassVar[bool] = False

    def __call__(self, process):
        def value(lam):
            other = replace(process, lam=lam)
            with torch.no_grad():
                return other.bound.outer(other.run())

        slopes = trees.leaves(central_differences(value, process.lam))
        state = process.run()
        return self.result(process, process.bound.outer(state).detach(), state, slopes, pulled=True)


def test_a_right_method_that_is_not_exact_passes():
    in_double = [pair for pair in testing.battery_cases() if not pair.example.single]
    check_method(CentralDifferences(), among=in_double[::31], further=False)


# --- dynamics --------------------------------------------------------------------------------------------------------


def dynamics_of(function, start=None):
    return bl.StepFunction(function, start) if start else bl.StepFunction(function)


def in_place(loss, w, state, t):
    for leaf, slope in zip(trees.leaves(w), trees.leaves(gradient(loss, w)), strict=True):
        leaf.data.sub_(0.2 * slope.detach())
    return trees.map(torch.clone, w), state


def with_hidden_state():
    count = itertools.count(1)
    return lambda loss, w, state, t: (update(lambda w, g: w - 0.3 / next(count) * g, w, gradient(loss, w)), state)


def with_global_randomness(loss, w, state, t):
    return update(lambda w, g: w - 0.2 * torch.rand(()) * g, w, gradient(loss, w)), state


def with_a_detached_gradient(loss, w, state, t):
    return update(lambda w, g: w - 0.2 * g.detach(), w, gradient(loss, w)), state


def with_a_detached_velocity(loss, w, state, t):
    velocity = update(lambda v, g: 0.9 * v.detach() - 0.1 * g, state, gradient(loss, w))
    return trees.add(w, velocity), velocity


def that_rounds(loss, w, state, t):
    return update(lambda w, g: (w - 0.2 * g).float(), w, gradient(loss, w)), state


def that_drops_a_leaf(loss, w, state, t):
    return {"a": w["a"] - 0.2 * gradient(loss, w)["a"]}, state


def that_looks_whether_it_is_recorded(loss, w, state, t):
    lr = 0.2 if any(leaf.grad_fn is not None for leaf in trees.leaves(w)) else 0.1
    return update(lambda w, g: w - lr * g, w, gradient(loss, w)), state


def that_decays(loss, w, state, t):
    """Decay, which moves the limit away from ∇L = 0 without a word."""
    return update(lambda w, g: w - 0.2 * (g + 0.5 * w), w, gradient(loss, w)), state


class WithAWrongForm(bl.HeavyBall):
    def heavy_ball_form(self, t):
        return self.lr, 0.5 * self.momentum


class WithAHalfLearnedStepSize(bl.GradientDescent):
    """Half of the step size's derivative is lost."""

    def step(self, loss, w, state, t):
        lr = torch.as_tensor(self.lr)
        return update(lambda w, g: w - 0.5 * (lr + lr.detach()) * g, w, gradient(loss, w)), state

    def heavy_ball_form(self, t):
        return None


class WithAFrozenStepSize(bl.GradientDescent):
    def step(self, loss, w, state, t):
        return update(lambda w, g: w - torch.as_tensor(self.lr).detach() * g, w, gradient(loss, w)), state

    def heavy_ball_form(self, t):
        return None


class WithAWrongDecay(bl.TorchOptim):
    def slope_decay(self, t):
        return 0.1


class WithAWrongStationaryStep(bl.ISTA):
    """The penalty is missing from it."""

    def stationary_step(self, loss, w, t):
        return update(lambda w, g: w - 0.1 * g, w, gradient(loss, w))


class KeepsAGraph(bl.GradientDescent):
    def step(self, loss, w, state, t):
        with torch.enable_grad():
            live = trees.map(lambda leaf: leaf if leaf.requires_grad else leaf.detach().requires_grad_(), w)
            return update(lambda w, g: w - self.lr * g, live, gradient(loss, live)), state


def named(value):
    return getattr(value, "function", type(value)).__name__


DYNAMICS = [
    (dynamics_of(in_place), "in place"),
    (dynamics_of(with_hidden_state()), "two calls of step 1 .* differ"),
    (dynamics_of(with_global_randomness), "two calls of step 1 .* differ"),
    (dynamics_of(with_a_detached_gradient), r"no hypergradient: Unrolled found no path from λ\['penalty'\]"),
    (dynamics_of(with_a_detached_velocity, zeros_like), "quadratic problem.*central differences"),
    (dynamics_of(that_rounds), "dtype of w"),
    (dynamics_of(that_drops_a_leaf), "structure"),
    (dynamics_of(that_looks_whether_it_is_recorded), "central differences|differs from Unrolled"),
    (dynamics_of(that_decays), "point where ∇L is not zero"),
    (WithAWrongForm(0.2, 0.6), "Spectral|heavy_ball_form"),
    (WithAHalfLearnedStepSize(0.2), r"lr learned.*λ\['setting'\].*0\.5 times"),
    (WithAFrozenStepSize(0.2), "lr learned.*no hypergradient"),
    (WithAWrongStationaryStep(0.3, bl.L1(0.05)), "not a fixed point of its stationary_step"),
    (WithAWrongDecay(torch.optim.SGD, lr=0.2, weight_decay=0.5), r"point where ∇L \+ 0\.1·w is not zero"),
    (KeepsAGraph(0.2), "keeps a graph"),
]


@pytest.mark.parametrize(
    ("mutant", "match"), DYNAMICS, ids=lambda value: getattr(value, "function", type(value)).__name__
)
def test_a_broken_dynamics(mutant, match):
    rejected(check_dynamics, mutant, match)


def test_a_square_root_with_an_infinite_slope(monkeypatch):
    monkeypatch.setattr(adam, "root", torch.sqrt)
    rejected(check_dynamics, bl.Adam(0.1), "weights have no gradient.*square root")


# --- linear solvers --------------------------------------------------------------------------------------------------


class FalseResidual(bl.CG):
    def solve(self, matvec, b, x0=None):
        return replace(super().solve(matvec, b, x0), residual=0.0 if x0 is None else 1e-3)


class Loose(bl.CG):
    """It stops early and reports so truthfully; it is not accurate enough all the same."""

    def solve(self, matvec, b, x0=None):
        return bl.CG(tol=1e-2).solve(matvec, b, x0)


class ReturnsTheWarmStart(bl.CG):
    def solve(self, matvec, b, x0=None):
        if x0 is None:
            return super().solve(matvec, b)
        return LinearSolution(x0, relative(b - as_operator(matvec)(x0), b), 1, True)


class ChangesB(bl.CG):
    def solve(self, matvec, b, x0=None):
        solution = super().solve(matvec, b, x0)
        b.mul_(1 + 1e-9)
        return solution


class Miscounts(bl.CG):
    def solve(self, matvec, b, x0=None):
        return replace(super().solve(matvec, b, x0), products=1)


class NotANumberForZero(bl.CG):
    def solve(self, matvec, b, x0=None):
        solution = super().solve(matvec, b, x0)
        return replace(solution, x=solution.x * (b.norm() / b.norm()))


class InDouble(bl.CG):
    def solve(self, matvec, b, x0=None):
        solution = super().solve(matvec, b, x0)
        return replace(solution, x=solution.x.double() if b.dtype == torch.float32 else solution.x)


@dataclass(frozen=True)
class Symmetrised(LinearSolver):
    """It solves with (A + Aᵀ)/2 whatever A is, and says that it has converged."""

    always: bool = True

    def solve(self, matvec, b, x0=None):
        operator = as_operator(matvec)
        matrix = operator.rows(torch.eye(len(b), dtype=b.dtype))
        x = torch.linalg.solve((matrix + matrix.T) / 2, b)
        return LinearSolution(x, relative(b - operator(x), b), len(b) + 1, self.always)


class AlwaysConverged(bl.FixedPoint):
    def solve(self, matvec, b, x0=None):
        operator = as_operator(matvec)
        x, products = 0.2 * b if x0 is None else x0, 200
        for _ in range(products):
            x = x + 0.2 * (b - operator(x))
        return LinearSolution(x, relative(b - operator(x), b), products + 1, True)


SOLVERS = [
    (FalseResidual(), "reports the residual 0.001, but"),
    (Loose(), "wrong on a positive definite system"),
    (ReturnsTheWarmStart(), "warm start that is not the solution"),
    (ChangesB(), "changed b"),
    (Miscounts(), "reports 1 products"),
    (NotANumberForZero(), "x = 0 for b = 0"),
    (InDouble(), "float32"),
    (Symmetrised(), "not symmetric, and is wrong"),
    (Symmetrised(always=False), "reports that it did not converge"),
    (AlwaysConverged(), "is indefinite, and is wrong"),
]


@pytest.mark.parametrize(("mutant", "match"), SOLVERS, ids=lambda value: type(value).__name__)
def test_a_broken_linear_solver(mutant, match):
    rejected(check_solver, mutant, match)


# --- constraints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Halves(Constraint):
    def project(self, lam):
        return trees.scale(lam, 0.5)


@dataclass(frozen=True)
class ShrinksIntoTheBox(Constraint):
    """In the box and idempotent, but along the ray to the origin."""

    def project(self, lam):
        return lam / lam.abs().max().clamp_min(1.0)


@dataclass(frozen=True)
class OntoTheSphere(Constraint):
    """The nearest point of a set that is not convex."""

    def project(self, lam):
        return lam / lam.norm()


@dataclass(frozen=True)
class Oblique(Constraint):
    """A linear projection that is not orthogonal."""

    def project(self, lam):
        return torch.cat([lam[:1] + lam[1:2], 0 * lam[1:2], lam[2:]])


@dataclass(frozen=True)
class OntoTheGrid(Constraint):
    """Idempotent and nearest, but the set is made of points."""

    def project(self, lam):
        return lam.round()


@dataclass(frozen=True)
class Softmax(Constraint):
    """Weights that add up to 1, which is no projection."""

    def project(self, lam):
        return torch.softmax(lam, 0)


@dataclass(frozen=True)
class InPlace(Constraint):
    def project(self, lam):
        return lam.clamp_(-1, 1)


@dataclass(frozen=True)
class Restless(Constraint):
    def project(self, lam):
        return lam + 1e-6 * torch.randn_like(lam)


@dataclass(frozen=True)
class InSingle(Constraint):
    def project(self, lam):
        return lam.clamp(-1, 1).double()


@dataclass(frozen=True)
class Flattens(Constraint):
    def project(self, lam):
        return lam.clamp(-1, 1)[None]


CONSTRAINTS = [
    (Halves(), "not idempotent"),
    (ShrinksIntoTheBox(), "nearest point"),
    (OntoTheSphere(), "firmly nonexpansive|nearest"),
    (Oblique(), "nearest point"),
    (OntoTheGrid(), "firmly nonexpansive|nearest"),
    (Softmax(), "not idempotent"),
    (InPlace(), "changed its argument"),
    (Restless(), "two points"),
    (InSingle(), "dtype: torch.float32 to torch.float64"),
    (Flattens(), "changed a shape"),
]


@pytest.mark.parametrize(("mutant", "match"), CONSTRAINTS, ids=lambda value: type(value).__name__)
def test_a_broken_constraint(mutant, match):
    rejected(check_constraint, mutant, match, VECTOR)
