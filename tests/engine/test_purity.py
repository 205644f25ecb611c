"""What gives another number when it is asked again is refused, by every method."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import bilevel as bl
from bilevel import trees
from bilevel.methods import find
from bilevel.testing import relative_error

X, Y = torch.linspace(-1, 1, 48).reshape(12, 4).sin(), torch.linspace(-1, 1, 12).cos()
TASK, LAM = bl.Task((X, Y), (X + 0.1, Y)), torch.tensor(-2.0)


def problem(dropped):
    return bl.Problem(
        lambda w, lam, b: ((dropped(b[0]) @ w - b[1]) ** 2).mean() + lam.exp() * (w**2).sum(),
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda lam: torch.zeros(4),
    )


# FirstOrder looks at the outer objective only, where λ does not enter.
METHODS = [
    example
    for name, kind in find().items()
    if name != "FirstOrder" and kind.structure is None
    for example in kind.examples()[:1]
]
METHODS += [bl.Implicit(newton=1e-9), bl.Implicit(condition="fixed-point"), "auto"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method)[:30])
def test_unseeded_dropout_is_refused(method):
    random = problem(lambda x: F.dropout(x, 0.5))
    with pytest.raises(bl.BilevelError, match="pure function"):
        bl.hypergradient(random, LAM, TASK, dynamics=bl.HeavyBall(0.1, 0.5), steps=30, method=method)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method)[:30])
def test_a_random_outer_objective_is_refused(method):
    random = bl.Problem(
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + lam.exp() * (w**2).sum(),
        lambda w, lam, b: ((F.dropout(b[0], 0.5) @ w - b[1]) ** 2).mean(),
        lambda lam: torch.full((4,), 0.1),
    )
    settings = {"dynamics": bl.HeavyBall(0.1, 0.5), "steps": 30}
    with pytest.raises(bl.BilevelError, match=r"The outer objective gave another value.*pure function"):
        bl.hypergradient(random, LAM, TASK, method=method, **settings)
    with pytest.raises(bl.BilevelError, match="The outer objective gave another value"):
        bl.objective(random, LAM, TASK, **settings)


def test_a_first_step_that_hides_the_noise():
    """At the start every weight goes to a bound, whatever the mask; later it need not."""
    random = problem(lambda x: F.dropout(x, 0.5))

    def step(loss, w, state, t):
        return trees.map(lambda w, g: (w - 0.01 * g).clamp(0.2, 0.3), w, bl.gradient(loss, w)), state

    with pytest.raises(bl.BilevelError, match="gradient of the inner objective"):
        bl.hypergradient(random, LAM, TASK, dynamics=step, steps=30)


@pytest.mark.parametrize("condition", ["auto", "fixed-point"])
def test_dropout_that_is_switched_on_later(condition):
    """Checks are remembered, so Implicit asks at every call."""
    layer = torch.nn.Dropout().eval()
    switched, settings = problem(layer), {"dynamics": bl.GradientDescent(0.1), "steps": 3}
    method = bl.Implicit(condition=condition)
    bl.hypergradient(switched, LAM, TASK, method=method, **settings)
    layer.train()
    with pytest.raises(bl.BilevelError, match=r"another|different"):
        bl.hypergradient(switched, LAM, TASK, method=method, **settings)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method)[:30])
def test_noise_that_multiplies_w_which_starts_at_zero(method):
    random = bl.Problem(
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() + lam.exp() * (torch.rand(4) * w**2).sum(),
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda lam: torch.zeros(4),
    )
    with pytest.raises(bl.BilevelError, match="pure function"):
        bl.hypergradient(random, LAM, TASK, dynamics=bl.HeavyBall(0.1, 0.5), steps=30, method=method)


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Unrolled(), bl.Forward(), bl.FiniteDifference()])
def test_noise_in_later_steps(method):
    task = bl.Task(lambda t: (X, Y, torch.tensor(float(t > 1))), TASK.val)
    random = bl.Problem(
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean() * (1 + b[2] * torch.rand(())) + lam.exp() * (w**2).sum(),
        lambda w, lam, b: ((b[0] @ w - b[1]) ** 2).mean(),
        lambda lam: torch.zeros(4),
    )
    with pytest.raises(bl.BilevelError, match="Step 30 gave another result"):
        bl.hypergradient(random, LAM, task, dynamics=bl.GradientDescent(0.1), steps=30, method=method)


def test_a_mask_that_is_a_function_of_the_batch_is_none_of_this():
    seeded = problem(lambda x: x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) > 0.5))
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 2000}
    exact = bl.hypergradient(seeded, LAM, TASK, **settings).grad
    assert relative_error(bl.hypergradient(seeded, LAM, TASK, method=bl.Implicit(), **settings).grad, exact) < 1e-6
    assert float(trees.norm(exact)) > 0


def test_a_random_setting_of_a_dynamics_that_is_a_function_of_lam():
    fixed, rates = problem(lambda x: x), iter(torch.linspace(0.1, 0.2, 100))
    for random in (lambda lam: bl.GradientDescent(0.1 * torch.rand(())), lambda lam: bl.GradientDescent(next(rates))):
        for method in (bl.Reverse(), bl.Implicit(), bl.ZeroOrder()):
            with pytest.raises(bl.BilevelError, match=r"Step 1 gave another result.*pure function"):
                bl.hypergradient(fixed, LAM, TASK, dynamics=random, steps=3, method=method)


def test_statistics_that_a_module_keeps():
    """In train mode batch norm changes the averages that it uses in eval mode."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
    start, apply = bl.functional(network)
    keeping = lambda w, x: torch.func.functional_call(network, w, (x,))  # noqa: E731

    def problem(call):
        def error(w, batch, train):
            network.train(train)
            return ((call(w, batch[0]).squeeze(1) - batch[1]) ** 2).mean()

        return bl.Problem(
            lambda w, lam, b: error(w, b, True) + lam.exp() * sum((x**2).sum() for x in w.values()),
            lambda w, lam, b: error(w, b, False),
            lambda lam: start,
        )

    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 5}
    with pytest.raises(bl.BilevelError, match=r"outer objective gave another value.*functional"):
        bl.hypergradient(problem(keeping), LAM, TASK, **settings)
    pure = [bl.hypergradient(problem(apply), LAM, TASK, **settings).value for _ in range(2)]
    assert pure[0] == pure[1]


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Reverse(group_bytes=0), bl.Unrolled(), bl.Forward()])
def test_batches_that_share_one_buffer(method):
    x, y = X.numpy(), Y.numpy()
    places = [np.random.default_rng(t).integers(0, 12, 5) for t in range(9)]
    buffer = np.zeros((5, 4)), np.zeros(5)

    def overwritten(t):
        np.take(x, places[t], axis=0, out=buffer[0])
        np.take(y, places[t], axis=0, out=buffer[1])
        return tuple(map(torch.from_numpy, buffer))

    def fresh(t):
        return torch.from_numpy(x[places[t]]), torch.from_numpy(y[places[t]])

    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 8, "method": method}
    with pytest.raises(bl.BilevelError, match="into the same memory"):
        bl.hypergradient(problem(lambda x: x), LAM, bl.Task(overwritten, TASK.val), **settings)
    bl.hypergradient(problem(lambda x: x), LAM, bl.Task(fresh, TASK.val), **settings)


@pytest.mark.parametrize("kind", ["step", "schedule"])
def test_a_second_dynamics_for_data_that_require_grad(kind):
    """The checks of the first one must not count for the second."""
    live = bl.Task((X.clone().requires_grad_(), Y), TASK.val)
    fixed = problem(lambda x: x)

    def value(random):
        factor = (lambda: float(torch.rand(()))) if random else (lambda: 1.0)
        dynamics = {
            "step": lambda loss, w, state, t: (w - 0.1 * factor() * bl.gradient(loss, w), state),
            "schedule": bl.GradientDescent(lambda t: 0.1 * factor()),
        }[kind]
        return bl.objective(fixed, LAM, live, dynamics=dynamics, steps=3, method=bl.Unrolled())

    value(random=False)
    with pytest.raises(bl.BilevelError, match="gave another result"):
        value(random=True)
