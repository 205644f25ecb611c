"""Effects of λ that autograd does not see, random starts, and functions that change their arguments in place."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

import bilevel as bl
from bilevel.dynamics.penalties import Penalty
from bilevel.dynamics.step_function import StepFunction

LAM = torch.tensor([0.1, -0.2, 0.3])
DESCENT = bl.GradientDescent(0.1)
STEP_METHODS = [bl.Unrolled(), bl.Reverse(), bl.Forward(), bl.Truncated(2)]


def data(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, generator=draw), torch.randn(16, generator=draw)


def task():
    return bl.Task(data(0), data(1))


def error(w, batch):
    return ((batch[0] @ w - batch[1]) ** 2).mean()


def inner(w, lam, batch):
    return error(w, batch) + (lam.exp() * w**2).sum()


def outer(w, lam, batch):
    return error(w, batch)


def zeros(lam):
    return torch.zeros(3)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x**2

    @staticmethod
    def backward(ctx, g):
        return 0.5 * g


def refused(problem, match, lam=LAM, method=None, dynamics=DESCENT, given=None):
    with pytest.raises(bl.BilevelError, match=match):
        bl.hypergradient(problem, lam, given or task(), dynamics=dynamics, steps=5, method=method or bl.Reverse())


@pytest.mark.parametrize("method", [*STEP_METHODS, bl.Spectral()])
def test_a_setting_that_is_read_from_an_entry_of_lam_as_a_number(method):
    problem = bl.Problem(lambda w, lam, batch: error(w, batch) + lam[0].exp() * (w**2).sum(), outer, zeros)
    lam = torch.tensor([-1.0, -3.0])
    refused(
        problem,
        "derivatives of dynamics are not what autograd says",
        lam,
        method,
        lambda lam: bl.GradientDescent(float(lam[1].detach().exp())),
    )
    right = bl.hypergradient(
        problem, lam, task(), dynamics=lambda lam: bl.GradientDescent(lam[1].exp()), steps=5, method=bl.Reverse()
    )
    assert right.grad[1] != 0


def test_a_step_size_from_the_curvature_at_a_detached_lam_is_allowed():
    problem = bl.Problem(inner, outer, zeros)
    dynamics = lambda lam: bl.GradientDescent(1 / (4 + 2 * float(lam.detach().exp().max())))  # noqa: E731
    found = bl.hypergradient(problem, LAM, task(), dynamics=dynamics, steps=2000, method=bl.Reverse())
    limit = bl.hypergradient(problem, LAM, task(), dynamics=DESCENT, steps=2000, method=bl.Implicit())
    torch.testing.assert_close(found.grad, limit.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("hidden", [lambda lam: lam.detach() * lam, WrongBackward.apply])
def test_a_derivative_that_is_hidden_in_init(hidden):
    refused(bl.Problem(inner, outer, hidden), "derivatives of init are not what autograd says")
    allowed = bl.Problem(inner, outer, hidden, check_derivatives=False)
    bl.hypergradient(allowed, LAM, task(), dynamics=DESCENT, steps=5)


@pytest.mark.parametrize("method", [*STEP_METHODS, bl.ZeroOrder(), bl.FiniteDifference(), bl.F2SA()])
def test_a_random_start(method):
    refused(bl.Problem(inner, outer, lambda lam: lam * torch.randn(3)), "init.*gave another start", method=method)
    start = torch.randn(3)
    bl.hypergradient(bl.Problem(inner, outer, lambda lam: start), LAM, task(), dynamics=DESCENT, steps=5, method=method)


@pytest.mark.parametrize("method", [*STEP_METHODS, bl.Implicit()])
@pytest.mark.parametrize("reads_lam", [False, True])
def test_a_step_in_place(method, reads_lam):
    def step(loss, w, state, t):
        slope = bl.gradient(loss, w)
        with torch.no_grad():
            w -= 0.1 * slope
        return w, state

    problem = bl.Problem(inner, lambda w, lam, batch: error(w, batch) + reads_lam * (lam**2).sum(), zeros)
    refused(problem, "The dynamics changed w in place", method=method, dynamics=step)


@pytest.mark.parametrize("name", ["inner", "outer"])
@pytest.mark.parametrize(("place", "argument"), [(0, "w"), (1, "λ"), (2, "the batch")])
def test_an_objective_that_changes_its_arguments_in_place(name, place, argument):
    functions = {"inner": inner, "outer": outer}

    def changed(w, lam, batch):
        with torch.no_grad():
            (w, lam, batch[0])[place].clamp_(-0.1, 0.1)
        return functions[name](w, lam, batch)

    problem = bl.Problem(**{**functions, name: changed}, init=zeros)
    refused(problem, f"{name}.* changed {argument} in place")


@pytest.mark.parametrize("method", STEP_METHODS)
def test_a_step_that_detaches_the_gradient(method):
    def step(loss, w, state, t):
        return w - 0.1 * bl.gradient(loss, w).detach(), state

    refused(bl.Problem(inner, outer, zeros), "reaches neither", method=method, dynamics=step)


def test_data_that_were_computed_from_lam():
    lam = LAM.clone().requires_grad_()
    problem, (X, y) = bl.Problem(inner, outer, zeros), data()
    made = bl.Task((X * lam.cos(), y), data(1))
    refused(problem, "computed from λ", lam, given=made)
    with pytest.raises(bl.BilevelError, match="computed from λ"):
        bl.solve(problem, lam, made, dynamics=DESCENT, steps=5, iterations=1)
    (right,) = torch.autograd.grad(bl.objective(problem, lam, made, dynamics=DESCENT, steps=5), lam)
    encoded = bl.Problem(inner, outer, zeros, lambda lam, task: bl.Task((X * lam.cos(), y), task.val))
    same = bl.hypergradient(encoded, LAM, task(), dynamics=DESCENT, steps=5)
    torch.testing.assert_close(same.grad, right)


def ridge_with_rate():
    """λ = (log penalty, log step size)."""
    return bl.Problem(lambda w, lam, batch: error(w, batch) + lam[0].exp() * (w**2).sum(), outer, zeros)


HIDDEN_RATES = {
    "schedule": lambda lam: bl.GradientDescent(lambda t: float(lam[1].detach().exp()) / t),
    "late schedule": lambda lam: bl.GradientDescent(lambda t: 0.1 if t < 4 else float(lam[1].detach().exp())),
    "momentum": lambda lam: bl.HeavyBall(0.1, lambda t: float(lam[1].detach().exp())),
    "step": lambda lam: StepFunction(
        lambda loss, w, state, t: (w - float(lam[1].detach().exp()) * bl.gradient(loss, w), state)
    ),
}


@pytest.mark.parametrize("name", HIDDEN_RATES)
def test_a_function_among_the_settings_that_reads_lam_as_a_number(name):
    lam = torch.tensor([-1.0, -2.0])
    refused(ridge_with_rate(), "derivatives of dynamics are not what autograd says", lam, dynamics=HIDDEN_RATES[name])
    allowed = lambda lam: StepFunction(  # noqa: E731
        lambda loss, w, state, t: (w - lam[1].exp() * bl.gradient(loss, w) - 0.1 * lam[0] * w, state)
    )
    bl.hypergradient(ridge_with_rate(), lam, task(), dynamics=allowed, steps=5)


class DetachedPenalty(Penalty):
    def value(self, w, t=1):
        return 0.1 * w.abs().sum()

    def prox(self, w, step, t=1):
        return torch.from_numpy(np.arctan(w.detach().numpy()))


@dataclass(frozen=True)
class DetachedDescent(bl.GradientDescent):
    def step(self, loss, w, state, t):
        return w - self.lr * bl.gradient(loss, w).detach(), state


def forgotten_graph(loss, w, state, t):
    (slope,) = torch.autograd.grad(loss(w), w)
    return w - 0.1 * slope, state


def clipped(loss, w, state, t):
    slope = bl.gradient(loss, w)
    return w - 0.1 * slope / slope.norm().detach().clamp(min=1), state


def detached_velocity(loss, w, state, t):
    velocity = 0.9 * state.detach() - 0.1 * bl.gradient(loss, w)
    return w + velocity, velocity


def without_graph(loss, w, state, t):
    slope = bl.gradient(loss, w)
    with torch.no_grad():
        step = 0.1 * slope
    return w - step, state


HIDDEN_STEPS = {
    "no create_graph": forgotten_graph,
    "no_grad": without_graph,
    "a penalty in numpy": bl.ISTA(0.1, DetachedPenalty()),
}
DETACHED_STEPS = {
    "a clipped gradient with a detached norm": clipped,
    "a detached velocity": StepFunction(detached_velocity, torch.zeros_like),
    "first-order MAML": DetachedDescent(0.1),
}


@pytest.mark.parametrize("name", HIDDEN_STEPS)
@pytest.mark.parametrize("method", [bl.Unrolled(), bl.Forward(), bl.FiniteDifference(), "auto"], ids=str)
def test_a_step_that_hides_its_derivative_in_w(name, method):
    """λ reaches f_T on other paths too, so that no part of the gradient is simply missing."""
    problem = bl.Problem(inner, lambda w, lam, b: error(w, b) + lam.sum(), lambda lam: lam.sin())
    refused(problem, "derivatives of dynamics", method=method, dynamics=HIDDEN_STEPS[name])
    first_order = replace(problem, check_derivatives=False)
    bl.hypergradient(first_order, LAM, task(), dynamics=HIDDEN_STEPS[name], steps=5)


@pytest.mark.parametrize("name", DETACHED_STEPS)
def test_a_step_may_detach_what_it_takes_for_a_constant(name):
    """A detach() in a step is a choice: the gradient is that of the run with constants in its place."""
    problem = bl.Problem(inner, lambda w, lam, b: error(w, b) + lam.sum(), lambda lam: lam.sin())
    step, lam = DETACHED_STEPS[name], LAM.clone().requires_grad_()
    step = step if isinstance(step, bl.Dynamics) else StepFunction(step)
    w = lam.sin()
    state = step.init(w)
    for t in range(1, 6):
        w, state = step.step(lambda w: inner(w, lam, task().train), w, state, t)
    (expected,) = torch.autograd.grad(error(w, task().val) + lam.sum(), lam)
    for method in (bl.Unrolled(), bl.Reverse(group_bytes=0), bl.Forward()):
        found = bl.hypergradient(problem, LAM, task(), dynamics=DETACHED_STEPS[name], steps=5, method=method)
        torch.testing.assert_close(found.grad, expected, rtol=1e-10, atol=1e-12)


def test_a_step_that_detaches_lam_too_is_refused():
    problem = bl.Problem(lambda w, lam, b: error(w, b), lambda w, lam, b: error(w, b) + lam[1:].sum(), zeros)

    def rate_and_slope(lam):
        return StepFunction(lambda loss, w, state, t: (w - (lam[0].exp() * bl.gradient(loss, w)).detach(), state))

    refused(problem, "derivatives of dynamics", torch.tensor([-2.0, 0.0]), dynamics=rate_and_slope)


def test_a_hidden_derivative_of_the_fixed_point():
    problem, method = bl.Problem(inner, outer, zeros), bl.Implicit(condition="fixed-point")
    step = lambda loss, w, state, t: (0.5 * w + 0.5 * (w - 0.1 * bl.gradient(loss, w)).detach(), state)  # noqa: E731
    both = bl.Problem(inner, lambda w, lam, b: error(w, b) + lam.sum(), zeros)
    for given in (problem, both):
        with pytest.raises(bl.BilevelError):
            bl.hypergradient(given, LAM, task(), dynamics=step, steps=300, method=method)
    right = lambda loss, w, state, t: (w - 0.05 * bl.gradient(loss, w), state)  # noqa: E731
    bl.hypergradient(problem, LAM, task(), dynamics=right, steps=300, method=method)


def test_a_second_dynamics_of_the_same_code_is_checked_too():
    lam, problem = torch.tensor([-1.0, -2.0]), ridge_with_rate()

    def built(rate):
        return lambda lam: bl.GradientDescent(rate(lam))

    right = built(lambda lam: lam[1].exp())
    bl.hypergradient(problem, lam, task(), dynamics=right, steps=5)
    refused(problem, "derivatives of dynamics", lam, dynamics=built(lambda lam: float(lam[1].detach().exp())))


class Schedule:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, t):
        return self.rate / t

    def at(self, t):
        return self.rate / t


@pytest.mark.parametrize(
    "schedule",
    [Schedule, lambda rate: Schedule(rate).at, lambda rate: partial(lambda rate, t: rate / t, rate), lambda rate: rate],
)
def test_a_schedule_that_reads_lam_is_refused_at_a_second_call_too(schedule):
    lam, problem = LAM.clone().requires_grad_(), bl.Problem(inner, outer, zeros)
    bl.hypergradient(problem, lam, task(), dynamics=bl.GradientDescent(schedule(0.1)), steps=5)
    refused(problem, "reads λ from a closure", lam, dynamics=bl.GradientDescent(schedule(lam[0].exp())))


@pytest.mark.parametrize("method", [*STEP_METHODS, bl.Implicit()])
def test_a_derivative_that_is_hidden_in_encode(method):
    def encode(hidden):
        return lambda lam, task: bl.Task(
            (task.train[0] * lam.exp(), task.train[1]), (task.val[0] * hidden(lam), task.val[1])
        )

    refused(
        bl.Problem(inner, outer, zeros, encode(lambda lam: lam.detach().exp())), "derivatives of encode", LAM, method
    )
    calls = []
    problem = bl.Problem(inner, outer, zeros, encode(lambda lam: calls.append(1) or lam.exp()))
    call = {"dynamics": DESCENT, "steps": 5, "method": method}
    bl.hypergradient(problem, LAM, task(), **call)
    calls.clear()
    bl.hypergradient(problem, LAM, task(), **call)
    assert len(calls) == 1, "encode is checked once per problem"


FROZEN = torch.randn(3, 3, generator=torch.Generator().manual_seed(5))
LOWER = {
    # A frozen layer in a closure does not accept double tensors.
    "constants": lambda w, lam, X: torch.nn.functional.linear(X, FROZEN.float()) @ w,
    "casts": lambda w, lam, X: (X.float() @ w.to(torch.float32)).to(w.dtype),
}


@pytest.mark.parametrize("name", LOWER)
@pytest.mark.parametrize("hides", [False, True])
def test_functions_in_two_precisions_are_compared_in_double_precision(name, hides):
    dtype = torch.float32 if name == "constants" else torch.float64
    lam, given = LAM.to(dtype), bl.Task(*(tuple(x.to(dtype) for x in data(seed)) for seed in (0, 1)))

    def inner(w, lam, batch):
        penalty = (lam.detach() if hides else lam).exp() * w**2
        return ((LOWER[name](w, lam, batch[0]) - batch[1]) ** 2).mean() + penalty.sum() + (lam * w).sum()

    problem = bl.Problem(inner, outer, lambda lam: torch.zeros(3, dtype=dtype))
    if hides:
        refused(problem, "derivatives of inner are not what autograd says", lam, given=given)
    else:
        bl.hypergradient(problem, lam, given, dynamics=DESCENT, steps=5)


def test_an_encoder_that_keeps_statistics_is_called_once():
    calls = []

    def encode(lam, task):
        calls.append(1)
        return bl.Task((task.train[0] * lam.exp(), task.train[1]), task.val)

    encode.keeps_statistics = True
    bl.hypergradient(bl.Problem(inner, outer, zeros, encode), LAM, task(), dynamics=DESCENT, steps=5)
    assert len(calls) == 1
