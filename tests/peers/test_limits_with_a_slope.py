"""Dynamics that come to rest where the inner objective still has a slope: weight decay, projections, mirror maps.

The limit f is differentiated by `Implicit`, right or not at all. The references solve ∇L + decay·w = 0 by Newton's
method, or differentiate steps that have come to rest.
"""

import pytest
import torch
from comparing import minimiser, regression, right_or_refused, slope, squares, zeros
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import bilevel as bl

TASK = regression(20, 4)
LAM = torch.tensor([-2.0, -1.0, 0.0, 0.5], dtype=torch.float64)
PROBLEM = bl.Problem(
    lambda w, lam, data: squares(w, lam, data) + 0.5 * (lam.exp() * w**2).sum(),
    squares,
    lambda lam: torch.full((4,), 0.1),
)


def limit(decay=0.0):
    """∇f where ∇L(w) + decay·w = 0."""
    loss = lambda w, lam: PROBLEM.inner(w, lam, TASK.train) + 0.5 * decay * (w**2).sum()  # noqa: E731
    return slope(lambda lam: squares(minimiser(loss, torch.zeros(4), lam), None, TASK.val), LAM).grad


def asked(dynamics, method, steps=400):
    """A question that `right_or_refused` may ask."""
    return lambda: bl.hypergradient(PROBLEM, LAM, TASK, dynamics=dynamics, steps=steps, method=method).grad


IMPLICIT = {
    "by itself": bl.Implicit(),
    "directly": bl.Implicit(bl.Direct()),
    "after Newton's method": bl.Implicit(bl.CG(tol=1e-12), newton=1e-10),
}
DECAY = {
    "SGD": bl.TorchOptim(SGD, lr=0.3, weight_decay=0.5),
    "SGD with momentum": bl.TorchOptim(SGD, lr=0.1, momentum=0.5, weight_decay=0.5),
    "a schedule": bl.TorchOptim(SGD, lr=lambda t: 0.3, weight_decay=0.5),
}


@pytest.mark.parametrize("name", DECAY)
@pytest.mark.parametrize("how", IMPLICIT)
def test_weight_decay_of_an_optimiser(name, how):
    ask = asked(DECAY[name], IMPLICIT[how], 300)
    assert right_or_refused(ask, limit(0.5))


@pytest.mark.parametrize("name", DECAY)
def test_weight_decay_by_the_steps_themselves(name):
    found = bl.hypergradient(PROBLEM, LAM, TASK, dynamics=DECAY[name], steps=300).grad
    assert right_or_refused(lambda: found, limit(0.5))


def falling(t):
    """A rate that lets adaptive methods come to rest."""
    return 0.1 / (1 + t / 20) ** 1.5


ADAPTIVE = {
    "Adam with decay": bl.TorchOptim(Adam, lr=falling, weight_decay=0.5),
    "RMSprop with decay": bl.TorchOptim(RMSprop, lr=falling, weight_decay=0.5),
    "Adagrad with decay": bl.TorchOptim(Adagrad, lr=0.5, weight_decay=0.5),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_weight_decay_inside_the_gradient_of_an_adaptive_optimiser(name):
    """Their limit is that of the decayed objective, too, however the gradient is scaled."""
    ask = asked(ADAPTIVE[name], bl.Implicit(), 600)
    assert right_or_refused(ask, limit(0.5), tolerance=1e-3)


@pytest.mark.parametrize(
    "dynamics",
    [bl.AdamW(0.02, weight_decay=0.5), bl.TorchOptim(AdamW, lr=0.02, weight_decay=0.5)],
    ids=["ours", "torch's"],
)
def test_decoupled_decay_rests_where_no_objective_has_its_minimum(dynamics):
    """Decay outside the scaled gradient: the limit depends on the scaling, too."""
    exact = asked(dynamics, bl.Reverse())()
    right_or_refused(asked(dynamics, bl.Implicit()), exact, tolerance=1e-3)


@pytest.mark.parametrize(
    "dynamics", [bl.AdamW(0.02, weight_decay=0.0), bl.TorchOptim(SGD, lr=0.3)], ids=["AdamW", "SGD"]
)
def test_without_decay_the_limit_is_the_minimum(dynamics):
    ask = asked(dynamics, bl.Implicit(bl.CG(tol=1e-12), newton=1e-10), 600)
    assert right_or_refused(ask, limit())


def descent(change):
    """Gradient descent whose iterate is changed after every step."""
    return lambda loss, w, state, t: (change(w - 0.3 * bl.gradient(loss, w)), state)


def mirror(loss, w, state, t):
    moved = w * torch.exp(-3 * bl.gradient(loss, w))
    return moved / moved.sum(), state


PROJECTED = {
    "coefficients that are not negative": descent(bl.NonNegative().project),
    "a box": descent(bl.Box(-0.1, 0.2).project),
    "a simplex": descent(bl.Simplex().project),
    "a ball": descent(bl.Ball(0.3).project),
    "soft thresholding": descent(lambda w: torch.sign(w) * torch.relu(w.abs() - 0.05)),
    "shrinkage": descent(lambda w: 0.9 * w),
    "mirror descent": mirror,
    "weights clipped to their first decimal": descent(lambda w: w.clamp(-0.1, 0.1)),
}


@pytest.mark.parametrize("name", PROJECTED)
@pytest.mark.parametrize("how", ["by itself", "after Newton's method"])
def test_a_step_that_ends_with_a_projection(name, how):
    """The fixed point is differentiated by the steps, which have converged, as the reference."""
    exact = asked(PROJECTED[name], bl.Reverse())()
    right_or_refused(asked(PROJECTED[name], IMPLICIT[how]), exact)


@pytest.mark.parametrize("name", PROJECTED)
def test_a_projection_where_the_fixed_point_is_asked_for(name):
    exact = asked(PROJECTED[name], bl.Reverse())()
    method = bl.Implicit(bl.FixedPoint(tol=1e-12), condition="fixed-point")
    assert right_or_refused(asked(PROJECTED[name], method), exact)


def test_a_projection_that_is_not_met_is_no_reason_to_refuse():
    """All coefficients end inside a wide box: the limit is the minimum, and Implicit may say so."""
    ask = asked(descent(bl.Box(-9, 9).project), bl.Implicit(bl.CG(tol=1e-12)), 400)
    assert right_or_refused(ask, limit())


def test_clipped_gradients_come_to_rest_at_the_minimum():
    def clipped(loss, w, state, t):
        g = bl.gradient(loss, w)
        return w - 0.3 * g * (0.2 / g.norm()).clamp_max(1), state

    ask = asked(clipped, bl.Implicit(bl.CG(tol=1e-12)))
    assert right_or_refused(ask, limit())


@pytest.mark.parametrize("start", [zeros(4), lambda lam: torch.full((4,), 5.0)], ids=["near", "far"])
def test_gradient_descent_is_not_refused(start):
    """Neither at rest nor on the way: an unfinished run has a slope as well, and that is no reason to refuse."""
    problem = bl.Problem(PROBLEM.inner, PROBLEM.outer, start)
    done = bl.hypergradient(
        problem, LAM, TASK, dynamics=bl.GradientDescent(0.3), steps=400, method=bl.Implicit(bl.CG(tol=1e-12))
    )
    assert right_or_refused(lambda: done.grad, limit())
    bl.hypergradient(problem, LAM, TASK, dynamics=bl.GradientDescent(0.3), steps=3, method=bl.Implicit())
