"""λ, or another tensor that requires grad, read from a closure instead of the argument: its gradient would be lost."""

import pytest
import torch

import bilevel as bl
from asking import ask, data, refused, ridge
from bilevel.testing import relative_error

TASK = bl.Task(data(), data(4))


def two_settings():
    """A penalty and the logarithm of a step size, in one tensor."""
    return torch.tensor([-1.0, -3.0], requires_grad=True)


def penalised(w, lam, b):
    return ((b[0] @ w - b[1]) ** 2).mean() + lam.reshape(-1)[0].exp() * (w**2).sum()


def both(problem, lam, **settings):
    """The two public calls that differentiate."""
    settings = {"dynamics": bl.GradientDescent(0.1), "steps": 3, **settings}
    yield lambda: bl.hypergradient(problem, lam, TASK, **settings)
    yield lambda: bl.objective(problem, lam, TASK, **settings)


METHODS = [bl.Reverse(), bl.Unrolled(), bl.Forward(), bl.Implicit(), "auto"]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_step_size_read_from_a_closure(method):
    lam = two_settings()
    for dynamics in (bl.GradientDescent(lam[1].exp()), bl.HeavyBall(0.1, lambda t: lam[1].exp())):
        for call in both(ridge(inner=penalised), lam, dynamics=dynamics, method=method):
            with refused("dynamics", "λ", "closure", "lambda lam"):
                call()
    good = bl.Reverse() if isinstance(method, bl.Implicit) else method
    found = bl.hypergradient(
        ridge(inner=penalised), lam, TASK, dynamics=lambda lam: bl.GradientDescent(lam[1].exp()), steps=3, method=good
    )
    assert bool((found.grad != 0).all())


def test_a_step_function_that_reads_lam_from_a_closure():
    lam = two_settings()

    def step(loss, w, state, t):
        return w - lam[1].exp() * bl.gradient(loss, w), state

    for call in both(ridge(inner=penalised), lam, dynamics=step):
        with refused("dynamics", "closure"):
            call()


def test_a_setting_that_is_a_view_of_lam():
    """Here λ does not require grad, so no graph leads to it."""
    lam = two_settings().detach()
    with refused("dynamics", r"λ", "closure"):
        ask(ridge(inner=penalised), lam, dynamics=bl.GradientDescent(lam[1]))
    with refused("dynamics", r"detach\(\)\.clone\(\)"):
        ask(ridge(inner=penalised), lam, dynamics=bl.GradientDescent(lam[1].detach()))
    # A neighbour of λ in memory is another number.
    row = torch.cat([torch.tensor([0.1]), lam])
    for constant in (torch.tensor(0.1), row[0]):
        ask(ridge(inner=penalised), row[1:], dynamics=bl.GradientDescent(constant))


@pytest.mark.parametrize("part", ["inner", "outer", "init"])
def test_lam_in_an_objective(part):
    lam = {"a": torch.zeros(3, requires_grad=True), "b": [torch.ones(3, requires_grad=True)]}
    parts = {
        "inner": lambda w, given, b: ((b[0] @ w - b[1]) ** 2).mean() + (given["a"].exp() * lam["b"][0] * w**2).sum(),
        "outer": lambda w, given, b: (b[0] @ w).sum() + (lam["b"][0] * given["a"]).sum(),
        "init": lambda given: 2 * lam["b"][0],
    }
    uses = lambda w, given, b: ((b[0] @ w - b[1]) ** 2).mean() + (given["a"].exp() * given["b"][0] * w**2).sum()  # noqa: E731
    for call in both(ridge(**{"inner": uses, part: parts[part]}), lam):
        with refused(part, r"λ\['b'\]\[0\]", "closure", "argument"):
            call()


def test_lam_in_an_encoder():
    lam = torch.ones(3, requires_grad=True)
    problem = bl.Problem(
        inner=lambda w, given, b: ((b[0] @ w - b[1]) ** 2).mean() + (given**2 * w**2).sum(),
        outer=lambda w, given, b: ((b[0] @ w - b[1]) ** 2).mean(),
        init=lambda given: torch.zeros(3),
        encode=lambda given, task: bl.Task((task.train[0] * lam, task.train[1]), (task.val[0] * given, task.val[1])),
    )
    for call in both(problem, lam):
        with refused("encode", "λ", "closure"):
            call()


def test_lam_that_is_the_output_of_a_network():
    network = torch.nn.Linear(2, 3)
    lam = network(torch.ones(2))
    f = bl.objective(ridge(), lam, TASK, dynamics=bl.GradientDescent(0.1), steps=3)
    f.backward()
    assert bool((network.bias.grad != 0).all())
    lam = network(torch.ones(2))
    reads = ridge(inner=lambda w, given, b: ((b[0] @ w - b[1]) ** 2).mean() + ((given.exp() + lam.exp()) * w**2).sum())
    for call in both(reads, lam):
        with refused("inner", "λ", "closure"):
            call()


def test_the_parameters_of_a_module():
    module = torch.nn.Linear(3, 3)

    def inner(w, lam, b):
        return ((module(b[0]) @ w - b[1]) ** 2).mean() + (lam.exp() * w**2).sum()

    for call in both(ridge(inner=inner), torch.zeros(3, requires_grad=True)):
        with refused("inner", r"\[3, 3\]|\[3\]", "requires grad", "closure", "detach"):
            call()
    module.requires_grad_(False)
    frozen = [call() for call in both(ridge(inner=inner), torch.zeros(3, requires_grad=True))]
    assert relative_error(frozen[0].value, frozen[1].detach()) == 0


def test_what_is_not_lost():
    module = torch.nn.Linear(3, 1)
    w, apply = bl.functional(module)
    parameters = dict(module.named_parameters())

    def inner(w, lam, b):
        # A leaf of its own, for the derivative in the inputs.
        x = b[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(apply(w, x).sum(), x, create_graph=True)
        return ((apply(w, x)[:, 0] - b[1]) ** 2).mean() + lam.exp().sum() * slope.square().mean()

    outer = lambda w, lam, b: ((apply(w, b[0])[:, 0] - b[1]) ** 2).mean()  # noqa: E731
    expected = ask(bl.Problem(inner, outer, lambda lam: w))
    # The start is a constant unless it is made of λ.
    found = ask(bl.Problem(inner, outer, lambda lam: parameters))
    assert relative_error(found.grad, expected.grad) == 0
    live = bl.Task(tuple(x.clone().requires_grad_() for x in TASK.train), TASK.val)
    assert relative_error(ask(bl.Problem(inner, outer, lambda lam: w), task=live).grad, expected.grad) == 0


def test_a_variable_of_an_enclosing_problem():
    """A problem within a problem must be given the other's variables as λ: `objective` differentiates nothing else."""

    def nested(closed):
        def inner(w, lam, b):
            if closed:
                lower = bl.Problem(lambda v, u, _: ((v - u) ** 2 + lam.exp() * v**2).sum(), below, torch.zeros_like)
                return bl.objective(lower, w, bl.Task(None, None), dynamics=bl.GradientDescent(0.2), steps=4)
            lower = bl.Problem(lambda v, u, _: ((v - u[0]) ** 2 + u[1].exp() * v**2).sum(), below, start)
            return bl.objective(lower, (w, lam), bl.Task(None, None), dynamics=bl.GradientDescent(0.2), steps=4)

        return ridge(inner=inner)

    def below(v, u, _):
        return ((v - 1) ** 2).sum()

    def start(u):
        return torch.zeros(3)

    with refused("inner", "requires grad", "closure", "λ"):
        ask(nested(closed=True))
    assert bool((ask(nested(closed=False)).grad != 0).all())
