"""Example weights, labels, losses, optimisers, data, architectures and games as λ.

Each case is written out in plain torch beside the problem.
"""

import functools

import pytest
import torch
from comparing import EXACT, agree, along, classification, close, draw, minimiser, regression, slope, unrolled, zeros
from torch import nn
from torch.nn.functional import cross_entropy

import bilevel as bl
from bilevel import trees


def test_example_weights_after_one_step():
    """At weights 0 the gradient is −lr·⟨slope of the validation loss, slope of each example's loss⟩."""
    task, lam = regression(10, 4), torch.zeros(10)
    each = lambda w, data: (data[0] @ w - data[1]) ** 2  # noqa: E731
    start, rate = draw(4), 0.1
    problem = bl.Problem(
        lambda w, lam, data: (lam * each(w, data)).sum(),
        lambda w, lam, data: each(w, data).mean(),
        lambda lam: start,
    )
    outer = slope(lambda w: each(w, task.val).mean(), start).grad
    closed = torch.stack([-rate * outer @ slope(lambda w, i=i: each(w, task.train)[i], start).grad for i in range(10)])
    for method in EXACT:
        found = bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(rate), steps=1, method=method)
        close(found.grad, closed, 1e-12)


def test_a_network_that_weighs_examples_by_their_loss():
    torch.manual_seed(2)
    lam, weigh = bl.functional(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1), nn.Sigmoid()).double())
    task, start = classification(12, 4, 3), 0.3 * draw(4, 3)
    each = functools.partial(cross_entropy, reduction="none")

    def inner(w, lam, data):
        losses = each(data[0] @ w, data[1])
        return (weigh(lam, losses[:, None])[:, 0] * losses).mean()

    outer = lambda w, lam, data: cross_entropy(data[0] @ w, data[1])  # noqa: E731

    def plain(lam):
        return outer(unrolled(lambda w, t: inner(w, lam, task.train), start, 2, 0.5), lam, task.val)

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, lambda lam: start),
        lam,
        task,
        dynamics=bl.GradientDescent(0.5),
        steps=2,
        tolerance=1e-12,
    )


@pytest.mark.parametrize("batches", [False, True], ids=["all examples in every step", "minibatches"])
def test_cleaning_of_labels_by_a_weight_for_each_example(batches):
    task, lam = classification(12, 4, 3), draw(12)
    outer = lambda w, lam, data: cross_entropy(data[0] @ w, data[1])  # noqa: E731
    data = (*task.train, torch.arange(12))

    def inner(w, lam, batch):
        x, y, index = batch
        return (lam.sigmoid()[index] * cross_entropy(x @ w, y, reduction="none")).mean() + 0.01 * (w**2).sum()

    train = bl.Minibatches(data, 5, seed=3) if batches else data

    def plain(lam):
        batch = train if batches else lambda t: data
        return outer(unrolled(lambda w, t: inner(w, lam, batch(t)), torch.zeros(4, 3), 8, 0.3), lam, task.val)

    expected = slope(plain, lam)
    agree(
        expected,
        bl.Problem(inner, outer, zeros(4, 3)),
        lam,
        bl.Task(train, task.val),
        dynamics=bl.GradientDescent(0.3),
        steps=8,
        tolerance=1e-10,
    )
    along(plain, lam, expected.grad)


def mixed(w, alpha, x):
    """A cell that mixes three operations by the softmax of α."""
    hidden = x @ w["in"]
    operations = torch.stack([torch.tanh(hidden), torch.relu(hidden), torch.sin(hidden)])
    return (alpha.softmax(0)[:, None, None] * operations).sum(0) @ w["out"]


def test_architecture_search_through_one_step_with_momentum_and_decay():
    task, lam = regression(10, 3), torch.tensor([0.1, -0.2, 0.3])
    start = {"in": draw(3, 4), "out": draw(4, seed=1)}
    cell = lambda w, lam, data: ((mixed(w, lam, data[0]) - data[1]) ** 2).mean()  # noqa: E731
    velocity = {"in": 0.1 * draw(3, 4, seed=2), "out": 0.1 * draw(4, seed=3)}

    def darts(inner, w, state, t):
        slopes = bl.gradient(inner, w)
        state = trees.map(lambda v, g, p: 0.9 * v + g + 3e-4 * p, state, slopes, w)
        return trees.map(lambda p, v: p - 0.025 * v, w, state), state

    def plain(lam):
        live = trees.map(lambda leaf: leaf.clone().requires_grad_(), start)
        slopes = dict(
            zip(live, torch.autograd.grad(cell(live, lam, task.train), live.values(), create_graph=True), strict=True)
        )
        moved = {k: live[k] - 0.025 * (0.9 * velocity[k] + slopes[k] + 3e-4 * live[k]) for k in live}
        return cell(moved, lam, task.val)

    expected = slope(plain, lam)
    problem = bl.Problem(cell, cell, lambda lam: trees.map(torch.clone, start))
    dynamics = bl.StepFunction(darts, lambda w: trees.map(torch.clone, velocity))
    agree(expected, problem, lam, task, dynamics=dynamics, steps=1, tolerance=1e-11)
    first = bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=1, method=bl.FirstOrder())
    close(first.grad, slope(lambda lam: cell(first.inner, lam, task.val), lam).grad, 1e-12)


