"""Every optimiser of torch that can be differentiated, in 23 settings, and inner steps that users write themselves.

The reference runs the optimiser itself, as one would without this library, and takes central differences of the result.
"""

import pytest
import torch
from comparing import NO_DATA, agree, close, differences, slope
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

import bilevel as bl
from bilevel import trees

SETTINGS = {
    "SGD": (SGD, {"lr": 0.1}),
    "SGD with momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD with Nesterov momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD with weight decay": (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD with dampening": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD that maximises": (SGD, {"lr": 0.02, "maximize": True}),
    "Adam": (Adam, {"lr": 0.05}),
    "Adam with weight decay": (Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "Adam with amsgrad": (Adam, {"lr": 0.05, "amsgrad": True}),
    "AdamW": (AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "Adadelta": (Adadelta, {"lr": 1.0}),
    "Adadelta with weight decay": (Adadelta, {"lr": 1.0, "rho": 0.8, "weight_decay": 0.1}),
    "Adagrad": (Adagrad, {"lr": 0.1}),
    "Adagrad with decays": (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
    "Adamax": (Adamax, {"lr": 0.05}),
    "ASGD": (ASGD, {"lr": 0.05}),
    "ASGD with an early average": (ASGD, {"lr": 0.05, "t0": 2, "lambd": 0.01}),
    "Rprop": (Rprop, {"lr": 0.05}),
    "RMSprop": (RMSprop, {"lr": 0.05}),
    "RMSprop with momentum": (RMSprop, {"lr": 0.05, "momentum": 0.5}),
    "RMSprop, centred, with weight decay": (RMSprop, {"lr": 0.05, "centered": True, "weight_decay": 0.1}),
    "NAdam": (NAdam, {"lr": 0.05}),
    "RAdam": (RAdam, {"lr": 0.05}),
}
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.sin(X @ torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64))


def loss(w, lam, data=None):
    return ((torch.tanh(X @ w["in"]) @ w["out"] - Y) ** 2).mean() + (lam.exp() * w["in"] ** 2).sum()


def judge(w, lam, data=None):
    return ((torch.tanh(X.flip(0) @ w["in"]) @ w["out"] - Y) ** 2).mean() + w["out"].square().sum()


def start(lam):
    return {"in": torch.linspace(-1, 1, 6).reshape(3, 2), "out": torch.tensor([0.7, -0.4])}


PROBLEM = bl.Problem(loss, judge, start)
LAM = torch.full((3, 2), -2.0)


def trained(optimizer, settings, lam, steps):
    """w after some steps of the optimiser, as anybody would write them."""
    w = {name: value.clone().requires_grad_() for name, value in start(lam).items()}
    optimizer = optimizer(w.values(), **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(w, lam).backward()
        optimizer.step()
    return {name: value.detach() for name, value in w.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_optimiser_of_torch(name):
    optimizer, settings = SETTINGS[name]
    agree(
        differences(lambda lam: judge(trained(optimizer, settings, lam, 5), lam), LAM),
        PROBLEM,
        LAM,
        dynamics=bl.TorchOptim(optimizer, **settings),
        steps=5,
        tolerance=1e-6,
    )


@pytest.mark.parametrize(
    "ours, theirs, settings",
    [
        (bl.GradientDescent(0.1), SGD, {"lr": 0.1}),
        (bl.HeavyBall(0.1, 0.9), SGD, {"lr": 0.1, "momentum": 0.9}),
        (bl.Adam(0.05), Adam, {"lr": 0.05}),
        (bl.AdamW(0.05, weight_decay=0.1), AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, bl.Dynamics) else "",
)
def test_the_librarys_own_dynamics_beside_torchs_optimiser(ours, theirs, settings):
    agree(
        differences(lambda lam: judge(trained(theirs, settings, lam, 5), lam), LAM),
        PROBLEM,
        LAM,
        dynamics=ours,
        steps=5,
        tolerance=1e-6,
    )


def test_adam_with_its_rate_and_both_betas_learned_over_100_steps():
    lam = {"lr": torch.tensor(-3.0), "betas": torch.tensor([2.0, 4.0])}
    fixed = torch.tensor(-2.0)

    def settings(lam):
        return {"lr": float(lam["lr"].exp()), "betas": tuple(lam["betas"].sigmoid().tolist())}

    def final(lam):
        return judge(trained(Adam, settings(lam), fixed, 100), fixed)

    problem = bl.Problem(lambda w, lam, data: loss(w, fixed), lambda w, lam, data: judge(w, fixed), start)
    agree(
        differences(final, lam),
        problem,
        lam,
        dynamics=lambda lam: bl.Adam(lam["lr"].exp(), betas=tuple(lam["betas"].sigmoid())),
        steps=100,
        tolerance=1e-5,
    )


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Forward(), bl.Reversible()], ids=lambda m: type(m).__name__)
def test_a_learning_rate_and_a_momentum_for_each_step(method):
    lam = {"lr": torch.linspace(-3, -2, 6), "momentum": torch.linspace(0.5, 0.9, 6)}
    fixed = torch.tensor(-2.0)

    def plain(lam):
        w, v = start(None), {"in": torch.zeros(3, 2), "out": torch.zeros(2)}
        for t in range(6):
            live = {name: value.detach().requires_grad_() for name, value in w.items()} if t == 0 else w
            g = dict(zip(live, torch.autograd.grad(loss(live, fixed), live.values(), create_graph=True), strict=True))
            v = {name: lam["momentum"][t] * v[name] - lam["lr"][t].exp() * g[name] for name in w}
            w = {name: live[name] + v[name] for name in w}
        return judge(w, fixed)

    problem = bl.Problem(lambda w, lam, data: loss(w, fixed), lambda w, lam, data: judge(w, fixed), start)
    agree(
        slope(plain, lam),
        problem,
        lam,
        dynamics=lambda lam: bl.HeavyBall(lambda t: lam["lr"][t - 1].exp(), lambda t: lam["momentum"][t - 1]),
        steps=6,
        methods=[method],
        tolerance=1e-9,
    )


def clipped(loss, w, state, t):
    g = bl.gradient(loss, w)
    return w - 0.5 * g * (0.3 / g.norm()).clamp_max(1), state


def sign_descent(loss, w, state, t):
    return w - 0.05 / t * bl.gradient(loss, w).sign(), state


def barzilai_borwein(loss, w, state, t):
    """The step size ‖Δw‖²/⟨Δw, Δg⟩ from the last two points."""
    g = bl.gradient(loss, w)
    dw, dg = w - state["w"], g - state["g"]
    rate = 0.1 if t == 1 else dw.dot(dw) / dw.dot(dg)
    return w - rate * g, {"w": w, "g": g}


def backtracking(loss, w, state, t):
    """Halve the step until the loss falls enough; the number of halvings is piecewise constant in λ."""
    g, rate = bl.gradient(loss, w), 4.0
    while loss(w - rate * g) > loss(w) - 0.3 * rate * g.dot(g):
        rate /= 2
    return w - rate * g, state


def newton_with_a_hessian(loss, w, state, t):
    return w - 0.5 * torch.linalg.solve(
        torch.stack([torch.autograd.grad(part, w, create_graph=True)[0] for part in bl.gradient(loss, w)]),
        bl.gradient(loss, w),
    ), state


def lookahead(loss, w, state, t):
    """Fast weights for two steps, then half the way back to the slow ones."""
    fast = w - 0.3 * bl.gradient(loss, w)
    fast = fast - 0.3 * bl.gradient(loss, fast)
    return w + 0.5 * (fast - w), state


def extragradient(loss, w, state, t):
    return w - 0.3 * bl.gradient(loss, w - 0.3 * bl.gradient(loss, w)), state


def polyak(loss, w, state, t):
    """The step (L − L*)/‖∇L‖² with L* = 0."""
    g = bl.gradient(loss, w)
    return w - 0.5 * loss(w) / (g.dot(g) + 1e-3) * g, state


def lion(loss, w, state, t):
    """A smooth version of the sign of an interpolated momentum."""
    g = bl.gradient(loss, w)
    return w - 0.1 * torch.tanh(5 * (0.9 * state + 0.1 * g)), 0.99 * state + 0.01 * g


HAND_WRITTEN = {
    "gradient clipping": (clipped, None),
    "Barzilai-Borwein step sizes": (barzilai_borwein, lambda w: {"w": w * 1.0, "g": w * 0.0}),
    "backtracking line search": (backtracking, None),
    "damped Newton steps": (newton_with_a_hessian, None),
    "lookahead": (lookahead, None),
    "extragradient": (extragradient, None),
    "Polyak's step size": (polyak, None),
    "a smooth Lion": (lion, lambda w: w * 0.0),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_step_of_the_users(name):
    function, memory = HAND_WRITTEN[name]
    lam = torch.tensor([0.3, -0.2, 0.5])

    def bowl(w, lam, data=None):
        return torch.log(torch.cosh(X @ w - Y)).mean() + 0.5 * (lam.exp() * w**2).mean()

    def plain(lam):
        w = torch.full((3,), 0.8)
        state = () if memory is None else memory(w)
        for t in range(1, 7):
            w, state = function(lambda w: bowl(w, lam), w.detach().requires_grad_(), state, t)
            w, state = w.detach(), trees.detach(state)
        return (w**3).sum()

    problem = bl.Problem(bowl, lambda w, lam, data: (w**3).sum(), lambda lam: torch.full((3,), 0.8))
    dynamics = function if memory is None else bl.StepFunction(function, memory)
    agree(differences(plain, lam), problem, lam, dynamics=dynamics, steps=6, tolerance=1e-6)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_an_optimiser_that_cannot_be_differentiated_is_refused(name):
    with pytest.raises(bl.BilevelError, match="differentiable"):
        bl.TorchOptim(getattr(torch.optim, name), lr=0.1)


def test_sign_descent_has_no_derivative_and_gives_none():
    """Where a step forgets the size of the gradient, λ in the inner objective has no effect: 0, not noise."""
    problem = bl.Problem(
        lambda w, lam, data: ((w - lam.exp()) ** 2).sum(), lambda w, lam, data: (w**2).sum(), lambda lam: torch.zeros(2)
    )
    found = bl.hypergradient(problem, torch.zeros(2), NO_DATA, dynamics=sign_descent, steps=4, allow_unused=True)
    close(found.grad, torch.zeros(2))
    close(found.inner, torch.full((2,), 0.05 * (1 + 1 / 2 + 1 / 3 + 1 / 4)), 1e-12)
