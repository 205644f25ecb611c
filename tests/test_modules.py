"""A module as pure functions: what is learned, what is constant, and that the module itself stays as it is."""

import copy

import pytest
import torch
from torch import nn

import bilevel as bl
from bilevel.testing import relative_error


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    net[0].requires_grad_(False)
    return net


def test_frozen_parameters_are_constants_of_apply():
    net = network()
    w, apply = bl.functional(net)
    assert sorted(w) == ["2.bias", "2.weight"]
    x = torch.randn(5, 3).double()
    expected = net(x)
    assert torch.equal(apply(w, x), expected)
    with torch.no_grad():
        net[0].weight.zero_()
    net[0].weight.requires_grad_()
    found = apply({name: value.requires_grad_() for name, value in w.items()}, x)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert net[0].weight.grad is None and w["2.weight"].grad is not None


@pytest.mark.parametrize("method", [bl.Unrolled(), bl.Reverse(), bl.Forward()])
def test_a_frozen_backbone_is_not_trained(method):
    net = network()
    x, y = torch.randn(6, 3).double(), torch.randn(6, 1).double()
    w0, apply = bl.functional(net)

    def error(w, batch):
        return ((apply(w, batch[0]) - batch[1]) ** 2).mean()

    problem = bl.Problem(
        inner=lambda w, lam, b: (
            ((apply(w, b[0]) - b[1]) ** 2).mean() + lam.exp() * sum((v**2).sum() for v in w.values())
        ),
        outer=lambda w, lam, b: ((apply(w, b[0]) - b[1]) ** 2).mean(),
        init=lambda lam: w0,
    )
    lam = torch.tensor(-1.0).double()
    found = bl.hypergradient(
        problem, lam, bl.Task((x, y), (x, y)), dynamics=bl.GradientDescent(0.1), steps=10, method=method
    )

    live, features = lam.clone().requires_grad_(), net[1](net[0](x))
    w = [value.detach().clone().requires_grad_() for value in net[2].parameters()]
    for _ in range(10):
        loss = ((features @ w[0].T + w[1] - y) ** 2).mean() + live.exp() * sum((v**2).sum() for v in w)
        w = [a - 0.1 * g for a, g in zip(w, torch.autograd.grad(loss, w, create_graph=True), strict=True)]
    value = ((features @ w[0].T + w[1] - y) ** 2).mean()
    assert relative_error(found.value, value.detach()) < 1e-12
    assert relative_error(found.grad, torch.autograd.grad(value, live)[0]) < 1e-12
    assert sorted(found.inner) == ["2.bias", "2.weight"]


def test_a_module_without_a_parameter_to_learn_is_refused():
    with pytest.raises(bl.BilevelError, match=r"requires_grad_\(\)"):
        bl.functional(nn.Linear(2, 1).requires_grad_(False))
    assert bl.functional(nn.ReLU())[0] == {}


def test_the_module_is_not_changed():
    net = network()
    before = copy.deepcopy(net.state_dict())
    w, apply = bl.functional(net)
    w["2.weight"].zero_()
    apply(w, torch.ones(1, 3).double())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(register):
    """They would not be called: the gradient is taken in copies."""
    net = network()
    handle = getattr(net[2].bias, register)(lambda g: None)
    with pytest.raises(bl.BilevelError, match=r"'2\.bias' has a hook"):
        bl.functional(net)
    handle.remove()
    bl.functional(net)