def test_distillation_of_a_data_set_into_three_examples():
    task = classification(20, 4, 3)
    lam = {"x": draw(3, 4), "rate": torch.tensor(-1.0)}
    outer = lambda w, lam, data: cross_entropy(data[0] @ w, data[1])  # noqa: E731
    inner = lambda w, lam, data: cross_entropy(lam["x"] @ w, torch.arange(3))  # noqa: E731

    def plain(lam):
        w = unrolled(lambda w, t: inner(w, lam, None), 0.1 * draw(4, 3), 6, lam["rate"].exp())
        return outer(w, lam, task.val)

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, lambda lam: 0.1 * draw(4, 3)),
        lam,
        bl.Task(None, task.val),
        dynamics=lambda lam: bl.GradientDescent(lam["rate"].exp()),
        steps=6,
        tolerance=1e-10,
    )


def test_distillation_at_the_minimiser():
    task, lam = classification(20, 4, 3), draw(3, 4)
    outer = lambda w, lam, data: cross_entropy(data[0] @ w, data[1])  # noqa: E731
    inner = lambda w, lam: cross_entropy(lam @ w, torch.arange(3)) + 0.05 * (w**2).sum()  # noqa: E731
    agree(
        slope(lambda lam: outer(minimiser(inner, torch.zeros(4, 3), lam), lam, task.val), lam),
        bl.Problem(lambda w, lam, data: inner(w, lam), outer, zeros(4, 3)),
        lam,
        bl.Task(None, task.val),
        dynamics=bl.GradientDescent(0.5),
        steps=400,
        methods=[bl.Reverse(), bl.Implicit(bl.CG(tol=1e-13)), bl.Implicit(bl.CG(tol=1e-13), newton=1e-11)],
        tolerance=1e-7,
    )


def test_a_learned_loss():
    torch.manual_seed(3)
    lam, judge = bl.functional(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double())
    task = regression(10, 3)
    inner = lambda w, lam, data: judge(lam, torch.stack([data[0] @ w, data[1]], 1)).square().mean()  # noqa: E731
    outer = lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean()  # noqa: E731

    def plain(lam):
        return outer(unrolled(lambda w, t: inner(w, lam, task.train), torch.zeros(3), 5, 0.5), lam, task.val)

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, zeros(3)),
        lam,
        task,
        dynamics=bl.GradientDescent(0.5),
        steps=5,
        tolerance=1e-10,
    )


def quadratic(w):
    return 0.5 * (torch.linspace(0.5, 2, 4) * (w - 1) ** 2).sum() + 0.1 * torch.cos(3 * w).sum()


def test_a_learned_optimiser_with_a_recurrent_memory_for_every_weight():
    torch.manual_seed(4)
    lam, cell = bl.functional(nn.LSTMCell(1, 3).double())

    def step(inner, w, state, t, lam):
        h, c = cell(lam, bl.gradient(inner, w)[:, None], state)
        return w - 0.1 * h.sum(1), (h, c)

    def plain(lam):
        w, state = torch.zeros(4), (torch.zeros(4, 3), torch.zeros(4, 3))
        for _ in range(6):
            live = w if w.requires_grad else w.requires_grad_()
            (g,) = torch.autograd.grad(quadratic(live), live, create_graph=True)
            h, c = cell(lam, g[:, None], state)
            w, state = live - 0.1 * h.sum(1), (h, c)
        return quadratic(w)

    problem = bl.Problem(lambda w, lam, data: quadratic(w), lambda w, lam, data: quadratic(w), zeros(4))
    memory = lambda w: (torch.zeros(4, 3), torch.zeros(4, 3))  # noqa: E731
    agree(
        slope(plain, lam),
        problem,
        lam,
        dynamics=lambda lam: bl.StepFunction(functools.partial(step, lam=lam), memory),
        steps=6,
        tolerance=1e-10,
    )


