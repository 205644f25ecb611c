"""`objective`: a scalar tensor whose backward pass is the hypergradient."""

import pytest
import torch

import bilevel as bl
from bilevel.testing import relative_error
from bilevel.testing.problems import examples


def test_backward_fills_grad_like_any_loss():
    example = examples()[1]
    lam = {k: v.clone().requires_grad_() for k, v in example.lam.items()}
    settings = {"dynamics": bl.GradientDescent(0.3), "steps": 6}
    f = bl.objective(example.problem, lam, example.task, **settings)
    (2 * f + 1).backward()
    expected = bl.hypergradient(example.problem, lam, example.task, **settings)
    assert f.ndim == 0 and torch.equal(f.detach(), expected.value)
    assert relative_error({k: v.grad for k, v in lam.items()}, {k: 2 * v for k, v in expected.grad.items()}) < 1e-12
    bl.objective(example.problem, lam, example.task, **settings).backward()
    assert relative_error({k: v.grad for k, v in lam.items()}, {k: 3 * v for k, v in expected.grad.items()}) < 1e-12


def test_lam_may_be_computed_and_partly_frozen():
    example = examples()[1]
    theta = torch.tensor(0.7, requires_grad=True)
    lam = {**example.lam, "shift": theta**2}
    settings = {"dynamics": bl.GradientDescent(0.3), "steps": 6}
    bl.objective(example.problem, lam, example.task, **settings).backward()
    expected = bl.hypergradient(example.problem, lam, example.task, **settings).grad["shift"] * 2 * theta.detach()
    assert torch.allclose(theta.grad, expected)
    assert all(v.grad is None for k, v in lam.items() if k != "shift")


def test_without_gradients_only_the_value_is_computed():
    example = examples()[1]
    settings = {"dynamics": bl.GradientDescent(0.3), "steps": 6}
    with torch.no_grad():
        f = bl.objective(example.problem, example.lam, example.task, **settings)
    assert not f.requires_grad and torch.equal(
        f, bl.hypergradient(example.problem, example.lam, example.task, **settings).value
    )


def test_the_value_alone_is_that_of_the_method():
    """Implicit(newton=…) ends elsewhere than after T steps."""
    example = examples()[1]
    lam = {name: leaf.clone() for name, leaf in example.lam.items() if name != "start"}
    problem = bl.Problem(example.problem.inner, example.problem.outer, lambda lam: example.problem.init(example.lam))
    settings = {"dynamics": bl.GradientDescent(0.3), "steps": 1, "method": bl.Implicit(newton=1e-10)}
    expected = bl.hypergradient(problem, lam, example.task, **settings).value
    with torch.no_grad():
        assert torch.equal(bl.objective(problem, lam, example.task, **settings), expected)


def test_a_lam_that_requires_no_grad_has_a_value_and_no_graph():
    example = examples()[1]
    settings = {"dynamics": bl.GradientDescent(0.3), "steps": 6}
    f = bl.objective(example.problem, example.lam, example.task, **settings)
    assert torch.equal(f, bl.hypergradient(example.problem, example.lam, example.task, **settings).value)
    with pytest.raises(RuntimeError, match="does not require grad"):
        f.backward()


def test_a_plain_torch_loop_descends():
    example = examples()[1]
    lam = {k: v.clone().requires_grad_() for k, v in example.lam.items()}
    optimizer = torch.optim.Adam(lam.values(), lr=0.05)
    values = []
    for _ in range(30):
        optimizer.zero_grad()
        f = bl.objective(example.problem, lam, [example.task, example.task], dynamics=bl.GradientDescent(0.3), steps=6)
        f.backward()
        torch.nn.utils.clip_grad_norm_(lam.values(), 1.0)
        optimizer.step()
        values.append(f.item())
    assert values[-1] < 0.8 * values[0]


def test_under_no_grad_what_is_wrong_is_still_said():
    example = examples()[1]
    with torch.no_grad():
        with pytest.raises(bl.DivergenceError):
            bl.objective(example.problem, example.lam, example.task, dynamics=bl.GradientDescent(1e30), steps=50)
        with pytest.raises(bl.BilevelError, match="method"):
            bl.objective(
                example.problem, example.lam, example.task, dynamics=bl.GradientDescent(0.1), steps=5, method="x"
            )


@pytest.mark.parametrize("several", [False, True])
def test_data_that_change_before_a_second_derivative_are_refused(several):
    """The first derivative was computed with the value: it stays right, and available."""
    x, lam = torch.tensor([1.0, 2.0]), torch.zeros(2, requires_grad=True)
    problem = bl.Problem(
        inner=lambda w, lam, x: ((w - x) ** 2).sum() + (lam.exp() * w**2).sum(),
        outer=lambda w, lam, x: ((w - x) ** 2).sum(),
        init=lambda lam: torch.zeros(2),
    )
    task = bl.Task(x, torch.ones(2))
    f = bl.objective(problem, lam, [task, task] if several else task, dynamics=bl.GradientDescent(0.1), steps=3)
    (slope,) = torch.autograd.grad(f, lam, create_graph=True)
    x.mul_(2)
    assert torch.equal(torch.autograd.grad(f, lam, retain_graph=True)[0], slope)
    with pytest.raises(bl.BilevelError, match=r"changed in place .* clone"):
        torch.autograd.grad(slope.sum(), lam)


def test_data_made_in_inference_mode_have_second_derivatives():
    with torch.inference_mode():
        x = torch.ones(2)
    problem = bl.Problem(
        inner=lambda w, lam, x: ((w - lam) ** 2).sum(), outer=lambda w, lam, x: (w**3).sum(), init=lambda lam: lam * 0
    )
    lam = torch.ones(2, requires_grad=True)
    f = bl.objective(problem, lam, bl.Task(None, x), dynamics=bl.GradientDescent(0.5), steps=1)
    (slope,) = torch.autograd.grad(f, lam, create_graph=True)
    assert torch.allclose(torch.autograd.grad(slope.sum(), lam)[0], torch.full((2,), 6.0))


@pytest.mark.parametrize("method", [bl.Reverse(), bl.Unrolled(), bl.Forward(), bl.Implicit(), bl.FirstOrder()], ids=str)
def test_gradients_can_be_changed_in_place_one_by_one(method):
    """autograd gives one tensor for two leaves of a sum. Clipping would scale it twice."""
    problem = bl.Problem(
        lambda w, lam, _: ((w - 1) ** 2).sum(),
        lambda w, lam, _: (w**2).sum() + ((lam["a"] + lam["b"]) ** 2).sum() + 3 * lam["c"].sum(),
        lambda lam: torch.zeros(2),
    )
    lam = {name: torch.ones(3, requires_grad=True) for name in "abc"}
    call = {"dynamics": bl.GradientDescent(0.3), "steps": 20, "method": method}
    found = bl.hypergradient(problem, lam, bl.Task(None, None), **call).grad
    for name, leaf in lam.items():
        leaf.grad = found[name]
    torch.nn.utils.clip_grad_norm_(lam.values(), 1.0)
    clipped = torch.cat([leaf.grad for leaf in lam.values()])
    expected = torch.tensor([4.0, 4, 4, 4, 4, 4, 3, 3, 3])
    torch.testing.assert_close(clipped, expected / expected.norm(), rtol=1e-5, atol=0)
