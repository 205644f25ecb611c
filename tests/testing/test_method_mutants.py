"""Broken methods: the public battery rejects each and says what is wrong.

Every mutant is a part that passes its battery (`test_batteries.py`) with one thing changed.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import bilevel as bl
from bilevel import hypergradients, testing, trees
from bilevel.engine.method import EVERYTHING, Method
from bilevel.engine.process import Process
from bilevel.methods.spectral import method as spectral
from bilevel.problem import Task
from bilevel.testing import central_differences, check_method
from testing.mutants import rejected

# Of the battery's cases, enough for mutants that pass most of them.
FEW = testing.battery_cases()[::9]


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