def test_a_learned_optimiser_from_momenta_of_three_speeds():
    torch.manual_seed(5)
    lam, network = bl.functional(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    speeds = torch.tensor([0.5, 0.9, 0.99])

    def move(g, w, momenta, lam):
        momenta = speeds * momenta + (1 - speeds) * g[:, None]
        return w - 0.1 * network(lam, torch.cat([g[:, None], momenta], 1))[:, 0], momenta

    def plain(lam):
        w, momenta = torch.zeros(4, requires_grad=True), torch.zeros(4, 3)
        for _ in range(5):
            (g,) = torch.autograd.grad(quadratic(w), w, create_graph=True)
            w, momenta = move(g, w, momenta, lam)
        return quadratic(w)

    problem = bl.Problem(lambda w, lam, data: quadratic(w), lambda w, lam, data: quadratic(w), zeros(4))
    agree(
        slope(plain, lam),
        problem,
        lam,
        dynamics=lambda lam: bl.StepFunction(
            lambda inner, w, state, t: move(bl.gradient(inner, w), w, state, lam), lambda w: torch.zeros(4, 3)
        ),
        steps=5,
        tolerance=1e-10,
    )


def test_a_learned_discount_of_a_value_function():
    """Returns Σ γ^k r are the targets of a linear value function; γ is judged by the returns without discount."""
    states, rewards, lam = draw(8, 3), draw(8, seed=1), torch.tensor(1.5)

    def returns(gamma):
        powers = gamma ** torch.arange(8.0)
        return torch.stack([(powers[: 8 - t] * rewards[t:]).sum() for t in range(8)])

    inner = lambda w, lam, data: ((states @ w - returns(lam.sigmoid())) ** 2).mean()  # noqa: E731
    outer = lambda w, lam, data: ((states @ w - returns(torch.tensor(1.0))) ** 2).mean()  # noqa: E731

    def plain(lam):
        return outer(unrolled(lambda w, t: inner(w, lam, None), torch.zeros(3), 6, 0.1), None, None)

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, zeros(3)),
        lam,
        dynamics=bl.GradientDescent(0.1),
        steps=6,
        methods=(*EXACT, bl.Spectral()),
        tolerance=1e-10,
    )


def test_two_players_who_step_at_the_same_time():
    """Each descends its own loss; λ is the first player's start and the coupling of the game."""
    lam = {"start": torch.tensor(0.7), "coupling": torch.tensor(1.2)}
    one = lambda w, lam: (w["a"] ** 2 + lam["coupling"] * w["a"] * w["b"].tanh()).sum()  # noqa: E731
    two = lambda w, lam: (w["b"] ** 2 - lam["coupling"] * w["b"] * w["a"].sin()).sum()  # noqa: E731

    def players(w, lam):
        live = trees.map(lambda leaf: leaf if leaf.requires_grad else leaf.detach().requires_grad_(), w)
        a = torch.autograd.grad(one(live, lam), live["a"], create_graph=True)[0]
        b = torch.autograd.grad(two(live, lam), live["b"], create_graph=True)[0]
        return {"a": live["a"] - 0.2 * a, "b": live["b"] - 0.2 * b}

    def plain(lam):
        w = {"a": lam["start"] * 1, "b": torch.tensor(-0.5)}
        for _ in range(6):
            w = players(w, lam)
        return one(w, lam)

    problem = bl.Problem(
        lambda w, lam, data: one(w, lam),
        lambda w, lam, data: one(w, lam),
        lambda lam: {"a": lam["start"] * 1, "b": torch.tensor(-0.5)},
    )
    agree(
        slope(plain, lam),
        problem,
        lam,
        dynamics=lambda lam: bl.StepFunction(lambda inner, w, state, t: (players(w, lam), state)),
        steps=6,
        tolerance=1e-11,
    )


def test_a_prediction_that_minimises_a_learned_energy():
    torch.manual_seed(6)
    lam, energy = bl.functional(nn.Sequential(nn.Linear(5, 6), nn.Softplus(), nn.Linear(6, 1, bias=False)).double())
    x, y = draw(7, 3), draw(7, 2, seed=1)
    inner = lambda w, lam, data: energy(lam, torch.cat([x, w], 1)).sum() + (w**2).sum()  # noqa: E731
    outer = lambda w, lam, data: ((w - y) ** 2).mean()  # noqa: E731

    def plain(lam):
        return outer(unrolled(lambda w, t: inner(w, lam, None), torch.zeros(7, 2), 6, 0.1), None, None)

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, zeros(7, 2)),
        lam,
        dynamics=bl.GradientDescent(0.1),
        steps=6,
        tolerance=1e-10,
    )


def test_three_levels_with_the_lowest_written_out_in_the_middle():
    """λ penalises u, u penalises v; the middle objective runs v's three steps itself."""
    task, lam = regression(10, 3), torch.tensor(-1.0)

    def lowest(u):
        def fit(v, t):
            return ((task.train[0] @ v - task.train[1]) ** 2).mean() + (u.exp() * v**2).sum()

        return unrolled(fit, torch.zeros(3), 3, 0.1)

    middle = lambda u, lam, data: (  # noqa: E731
        ((data[0] @ lowest(u) - data[1]) ** 2).mean() + lam.exp() * (u**2).sum()
    )
    outer = lambda u, lam, data: ((data[0] @ lowest(u) - data[1] + 0.1) ** 2).mean()  # noqa: E731

    def plain(lam):
        return outer(unrolled(lambda u, t: middle(u, lam, task.val), torch.full((3,), -1.0), 4, 0.2), lam, task.val)

    expected = slope(plain, lam)
    agree(
        expected,
        bl.Problem(middle, outer, lambda lam: torch.full((3,), -1.0)),
        lam,
        bl.Task(task.val, task.val),
        dynamics=bl.GradientDescent(0.2),
        steps=4,
        tolerance=1e-10,
    )
    along(plain, lam, expected.grad)
