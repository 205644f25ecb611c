"""Questions that have no right answer, each refused, or answered with a warning, in words that name the reason."""

import itertools

import pytest
import torch
from comparing import NO_DATA, classification, regression, squares, zeros
from torch.nn.functional import cross_entropy

import bilevel as bl

TASK = regression(12, 3)
LAM = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)
GD, START, CALLS = bl.GradientDescent(0.2), zeros(3), itertools.count()


def ridge(w, lam, data):
    return squares(w, lam, data) + 0.5 * (lam.exp() * w**2).sum()


def logistic(w, lam, data):
    return torch.nn.functional.softplus(-data[1] * (data[0] @ w)).mean() + 0.5 * (lam.exp() * w**2).sum()


def ask(inner=ridge, outer=squares, init=START, lam=LAM, task=TASK, dynamics=GD, steps=5, **settings):
    return bl.hypergradient(bl.Problem(inner, outer, init), lam, task, dynamics=dynamics, steps=steps, **settings)


def accuracy(w, lam, data):
    return ((data[0] @ w > 0) == (data[1] > 0)).double().mean()


def saddle(w, lam, data):
    return w[0] ** 2 - w[1] ** 2 + (lam * w).sum()


REFUSED = {
    "an objective that returns auxiliary results": (
        {"inner": lambda w, lam, data: (ridge(w, lam, data), w)},
        "must return a scalar tensor",
    ),
    "an objective that returns a Python number": ({"outer": lambda w, lam, data: 1.0}, "must return a scalar tensor"),
    "a loss for each example": (
        {"inner": lambda w, lam, data: (data[0] @ w - data[1]) ** 2 * lam.exp().sum()},
        "mean",
    ),
    "an accuracy as the outer objective": ({"outer": accuracy}, "accuracy"),
    "a hyperparameter that nothing uses": (
        {"inner": lambda w, lam, data: squares(w, lam, data)},
        "reaches neither",
    ),
    "a hyperparameter that is detached": (
        {"inner": lambda w, lam, data: ridge(w, lam.detach(), data)},
        "reaches neither",
    ),
    "a whole number as a hyperparameter": ({"lam": torch.tensor([1, 2, 3])}, "cannot be differentiated"),
    "a hyperparameter that is not a number": ({"lam": torch.tensor([0.0, float("nan"), 1.0])}, "NaN"),
    "data that are not numbers": (
        {"task": bl.Task((TASK.train[0] * float("inf"), TASK.train[1]), TASK.val)},
        "NaN|Inf",
    ),
    "a rate that is too large": ({"dynamics": bl.GradientDescent(50.0), "steps": 400}, "step"),
    "a learned start by implicit differentiation": (
        {"inner": lambda w, lam, data: squares(w, lam, data), "init": lambda lam: lam, "method": bl.Implicit()},
        "cannot see λ",
    ),
    "a learned rate by implicit differentiation": (
        {
            "inner": lambda w, lam, data: squares(w, lam, data),
            "dynamics": lambda lam: bl.GradientDescent(lam.exp()),
            "method": bl.Implicit(),
        },
        "cannot see λ",
    ),
    "first-order gradients of what acts through the steps": ({"method": bl.FirstOrder()}, "cannot see λ"),
    "the start, through the last steps only": (
        {"inner": lambda w, lam, data: squares(w, lam, data), "init": lambda lam: lam, "method": bl.Truncated(2)},
        "cannot see λ",
    ),
    "a method for quadratics on a logistic loss": ({"inner": logistic, "method": bl.Spectral()}, "quadratic"),
    "a method for quadratics under Adam": ({"dynamics": bl.Adam(0.1), "method": bl.Spectral()}, "Adam"),
    "a run without momentum, backwards": ({"method": bl.Reversible()}, "momentum"),
    "conjugate gradients at a saddle": (
        {"inner": saddle, "method": bl.Implicit(bl.CG()), "steps": 2},
        "positive definite",
    ),
    "a step that changes the shape of w": (
        {"dynamics": lambda loss, w, state, t: (w[:2], state)},
        "changed w",
    ),
    "a step that forgets its state": ({"dynamics": lambda loss, w, state, t: w - 0.1 * w}, "pair"),
    "a sampler with a memory": (
        {"task": bl.Task(lambda t: (TASK.train[0] + next(CALLS), TASK.train[1]), TASK.val)},
        "not a pure function of t",
    ),
    "a task that is a tuple": ({"task": (TASK.train, TASK.val)}, "bilevel.Task"),
    "a module as λ": ({"lam": torch.nn.Linear(3, 1)}, "functional"),
    "minus one step": ({"steps": -1}, "number of inner steps"),
    "a method by its name": ({"method": "reverse"}, "is not a method"),
    "a dynamics by its class": ({"dynamics": bl.GradientDescent}, "is not a dynamics"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_question_without_an_answer(name):
    question, reason = REFUSED[name]
    with pytest.raises(bl.BilevelError, match=reason):
        ask(**question)


WARNED = {
    "implicit differentiation of minibatches": {"task": bl.Task(bl.Minibatches(TASK.train, 5), TASK.val)},
    "a Neumann series that is too short": {"method": bl.Implicit(bl.Neumann(terms=1))},
    "conjugate gradients that stop too early": {"method": bl.Implicit(bl.CG(max_iter=1))},
    "a Nystrom approximation of low rank": {"method": bl.Implicit(bl.Nystrom(rank=1, damping=0.1))},
}


@pytest.mark.parametrize("name", WARNED)
def test_an_answer_with_a_warning(name):
    with pytest.warns(bl.BilevelWarning):
        ask(**{"method": bl.Implicit(), "steps": 50, **WARNED[name]})


def test_a_refusal_names_the_leaf():
    lam = {"used": LAM, "forgotten": torch.zeros(2)}
    with pytest.raises(bl.BilevelError, match="forgotten"):
        ask(inner=lambda w, lam, data: ridge(w, lam["used"], data), lam=lam)


def test_the_same_question_is_answered_where_it_has_an_answer():
    """A classifier judged by its cross-entropy instead of its accuracy."""
    task = classification(10, 3, 2)
    found = ask(
        inner=lambda w, lam, data: cross_entropy(data[0] @ w, data[1]) + (lam.exp()[:, None] * w**2).sum(),
        outer=lambda w, lam, data: cross_entropy(data[0] @ w, data[1]),
        init=zeros(3, 2),
        task=task,
    )
    assert bool((found.grad != 0).all())


def test_no_data_is_not_an_empty_task():
    with pytest.raises(bl.BilevelError, match="empty"):
        ask(task=bl.Task((torch.zeros(0, 3), torch.zeros(0)), TASK.val))
    assert ask(inner=lambda w, lam, data: ((w - lam) ** 2).sum(), outer=lambda w, lam, data: w.sum(), task=NO_DATA)
