"""Implicit where the limit of the dynamics is not a point with ∇L = 0: right, or refused."""

import pytest
import torch

import bilevel as bl
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error

TASK = bl.Task(None, None)
CURVATURE, CENTRE = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, -2.0, 0.5])


def bowl(centre=CENTRE):
    """L = ½ Σ h (w − λ c)², E = Σ (w − 1)²: a decay ρ in the slope moves the minimiser to h λ c / (h + ρ)."""
    return bl.Problem(
        lambda w, lam, _: (CURVATURE * (w - lam * centre) ** 2).sum() / 2,
        lambda w, lam, _: ((w - 1) ** 2).sum(),
        lambda lam: torch.full((3,), 0.3),
    )


LAM = torch.tensor(0.7)


def at_minimiser(decay):
    factor = CURVATURE * CENTRE / (CURVATURE + decay)
    return 2 * (factor * (factor * LAM - 1)).sum()


@pytest.mark.parametrize("method", [bl.Implicit(), bl.Implicit(bl.Direct()), bl.Implicit(newton=1e-12)], ids=str)
@pytest.mark.parametrize(
    ("optimizer", "settings", "decay"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 1.0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "nesterov": True}, 0.3),
        (torch.optim.Adam, {"lr": 0.05, "betas": (0.5, 0.6)}, 0.5),
        (torch.optim.RAdam, {"lr": 0.05, "betas": (0.5, 0.6)}, 0.5),
        (torch.optim.NAdam, {"lr": 0.05, "betas": (0.5, 0.6)}, 0.5),
        (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.5}, 0.5),
        (torch.optim.Adagrad, {"lr": 0.5}, 0.5),
        (torch.optim.Adamax, {"lr": 0.05}, 0.5),
        (torch.optim.Adadelta, {"lr": 1.0}, 0.5),
        (torch.optim.ASGD, {"lr": 0.1, "lambd": 0.2}, 0.3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_weight_decay_that_is_added_to_the_slope(optimizer, settings, decay, method):
    """At the minimiser of L + ½ρ‖w‖², where these dynamics end, the gradient has a closed form."""
    # Only the plain ones come to rest in so few steps; the others are asked where they would.
    rest = CURVATURE * LAM * CENTRE / (CURVATURE + decay + settings.get("lambd", 0))
    found = bl.hypergradient(
        bowl(),
        LAM,
        TASK,
        dynamics=bl.TorchOptim(optimizer, weight_decay=decay, **settings),
        steps=0,
        start=rest,
        method=method,
    )
    assert relative_error(found.grad, at_minimiser(decay + settings.get("lambd", 0))) < 1e-9


def test_sgd_with_weight_decay_agrees_with_reverse():
    settings = {"dynamics": bl.TorchOptim(torch.optim.SGD, lr=0.2, weight_decay=1.0), "steps": 300}
    reverse = bl.hypergradient(bowl(), LAM, TASK, **settings).grad
    assert relative_error(bl.hypergradient(bowl(), LAM, TASK, method=bl.Implicit(), **settings).grad, reverse) < 1e-9
    assert relative_error(reverse, at_minimiser(0.0)) > 0.1


def test_ascent_with_weight_decay():
    """`maximize` and a decay: −∇L + ρ w = 0."""
    problem = bl.Problem(
        lambda w, lam, _: -(CURVATURE * (w - lam * CENTRE) ** 2).sum() / 2, bowl().outer, lambda lam: torch.zeros(3)
    )
    dynamics = bl.TorchOptim(torch.optim.SGD, lr=0.2, weight_decay=1.0, maximize=True)
    found = bl.hypergradient(problem, LAM, TASK, dynamics=dynamics, steps=300, method=bl.Implicit(bl.Direct()))
    assert relative_error(found.grad, at_minimiser(1.0)) < 1e-9


def decayed(loss, w, state, t):
    return w - 0.1 * bl.gradient(loss, w) - 0.01 * w, state


def shrunk(loss, w, state, t):
    moved = w - 0.1 * bl.gradient(loss, w)
    return moved.sign() * torch.relu(moved.abs() - 0.02), state


def bounded(loss, w, state, t):
    return (w - 0.1 * bl.gradient(loss, w)).clamp(-0.2, 0.6), state


def on_the_simplex(loss, w, state, t):
    return bl.Simplex().project(w - 0.1 * bl.gradient(loss, w)), state


def mirrored(loss, w, state, t):
    moved = w * torch.exp(-0.1 * bl.gradient(loss, w))
    return moved / moved.sum(), state


def frozen(loss, w, state, t):
    return w - 0.1 * bl.gradient(loss, w) * torch.tensor([1.0, 1.0, 0.0]), state


def hyperplane(loss, w, state, t):
    moved = w - 0.1 * bl.gradient(loss, w)
    return moved + (1 - moved.sum()) / 3, state


OTHER_LIMITS = {
    "decay": decayed,
    "shrinkage": shrunk,
    "bounds": bounded,
    "simplex": on_the_simplex,
    "mirror descent": mirrored,
    "frozen weight": frozen,
    "hyperplane": hyperplane,
    "AdamW": bl.AdamW(0.05, weight_decay=0.1),
    "torch AdamW": bl.TorchOptim(torch.optim.AdamW, lr=0.05),
    "decoupled": bl.TorchOptim(torch.optim.RAdam, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True),
    "cosine to zero": bl.AdamW(lambda t: 0.1 * (1 - t / 600), weight_decay=0.1),
}


@pytest.mark.parametrize("steps", [5, 30, 600])
@pytest.mark.parametrize("name", OTHER_LIMITS)
def test_other_limits_are_refused(name, steps):
    """Converged or not."""
    start = None if name not in ("simplex", "mirror descent", "hyperplane") else torch.tensor([0.5, 0.3, 0.2])
    call = {"dynamics": OTHER_LIMITS[name], "steps": steps, "start": start}
    with pytest.raises(bl.BilevelError, match=r"differentiates ∇L = 0, but.*fixed-point"):
        bl.hypergradient(bowl(), LAM, TASK, method=bl.Implicit(), **call)
    if name not in ("mirror descent", "frozen weight") and steps == 600:
        with pytest.raises(bl.BilevelError, match=r"differentiates ∇L = 0"):
            bl.hypergradient(bowl(), LAM, TASK, method=bl.Implicit(newton=1e-9), **call)


@pytest.mark.parametrize("name", ["decay", "shrinkage", "bounds", "simplex", "mirror descent", "hyperplane"])
def test_and_right_through_the_fixed_point(name):
    start = torch.tensor([0.5, 0.3, 0.2])
    call = {"dynamics": OTHER_LIMITS[name], "steps": 600, "start": start}
    method = bl.Implicit(condition="fixed-point")
    found = bl.hypergradient(bowl(), LAM, TASK, method=method, **call).grad
    assert relative_error(found, bl.hypergradient(bowl(), LAM, TASK, **call).grad) < 1e-7
    numbers = central_differences(lambda lam: value_of(bowl(), lam, TASK, **call), LAM)
    assert relative_error(found, numbers) < 1e-6


@pytest.mark.parametrize("centre", [CENTRE, torch.tensor([3.0, -2.0, -1.0])], ids=["an edge", "a corner"])
@pytest.mark.parametrize("step", [mirrored, lambda loss, w, s, t: (w * torch.exp(-0.1 * bl.gradient(loss, w)), s)])
def test_weights_that_a_multiplicative_step_has_brought_to_zero(step, centre):
    """They no longer move, however steep L is; in a corner of the simplex nothing does."""
    start = torch.tensor([0.5, 0.3, 0.2])
    call = {"dynamics": bl.StepFunction(step), "steps": 600, "start": start}
    with pytest.raises(bl.BilevelError, match="does not follow"):
        bl.hypergradient(bowl(centre), LAM, TASK, method=bl.Implicit(), **call)


def clipped(loss, w, state, t):
    slope = bl.gradient(loss, w)
    return w - 0.1 * slope / slope.norm().clamp(min=0.5), state


def normalised(loss, w, state, t):
    slope = bl.gradient(loss, w)
    return w - 0.5 / t * slope / slope.norm().clamp(min=1e-9), state


def signs(loss, w, state, t):
    return w - 0.3 / t * bl.gradient(loss, w).sign(), state


def preconditioned(loss, w, state, t):
    return w - 0.1 * bl.gradient(loss, w) / torch.tensor([1.0, 30.0, 900.0]).to(w), state


def newtons(loss, w, state, t):
    hessian = torch.autograd.functional.hessian(loss, w)
    return w - 0.5 * torch.linalg.solve(hessian, bl.gradient(loss, w)), state


def searched(loss, w, state, t):
    slope, size = bl.gradient(loss, w), 1.0
    for _ in range(20):
        if loss(w - size * slope) <= loss(w) - 0.3 * size * slope.square().sum():
            break
        size /= 2
    return w - size * slope, state


def with_momentum(loss, w, state, t):
    velocity = 0.8 * state - 0.1 * bl.gradient(loss, w)
    return w + velocity, velocity


MINIMISERS = {
    "gradient descent": bl.GradientDescent(0.1),
    "a step size for each": bl.GradientDescent(torch.tensor([0.3, 0.01, 0.1], dtype=torch.float32)),
    "no step": bl.GradientDescent(0.0),
    "to zero": bl.GradientDescent(lambda t: 0.1 * (1 - t / 600)),
    "heavy ball": bl.HeavyBall(0.1, 0.5),
    "Adam": bl.Adam(0.05),
    "AdamW without decay": bl.AdamW(0.05, weight_decay=0.0),
    "RMSProp": bl.RMSProp(0.01),
    "clipped": clipped,
    "normalised": normalised,
    "signs": signs,
    "preconditioned": preconditioned,
    "Newton": newtons,
    "line search": searched,
    "momentum": bl.StepFunction(with_momentum, torch.zeros_like),
    "bounds out of reach": lambda loss, w, state, t: ((w - 0.1 * bl.gradient(loss, w)).clamp(-9, 9), state),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("steps", [1, 20, 600])
@pytest.mark.parametrize("name", MINIMISERS)
def test_dynamics_that_seek_the_minimiser_are_not_refused(name, steps, dtype):
    """The quadratic's implicit gradient is E's slope at w_T times ∂w_λ/∂λ = c, wherever w_T is."""
    problem = bl.Problem(bowl().inner, bowl().outer, lambda lam: torch.full((3,), 0.3, dtype=dtype))
    found = bl.hypergradient(
        problem, LAM.to(dtype), TASK, dynamics=MINIMISERS[name], steps=steps, method=bl.Implicit(bl.Direct())
    )
    assert relative_error(found.grad, (2 * (found.inner - 1) * CENTRE.to(dtype)).sum()) < 1e-5


def test_what_the_trials_cost():
    """They do not call the inner objective."""
    calls = 0

    def inner(w, lam, _):
        nonlocal calls
        calls += 1
        return bowl().inner(w, lam, _)

    problem, counts = bl.Problem(inner, bowl().outer, bowl().init), []
    for _ in range(2):
        calls = 0
        bl.hypergradient(problem, LAM, TASK, dynamics=bl.GradientDescent(0.1), steps=10, method=bl.Implicit())
        counts.append(calls)
    # Ten steps, the slope at w_T, once more to see that it is a function, and beside w_T to look for a kink.
    assert counts[1] == 13


def test_a_run_on_its_way_to_infinity_has_no_limit_to_differentiate():
    """The numbers are finite, and wrong: no fixed point is near."""
    lam, task = torch.ones(3, dtype=torch.float64), bl.Task(None, None)
    square = bl.Problem(lambda w, lam, _: ((w - lam) ** 2).sum(), lambda w, lam, _: (w**2).sum(), torch.zeros_like)
    with pytest.raises(bl.DivergenceError, match=r"at step 60 of 60 the inner loss was .*The step size 1.5 lies above"):
        bl.hypergradient(square, lam, task, dynamics=bl.GradientDescent(1.5), steps=60, method=bl.Implicit())
    away = bl.Problem(
        fixed_point=lambda w, lam, _: 3 * w - lam, outer=lambda w, lam, _: (w**2).sum(), init=torch.zeros_like
    )
    with pytest.raises(bl.DivergenceError, match="moves w away from its fixed point"):
        bl.hypergradient(away, lam, task, dynamics=bl.Picard(), steps=60, method=bl.Implicit())
    large = bl.Problem(lambda w, lam, _: 1e9 * ((w - lam) ** 2).sum(), lambda w, lam, _: (w**2).sum(), torch.zeros_like)
    found = bl.hypergradient(large, lam, task, dynamics=bl.GradientDescent(1e-12), steps=1, method=bl.Implicit())
    assert torch.isfinite(found.value)


DATA = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
LABELS = DATA @ torch.tensor([1.0, -2.0, 0.5]) + 0.1
WITH_KINKS = {
    "absolute value": lambda w, lam: (w - lam * CENTRE).abs().sum() + 0.05 * (w**2).sum(),
    "absolute errors": lambda w, lam: (DATA @ w - LABELS).abs().mean() + 0.05 * lam * (w**2).sum(),
    "hinge": lambda w, lam: (1 - LABELS.sign() * (DATA @ w)).clamp(min=0).mean() + 0.05 * lam * (w**2).sum(),
    "L1 penalty": lambda w, lam: ((DATA @ w - LABELS) ** 2).mean() + 5 * lam * w.abs().sum(),
}
SMOOTH = {
    "squared hinge": lambda w, lam: ((1 - LABELS.sign() * (DATA @ w)).clamp(min=0) ** 2).mean() + lam * (w**2).sum(),
    "Huber": lambda w, lam: torch.nn.functional.huber_loss(DATA @ w, LABELS, delta=0.05) + 0.1 * lam * (w**2).sum(),
    "logistic": lambda w, lam: (
        torch.nn.functional.softplus(-9 * LABELS.sign() * (DATA @ w)).mean() + lam * (w**2).sum()
    ),
    "quartic": lambda w, lam: ((w - lam * CENTRE) ** 4).sum() + 0.01 * (w**2).sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lr", [1e-3, 1e-2])
@pytest.mark.parametrize("name", [*WITH_KINKS, *SMOOTH])
def test_a_kink_of_the_inner_objective(name, lr, dtype):
    """The minimiser is at a kink and moves with it: ∇²L there does not say how."""
    loss = {**WITH_KINKS, **SMOOTH}[name]
    problem = bl.Problem(
        lambda w, lam, _: loss(w.double(), lam.double()).to(dtype),
        lambda w, lam, _: ((w - 1) ** 2).sum(),
        lambda lam: torch.full((3,), 0.3, dtype=dtype),
        check_derivatives=False,
    )
    call = {"dynamics": bl.GradientDescent(lr), "steps": round(2.5 / lr), "method": bl.Implicit(bl.Direct())}
    if name in SMOOTH:
        bl.hypergradient(problem, LAM.to(dtype), TASK, **call)
    else:
        with pytest.raises(bl.BilevelError, match=r"has a kink.*check_kinks=False"):
            bl.hypergradient(problem, LAM.to(dtype), TASK, **call)
        call["method"] = bl.Implicit(bl.Direct(), check_kinks=False)
        assert torch.isfinite(bl.hypergradient(problem, LAM.to(dtype), TASK, **call).value)


@pytest.mark.parametrize("method", [bl.Implicit(), bl.F2SA()], ids=str)
@pytest.mark.filterwarnings("ignore:CG stopped")
def test_a_w_in_two_precisions(method):
    """The slope is in double precision, and what is left of it at the minimiser is a rounding error of the other."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64)

    def inner(w, lam, data):
        return sum(((part.double() - x) ** 2).sum() + (lam.exp() * part.double() ** 2).sum() for part in w.values())

    problem = bl.Problem(
        inner,
        lambda w, lam, data: ((w["a"] + w["b"].double()) ** 3).sum(),
        lambda lam: {"a": torch.zeros(6, dtype=torch.float64), "b": torch.zeros(6, dtype=torch.float32)},
    )
    lam, settings = torch.linspace(-1, 0, 6, dtype=torch.float64), {"dynamics": bl.HeavyBall(0.1, 0.5), "steps": 200}
    right = bl.hypergradient(problem, lam, bl.Task(None, None), **settings).grad
    found = bl.hypergradient(problem, lam, bl.Task(None, None), method=method, **settings).grad
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
