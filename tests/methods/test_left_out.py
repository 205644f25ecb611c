"""The leave-one-out loss of linear models, against refits, differences and other methods."""

from dataclasses import replace

import pytest
import torch

import bilevel as bl
from bilevel.errors import BilevelError
from bilevel.methods.linear_models import NewtonLeftOut, NewtonLinear, StaleNewton
from bilevel.methods.linear_models.newton_linear import PenalisedRows
from bilevel.structures import GroupPenalties, LeftOutLoss, LinearModels, LogLoss, SquaredError


def problem(classes, loss=None, rows=40, features=3, seed=0, freedom=0.0):
    draw = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, features, generator=draw, dtype=torch.float64)
    scores = X @ torch.randn(features, max(classes, 2), generator=draw, dtype=torch.float64)
    noise = torch.randn(rows, max(classes, 2), generator=draw, dtype=torch.float64)
    label = (scores + noise).argmax(1)
    y = torch.nn.functional.one_hot(label, max(classes, 2)).double().mT
    y = y[1:] if classes == 2 else y
    weight = (0.5 + torch.rand(1, rows, generator=draw, dtype=torch.float64)) * rows / rows
    model = LinearModels(loss or LogLoss(), GroupPenalties(features, torch.tensor([0, 1, 1])), intercept=True)
    outputs = len(y)
    built = bl.Problem(
        model,
        LeftOutLoss(model, lambda lam, strength: strength * lam.square().sum(), freedom),
        init=lambda lam: lam.new_zeros(1, outputs, features + 1),
    )
    task = bl.Task((X, y, weight), (X, y, weight, torch.tensor(0.01, dtype=torch.float64)))
    return built, task


def found(problem, task, lam, method, last=None):
    warm = {} if last is None else {"start": last.inner, "adjoint": last.adjoint}
    return bl.hypergradient(problem, lam, task, method=method, dynamics=bl.GradientDescent(0.01), steps=1, **warm)


LAM = torch.tensor([0.3, 1.2], dtype=torch.float64)


@pytest.mark.parametrize(("classes", "freedom"), [(2, 0.0), (3, 0.0), (3, 0.7)])
def test_the_gradient_is_that_of_differences_and_of_implicit_differentiation(classes, freedom):
    built, task = problem(classes, freedom=freedom)
    ours = found(built, task, LAM, NewtonLeftOut())
    slopes = []
    for unit in torch.eye(2, dtype=torch.float64):
        up, down = (found(built, task, LAM + sign * 1e-4 * unit, NewtonLeftOut()).value for sign in (1, -1))
        slopes.append((up - down) / 2e-4)
    torch.testing.assert_close(ours.grad, torch.stack(slopes), rtol=1e-5, atol=1e-9)
    theirs = found(built, task, LAM, NewtonLinear(1e-10, dense=True))
    torch.testing.assert_close(ours.value, theirs.value, rtol=1e-9, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("classes", "loss", "tolerance"), [(2, SquaredError(), 1e-10), (2, None, 0.01), (3, None, 0.01)]
)
def test_the_loss_is_that_of_refits_without_each_row(classes, loss, tolerance):
    """Exactly so for squared errors, and up to what one Newton step leaves for the log-loss."""
    built, task = problem(classes, loss)
    X, y, weight = task.train
    total = 0.0
    for i in range(len(X)):
        rest = weight.clone()
        rest[0, i] = 0
        w = found(built, bl.Task((X, y, rest), task.val), LAM, NewtonLinear(1e-10, dense=True)).inner
        total += float(weight[0, i] * built.inner.loss.values(built.inner.scores(w, X[i : i + 1]), y[:, i : i + 1]))
    ours = float(found(built, task, LAM, NewtonLeftOut()).value - 0.01 * LAM.square().sum())
    assert ours == pytest.approx(total / float(weight.sum()), rel=tolerance)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_hessian_of_the_last_penalties_is_where_the_next_search_starts(classes, monkeypatch):
    built, task = problem(classes)
    last = found(built, task, LAM + 0.3, NewtonLeftOut())
    points = []
    hessians = PenalisedRows.unpenalised_hessians

    def counted(rows, scores, part=slice(None)):
        points.append(scores)
        return hessians(rows, scores, part)

    monkeypatch.setattr(PenalisedRows, "unpenalised_hessians", counted)
    counts, results = [], []
    for warm in (replace(last, adjoint=None), last):
        points.clear()
        results.append(found(built, task, LAM, NewtonLeftOut(), warm))
        counts.append(len(points))
    assert counts[1] == counts[0] - 1
    cold = found(built, task, LAM, NewtonLeftOut())
    for result in results:
        torch.testing.assert_close(result.value, cold.value, rtol=1e-12, atol=0)
        torch.testing.assert_close(result.grad, cold.grad, rtol=1e-9, atol=1e-12)


def test_the_hessian_of_other_data_is_not_used():
    built, task = problem(2)
    last = found(built, task, LAM + 0.3, NewtonLeftOut())
    weight = task.train[2].clone()
    for changed in (weight.flip(1), task.train[2].mul_(2)):  # other data, and the same tensor with other numbers
        other = bl.Task((*task.train[:2], changed), (*task.val[:2], changed, task.val[3]))
        warm, cold = (found(built, other, LAM, NewtonLeftOut(), start) for start in (last, None))
        torch.testing.assert_close(warm.value, cold.value, rtol=1e-12, atol=0)
        torch.testing.assert_close(warm.grad, cold.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", [NewtonLeftOut(), StaleNewton()])
def test_a_run_whose_method_keeps_hessians_is_resumed_bit_for_bit(method, tmp_path):
    built, task = problem(2)

    def run(folder, callbacks=()):
        settings = {"method": method, "dynamics": bl.GradientDescent(0.01), "steps": 1, "start": "warm"}
        keeps = {"checkpoint": tmp_path / folder, "checkpoint_every": 3}
        return bl.solve(built, LAM, task, iterations=8, callbacks=callbacks, **settings, **keeps)

    whole = run("whole")
    assert whole.outcome.kind == "finished"
    run("stopped", [lambda here: here.k == 4])
    assert run("stopped").outer.equal(whole.outer)


def test_other_problems_are_refused():
    built, task = problem(2)
    other = bl.Problem(built.inner, lambda w, lam, batch: (w**2).sum() + 0 * lam.sum(), built.init)
    with pytest.raises(BilevelError, match="LeftOutLoss"):
        found(other, task, LAM, NewtonLeftOut())
    folds = task.train[2].expand(2, -1)
    with pytest.raises(BilevelError, match="one fold"):
        found(built, bl.Task((*task.train[:2], folds), task.val), LAM, NewtonLeftOut())


def test_one_penalty_may_stand_for_all_features():
    built, task = problem(2)
    model = LinearModels(LogLoss(), torch.exp, intercept=True)
    shared = bl.Problem(model, LeftOutLoss(model, lambda lam, strength: strength * lam.square().sum()), built.init)
    ours, theirs = (found(shared, task, torch.tensor(0.3), m) for m in (NewtonLeftOut(), NewtonLinear(1e-10)))
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)
    each = found(built, task, torch.full((2,), 0.3), NewtonLeftOut())
    torch.testing.assert_close(ours.inner, each.inner)
    torch.testing.assert_close(ours.value - 0.01 * 0.09, each.value - 0.02 * 0.09)
