"""Every torch.optim class with a `differentiable` switch, against central differences and with its learned step
size."""

import pytest
import torch

import bilevel as bl
from bilevel.hypergradients import value_of
from bilevel.testing import central_differences, relative_error
from bilevel.testing.problems import examples

DIFFERENTIABLE = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop"]
LEARNED_RATE = {"SGD", "Adam", "AdamW", "NAdam", "RAdam"}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_through_the_step(name):
    example = examples()[1]
    settings = {"dynamics": bl.TorchOptim(getattr(torch.optim, name), lr=0.05), "steps": 4}
    expected = central_differences(lambda lam: value_of(example.problem, lam, example.task, **settings), example.lam)
    for method in (bl.Unrolled(), bl.Reverse(), bl.Forward()):
        found = bl.hypergradient(example.problem, example.lam, example.task, method=method, **settings).grad
        assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_learned_step_size_is_right_or_refused(name):
    example = examples()[1]
    lam = {**example.lam, "lr": torch.tensor(0.05)}
    settings = {"dynamics": lambda lam: bl.TorchOptim(getattr(torch.optim, name), lr=lam["lr"]), "steps": 4}
    if name not in LEARNED_RATE:
        with pytest.raises(bl.BilevelError, match=r"lr"):
            bl.hypergradient(example.problem, lam, example.task, **settings)
        return
    expected = central_differences(lambda lam: value_of(example.problem, lam, example.task, **settings), lam)
    found = bl.hypergradient(example.problem, lam, example.task, **settings).grad
    assert relative_error(found, expected) < 1e-6


def test_momentum_is_in_the_graph_from_the_first_step():
    example = examples()[0]
    ours = bl.hypergradient(example.problem, example.lam, example.task, dynamics=bl.HeavyBall(0.2, 0.9), steps=6).grad
    theirs = bl.hypergradient(
        example.problem,
        example.lam,
        example.task,
        dynamics=bl.TorchOptim(torch.optim.SGD, lr=0.2, momentum=0.9),
        steps=6,
    ).grad
    assert relative_error(theirs, ours) < 1e-12


def test_agrees_with_torch_optim_itself():
    example = examples()[1]
    w = {k: v.clone().requires_grad_() for k, v in example.problem.init(example.lam).items()}
    optimizer = torch.optim.Adam(list(w.values()), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        example.problem.inner(w, example.lam, example.task.train).backward()
        optimizer.step()
    for dynamics in (bl.TorchOptim(torch.optim.Adam, lr=0.1), bl.Adam(0.1)):
        found = bl.hypergradient(example.problem, example.lam, example.task, dynamics=dynamics, steps=5).inner
        assert relative_error(found, {k: v.detach() for k, v in w.items()}) < 1e-12


def test_a_class_without_the_switch_is_refused():
    with pytest.raises(bl.BilevelError, match="differentiable"):
        bl.TorchOptim(torch.optim.Adafactor, lr=0.1)


@pytest.mark.parametrize("setting", ["lr", "lambd"])
def test_asgd_does_not_lose_part_of_a_gradient(setting):
    """λ also enters the objective here, so that it reaches something and only part of its gradient would be lost."""
    example = examples()[1]
    settings = {"lr": 0.05, setting: None}

    def dynamics(lam):
        return bl.TorchOptim(torch.optim.ASGD, **{**settings, setting: 0.05 + 0.01 * lam["shift"] ** 2})

    with pytest.raises(bl.BilevelError, match=f"cannot learn '{setting}'"):
        bl.hypergradient(example.problem, example.lam, example.task, dynamics=dynamics, steps=4)


def test_settings_that_torch_asserts_are_named():
    problem = bl.Problem(
        lambda w, lam, _: ((w - lam) ** 2).sum(), lambda w, lam, _: (w**2).sum(), lambda lam: torch.zeros(2)
    )
    dynamics = bl.TorchOptim(torch.optim.Adam, lr=0.1, foreach=True)
    with pytest.raises(bl.BilevelError, match=r"Adam refused the settings.*foreach"):
        bl.hypergradient(problem, torch.ones(2), bl.Task(None, None), dynamics=dynamics, steps=2)
