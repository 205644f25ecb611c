"""Learning to learn from several tasks: starts and rates as λ.

Each case is written out in plain torch beside the problem: the steps with `create_graph=True`, or, where the inner
problem is solved to the end, Newton's method and the implicit function theorem.
"""

import pytest
import torch
from comparing import (
    EXACT,
    NO_DATA,
    agree,
    along,
    classification,
    close,
    draw,
    minimiser,
    regression,
    slope,
    unrolled,
    zeros,
)
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import bilevel as bl
from bilevel import trees


def sinusoids(count=4):
    """Tasks y = a·sin(x + p), ten points to learn from and ten to be judged on."""
    tasks = []
    for k in range(count):
        x = 5 * torch.tanh(draw(20, 1, seed=k))
        y = (1 + 0.5 * k) * torch.sin(x + 0.4 * k)
        tasks.append(bl.Task((x[:10], y[:10]), (x[10:], y[10:])))
    return tasks


torch.manual_seed(0)
LAM, APPLY = bl.functional(nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double())


def loss(w, lam, data):
    return mse_loss(APPLY(w, data[0]), data[1])


def mean_over_tasks(f):
    return lambda lam: sum(f(lam, task) for task in sinusoids()) / 4


def test_maml_on_sinusoids():
    def plain(lam, task):
        return loss(unrolled(lambda w, t: loss(w, lam, task.train), lam, 5, 0.05), lam, task.val)

    expected = slope(mean_over_tasks(plain), LAM)
    problem = bl.Problem(loss, loss, lambda lam: lam)
    agree(expected, problem, LAM, sinusoids(), dynamics=bl.GradientDescent(0.05), steps=5, tolerance=1e-10)
    along(mean_over_tasks(plain), LAM, expected.grad)


def test_first_order_maml():
    """The gradient of the loss after the steps, at the weights after the steps."""

    def detached(inner, w, state, t):
        return trees.map(lambda w, g: w - 0.05 * g.detach(), w, bl.gradient(inner, w)), state

    def plain(task):
        w = trees.detach(unrolled(lambda w, t: loss(w, None, task.train), LAM, 5, 0.05, graph=False))
        return slope(lambda w: loss(w, None, task.val), w).grad

    expected = trees.map(lambda *parts: sum(parts) / 4, *(plain(task) for task in sinusoids()))
    found = bl.hypergradient(bl.Problem(loss, loss, lambda lam: lam), LAM, sinusoids(), dynamics=detached, steps=5)
    close(found.grad, expected, 1e-10)


def test_anil_learns_the_body_outside_and_the_head_inside():
    head = {name: value for name, value in LAM.items() if name.startswith("2")}
    whole = lambda w, lam, data: loss({**lam, **w}, lam, data)  # noqa: E731

    def plain(lam, task):
        start = {name: lam[name] for name in head}
        return whole(unrolled(lambda w, t: whole(w, lam, task.train), start, 4, 0.05), lam, task.val)

    problem = bl.Problem(whole, whole, lambda lam: {name: lam[name] for name in head})
    agree(
        slope(mean_over_tasks(plain), LAM),
        problem,
        LAM,
        sinusoids(),
        dynamics=bl.GradientDescent(0.05),
        steps=4,
        tolerance=1e-10,
    )


def test_a_rate_of_zero_leaves_a_layer_where_it_is():
    lam = {"start": LAM, "rate": torch.tensor(0.05)}

    def rates(lam):
        return {name: lam["rate"] if name.startswith("2") else torch.tensor(0.0) for name in LAM}

    def plain(lam, task):
        w = unrolled(lambda w, t: loss(w, lam, task.train), lam["start"], 4, rates(lam))
        return loss(w, lam, task.val)

    problem = bl.Problem(loss, loss, lambda lam: lam["start"])
    agree(
        slope(mean_over_tasks(plain), lam),
        problem,
        lam,
        sinusoids(),
        dynamics=lambda lam: bl.GradientDescent(rates(lam)),
        steps=4,
        tolerance=1e-10,
    )


