"""Classes, containers and functions of the user's own, in every place where a problem takes one."""

import collections
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

import bilevel as bl
from bilevel.dynamics.step_function import StepFunction

X, Y = torch.linspace(-1, 1, 48).reshape(12, 4).sin(), torch.linspace(-1, 1, 12).cos()
TASK, LAM = bl.Task((X, Y), (X + 0.1, Y)), torch.linspace(-1, 0.5, 4)
METHODS = [bl.Reverse(), bl.Reverse(group_bytes=0), bl.Unrolled(), bl.Forward(), bl.Truncated(3)]
DESCENT = {"dynamics": bl.GradientDescent(0.1), "steps": 6}


def error(w, lam, batch):
    return ((batch[0] @ w - batch[1]) ** 2).mean()


def inner(w, lam, batch):
    return error(w, lam, batch) + (lam.exp() * w**2).sum()


def zeros(lam):
    return torch.zeros(4)


PROBLEM = bl.Problem(inner, error, zeros)


@dataclass
class Velocity:
    v: torch.Tensor


class Moments:
    def __init__(self, v):
        self.v = v


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("kind", [Velocity, Moments, lambda v: collections.UserDict(v=v)])
def test_auxiliary_variables_in_an_object_are_refused(method, kind):
    def step(loss, w, state, t):
        velocity = 0.9 * (state["v"] if isinstance(state, collections.UserDict) else state.v) - 0.1 * bl.gradient(
            loss, w
        )
        return w + velocity, kind(velocity)

    dynamics = StepFunction(step, lambda w: kind(torch.zeros_like(w)))
    with pytest.raises(bl.BilevelError, match="would be lost"):
        bl.hypergradient(PROBLEM, LAM, TASK, dynamics=dynamics, steps=6, method=method)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_step_that_writes_into_its_dict_of_auxiliary_variables(method):
    def step(loss, w, state, t):
        state["v"] = 0.9 * state["v"] - 0.1 * bl.gradient(loss, w)
        state["count"] += 1
        return w + state["v"], state

    dynamics = StepFunction(step, lambda w: {"v": torch.zeros_like(w), "count": 0})
    found = bl.hypergradient(PROBLEM, LAM, TASK, dynamics=dynamics, steps=6, method=method)
    right = bl.hypergradient(PROBLEM, LAM, TASK, dynamics=bl.HeavyBall(0.1, 0.9), steps=6, method=method)
    torch.testing.assert_close(found.grad, right.grad, rtol=1e-12, atol=1e-14)
    assert found.state[1]["count"] == 6


def named(batch):
    return {"x": batch[0], "y": batch[1]}


@pytest.mark.parametrize("part", ["inner", "outer"])
def test_an_objective_that_takes_entries_out_of_its_batch(part):
    functions = {
        "inner": lambda w, lam, b: inner(w, lam, (b["x"], b["y"])),
        "outer": lambda w, lam, b: error(w, lam, (b["x"], b["y"])),
    }
    plain = functions[part]
    popping = lambda w, lam, b: plain(w, lam, {"y": b.pop("y"), **b})  # noqa: E731
    task = bl.Task(named(TASK.train), named(TASK.val))
    with pytest.raises(bl.BilevelError, match=rf"{part}.* changed the batch"):
        bl.hypergradient(bl.Problem(**{**functions, part: popping}, init=zeros), LAM, task, **DESCENT)
    bl.hypergradient(bl.Problem(**functions, init=zeros), LAM, task, **DESCENT)


def test_an_objective_that_writes_into_lam():
    def changed(w, lam, batch):
        lam["decay"] = lam["decay"].abs()
        return inner(w, lam["decay"], batch)

    with pytest.raises(bl.BilevelError, match="changed λ"):
        bl.hypergradient(bl.Problem(changed, error, zeros), {"decay": LAM}, TASK, **DESCENT)


def test_an_encoder_that_changes_the_task():
    def halved(lam, task):
        task.train[0].div_(2)
        return bl.Task((task.train[0] * lam.exp(), task.train[1]), task.val)

    def popping(lam, task):
        return bl.Task((task.train.pop("x") * lam.exp(), Y), task.val)

    ridge = lambda w, lam, batch: error(w, lam, batch) + 0.1 * (w**2).sum()  # noqa: E731
    for encode, train in ((halved, (X.clone(), Y)), (popping, named(TASK.train))):
        with pytest.raises(bl.BilevelError, match=r"encode.* changed the task"):
            bl.hypergradient(bl.Problem(ridge, error, zeros, encode), LAM, bl.Task(train, TASK.val), **DESCENT)


@dataclass(frozen=True)
class Episode(bl.Task):
    name: str = "none"


@pytest.mark.parametrize("encoded", [False, True])
def test_a_task_with_more_fields(encoded):
    def encode(lam, task):
        assert getattr(task, "name", "first") == "first"
        return replace(task, train=(task.train[0] * lam.cos(), task.train[1]))

    problem, slopes = bl.Problem(inner, error, zeros, encode if encoded else None), []
    for kind in (bl.Task, lambda train, val: Episode(train, val, "first")):
        live, lam = X.clone().requires_grad_(), LAM.clone().requires_grad_()
        bl.objective(problem, lam, kind((live, Y), TASK.val), **DESCENT).backward()
        slopes.append((lam.grad, live.grad))
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-12, atol=1e-14)


class WithCode(torch.nn.Module):
    """The name `code` is also that of a method of this package's structures."""

    def code(self, x):
        return 2 * x

    def forward(self, w, lam, batch):
        return inner(w, lam, batch)


@torch.jit.script
def scripted(w: torch.Tensor, lam: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return ((batch[0] @ w - batch[1]) ** 2).mean() + (lam.exp() * w**2).sum()


@pytest.mark.parametrize("function", [WithCode(), scripted])
def test_objectives_with_an_attribute_called_code(function):
    right = bl.hypergradient(PROBLEM, LAM, TASK, **DESCENT).grad
    found = bl.hypergradient(bl.Problem(function, error, zeros), LAM, TASK, **DESCENT).grad
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", [*METHODS[:4], bl.Implicit(), bl.FirstOrder()], ids=str)
def test_an_encoder_with_sparse_gradients(method):
    train, val = torch.arange(12) % 5, torch.arange(12) % 4

    def problem(sparse):
        def encode(lam, task):
            table = lambda places: F.embedding(places, lam, sparse=sparse)  # noqa: E731
            return bl.Task((table(train), Y), (table(val), Y))

        return bl.Problem(lambda w, lam, b: error(w, lam, b) + 0.1 * (w**2).sum(), error, zeros, encode)

    table = torch.linspace(-1, 1, 20).reshape(5, 4).sin()
    dense, sparse = (
        bl.hypergradient(problem(kind), table, TASK, dynamics=bl.GradientDescent(0.1), steps=60, method=method).grad
        for kind in (False, True)
    )
    torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-14)
