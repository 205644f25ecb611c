"""`objective` in a loop of plain torch."""

import torch
from small_network import SETTINGS, problem_of, start
from torch import nn

import bilevel as bl
from bilevel.testing import relative_error


def parameters():
    return nn.ParameterDict({name: nn.Parameter(value) for name, value in start().items()})


def test_the_gradient_of_parameters_is_the_hypergradient_and_the_slope_of_the_value():
    problem, task = problem_of()
    hyper = parameters()
    f = bl.objective(problem, dict(hyper), task, **SETTINGS)
    f.backward()
    expected = bl.hypergradient(problem, start(), task, **SETTINGS)
    assert torch.equal(f.detach(), expected.value)
    assert relative_error({name: value.grad for name, value in hyper.items()}, expected.grad) < 1e-12
    h = 1e-5
    for name, value in start().items():
        for i in range(value.numel()):
            sides = []
            for sign in (1, -1):
                lam = start()
                lam[name].view(-1)[i] += sign * h
                with torch.no_grad():
                    sides.append(bl.objective(problem, lam, task, **SETTINGS))
            slope = (sides[0] - sides[1]) / (2 * h)
            assert torch.isclose(hyper[name].grad.view(-1)[i], slope, rtol=1e-6)


def test_a_loop_with_a_scheduler_walks_where_solve_walks():
    problem, task = problem_of()
    hyper = parameters()
    optimizer = torch.optim.Adam(hyper.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    for _ in range(8):
        optimizer.zero_grad()
        bl.objective(problem, dict(hyper), task, **SETTINGS).backward()
        optimizer.step()
        scheduler.step()
    sol = bl.solve(
        problem,
        start(),
        task,
        **SETTINGS,
        iterations=8,
        optimizer=lambda leaves: torch.optim.Adam(leaves, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
    )
    reached = {name: value.detach() for name, value in hyper.items()}
    assert relative_error(reached, start()) > 0.01
    assert relative_error(reached, sol.outer) < 1e-12


def test_clipping_shortens_the_hypergradient_and_keeps_its_direction():
    problem, task = problem_of()
    hyper = parameters()
    bl.objective(problem, dict(hyper), task, **SETTINGS).backward()
    grad = torch.cat([value.grad.reshape(-1).clone() for value in hyper.values()])
    norm = nn.utils.clip_grad_norm_(hyper.parameters(), max_norm=float(grad.norm()) / 3)
    clipped = torch.cat([value.grad.reshape(-1) for value in hyper.values()])
    assert torch.isclose(norm, grad.norm())
    # torch divides by the norm + 1e-6
    assert torch.allclose(clipped, grad / 3, rtol=1e-4)


def test_gradients_of_several_losses_add_up():
    problem, task = problem_of()
    hyper = parameters()
    f = bl.objective(problem, dict(hyper), task, **SETTINGS)
    (f + 0.5 * hyper["decay"].square().sum()).backward()
    expected = bl.hypergradient(problem, start(), task, **SETTINGS).grad
    assert torch.allclose(hyper["decay"].grad, expected["decay"] + start()["decay"])
    assert torch.allclose(hyper["rate"].grad, expected["rate"])


def test_learned_settings_are_those_of_torch_sgd():
    problem, task = problem_of()
    lam = bl.solve(problem, start(), task, **SETTINGS, iterations=5).outer
    result = bl.hypergradient(problem, lam, task, **SETTINGS)
    w = {name: nn.Parameter(value.clone()) for name, value in problem.init(lam).items()}
    # torch's weight decay d is the penalty d/2 ‖w‖²
    decay = 2 * lam["decay"].exp()
    groups = [{"params": w[name], "weight_decay": d.item()} for name, d in zip(("first", "second"), decay, strict=True)]
    sgd = torch.optim.SGD(groups, lr=lam["rate"].exp().item(), momentum=0.8)
    for _ in range(SETTINGS["steps"]):
        sgd.zero_grad()
        problem.outer(w, lam, task.train).backward()
        sgd.step()
    assert relative_error({name: value.detach() for name, value in w.items()}, result.inner) < 1e-12