def test_meta_sgd_learns_a_rate_for_every_weight():
    lam = {"start": LAM, "rates": trees.map(lambda leaf: torch.full_like(leaf, 0.05), LAM)}

    def plain(lam, task):
        return loss(unrolled(lambda w, t: loss(w, lam, task.train), lam["start"], 3, lam["rates"]), lam, task.val)

    problem = bl.Problem(loss, loss, lambda lam: lam["start"])
    agree(
        slope(mean_over_tasks(plain), lam),
        problem,
        lam,
        sinusoids(),
        dynamics=lambda lam: bl.GradientDescent(lam["rates"]),
        steps=3,
        tolerance=1e-10,
    )


@pytest.mark.parametrize(
    "method",
    [
        bl.Reverse(),
        bl.Implicit(bl.CG(tol=1e-13)),
        bl.Implicit(bl.CG(tol=1e-13), newton=1e-11),
        bl.Implicit(bl.Direct()),
    ],
    ids=["reverse", "CG", "Newton", "direct"],
)
def test_imaml_with_a_proximal_term_around_the_start(method):
    """argmin_w L(w) + ‖w − λ‖², whose derivative in λ is (I + H/2)⁻¹."""
    task, lam = classification(12, 4, 3), 0.5 * draw(4, 3)
    inner = lambda w, lam, data: cross_entropy(data[0] @ w, data[1]) + ((w - lam) ** 2).sum()  # noqa: E731
    outer = lambda w, lam, data: cross_entropy(data[0] @ w, data[1])  # noqa: E731
    fit = lambda lam: minimiser(lambda w, lam: inner(w, lam, task.train), torch.zeros(4, 3), lam)  # noqa: E731
    implicit = not isinstance(method, bl.Reverse)
    agree(
        slope(lambda lam: outer(fit(lam), lam, task.val), lam),
        bl.Problem(inner, outer, zeros(4, 3) if implicit else lambda lam: lam),
        lam,
        task,
        dynamics=bl.GradientDescent(0.3),
        steps=100,
        methods=[method],
        tolerance=1e-8,
    )


def test_tasks_of_different_sizes():
    lam, sizes = torch.zeros(3), (5, 9, 14)
    tasks = [regression(rows, 3, seed=rows) for rows in sizes]
    inner = lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean() + (lam.exp() * w**2).mean()  # noqa: E731
    outer = lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean()  # noqa: E731

    def plain(lam):
        ends = [unrolled(lambda w, t, task=task: inner(w, lam, task.train), torch.zeros(3), 6, 0.1) for task in tasks]
        return sum(outer(w, lam, task.val) for w, task in zip(ends, tasks, strict=True)) / 3

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, zeros(3)),
        lam,
        tasks,
        dynamics=bl.GradientDescent(0.1),
        steps=6,
        methods=(*EXACT, bl.Spectral()),
        tolerance=1e-10,
    )


def test_tasks_whose_weights_have_different_shapes():
    lam, widths = torch.tensor(-1.0), (2, 4)
    tasks = [regression(8, columns, seed=columns) for columns in widths]
    inner = lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean() + lam.exp() * (w**2).sum()  # noqa: E731
    outer = lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean()  # noqa: E731
    starts = [torch.zeros(columns) for columns in widths]

    def plain(lam):
        ends = [
            unrolled(lambda w, t, task=task: inner(w, lam, task.train), start, 5, 0.1)
            for task, start in zip(tasks, starts, strict=True)
        ]
        return sum(outer(w, lam, task.val) for w, task in zip(ends, tasks, strict=True)) / 2

    agree(
        slope(plain, lam),
        bl.Problem(inner, outer, zeros(1)),
        lam,
        tasks,
        start=starts,
        dynamics=bl.GradientDescent(0.1),
        steps=5,
        tolerance=1e-10,
    )


def test_a_task_without_data_is_a_task():
    problem = bl.Problem(lambda w, lam, data: (w - lam) ** 2, lambda w, lam, data: w**2, lambda lam: torch.zeros(()))
    found = bl.hypergradient(problem, torch.tensor(3.0), NO_DATA, dynamics=bl.GradientDescent(0.25), steps=2)
    close(found.grad, torch.tensor(2 * 3.0 * 0.75**2), 1e-12)
