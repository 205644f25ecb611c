"""Methods for linear models on folds: against closed forms, differences, generic methods and each other."""

import numpy as np
import pytest
import torch
from scipy import sparse

import bilevel as bl
from bilevel.methods.linear_models import stale_newton
from bilevel.structures import (
    GammaDeviance,
    GramOfRows,
    HeldOutLoss,
    HeldOutSquares,
    LeastSquares,
    LinearClassifiers,
    LinearModels,
    LogLoss,
    PoissonDeviance,
    SquaredError,
    losses,
)

FOLDS = 3
REFERENCE = bl.Implicit(bl.Direct(), newton=1e-11)
STILL = {"dynamics": bl.GradientDescent(0.01), "steps": 1}


def rows_problem(loss, *, intercept=True, rows=30, features=6, outputs=2, sparsely=False, seed=0):
    """A problem and a task with one table on both levels, weights of rows, and a term in λ alone."""
    torch.manual_seed(seed)
    X = torch.randn(rows, features, dtype=torch.float64) + 0.3
    y = torch.randn(outputs, rows, dtype=torch.float64) + X[:, :outputs].T
    if isinstance(loss, LogLoss):
        y = (y > 0).double() if outputs == 1 else torch.eye(outputs).double()[y.argmax(0)].T.contiguous()
    elif not isinstance(loss, SquaredError):
        y = y.exp().ceil() - 1 if isinstance(loss, PoissonDeviance) else y.exp()
    weight, fold = torch.rand(rows, dtype=torch.float64) + 0.5, torch.arange(rows) % FOLDS
    held_out = fold == torch.arange(FOLDS)[:, None]
    inner = LinearModels(loss, intercept=intercept)
    problem = bl.Problem(
        inner,
        HeldOutLoss(inner, lambda lam, c: c * lam.square().sum()),
        init=lambda lam: torch.zeros(FOLDS, outputs, features + intercept, dtype=lam.dtype),
    )
    table = sparse.csr_matrix(X.numpy()) if sparsely else X
    task = bl.Task(
        (table, y, weight * ~held_out), (table, y, weight * held_out, torch.tensor(0.1, dtype=torch.float64))
    )
    return problem, torch.randn(features, dtype=torch.float64) * 0.5, task


def sums_problem(problem, task):
    """Squared errors without an intercept as sums over rows."""
    X, y, s = task.train
    _, _, v, held = task.val
    v = v / v.sum()
    gram, held_out = (torch.stack([X.T @ (X * one[:, None]) for one in weights]) for weights in (s, v))
    moments, goal = (torch.stack([(y * one) @ X for one in weights]) for weights in (s, v))
    constant = (v[:, None] * y**2).sum()
    sums = bl.Problem(LeastSquares(), HeldOutSquares(problem.outer.extra), problem.init)
    return sums, bl.Task((gram, moments), (held_out, goal, constant, held))


def agree(found, wanted, tolerance=1e-9):
    torch.testing.assert_close(found.value, wanted.value, rtol=tolerance, atol=0)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.inner, wanted.inner, rtol=1e-6, atol=1e-7)


def agree_with_differences(grad, problem, lam, task, method, settings=STILL, step=1e-5, rtol=1e-6):
    """Along three random directions, each of which moves all of λ: an error in any component is seen."""

    def value(point):
        return float(bl.hypergradient(problem, point, task, method=method, **settings).value)

    directions = torch.randn(3, len(lam), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slopes = [(value(lam + step * d) - value(lam - step * d)) / (2 * step) for d in directions]
    torch.testing.assert_close(directions @ grad, torch.tensor(slopes, dtype=torch.float64), rtol=rtol, atol=1e-8)


@pytest.mark.parametrize(
    ("shape", "intercept", "sparsely"),
    [
        *(((30, 6), intercept, sparsely) for intercept in (True, False) for sparsely in (False, True)),
        ((18, 25), True, True),
        ((18, 25), False, False),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        (SquaredError(), 1),
        (SquaredError(), 2),
        (LogLoss(), 1),
        (LogLoss(), 3),
        (PoissonDeviance(), 1),
        (GammaDeviance(), 2),
    ],
    ids=str,
)
def test_every_method_agrees_with_implicit_differentiation_and_with_differences(
    loss, outputs, intercept, sparsely, shape
):
    problem, lam, task = rows_problem(
        loss, intercept=intercept, outputs=outputs, sparsely=sparsely, rows=shape[0], features=shape[1]
    )
    wanted = bl.hypergradient(problem, lam, task, method=REFERENCE, **STILL)
    methods = [bl.NewtonLinear(), bl.NewtonLinear(1e-12, dense=False), bl.NewtonLinear(dense=True)]
    methods += [] if sparsely else [bl.StaleNewton(1e-11)]
    methods += [bl.KernelEquations()] if isinstance(loss, SquaredError) else []
    methods += [bl.RowSpan(1e-12)]
    for method in methods:
        agree(bl.hypergradient(problem, lam, task, method=method, **STILL), wanted)
    agree_with_differences(wanted.grad, problem, lam, task, methods[-1])


def test_normal_equations_are_the_closed_form():
    rows, lam, task = rows_problem(SquaredError(), intercept=False)
    problem, sums = sums_problem(rows, task)
    found = bl.hypergradient(problem, lam, sums, method=bl.NormalEquations(), **STILL)
    X, y, s = task.train
    fitted = [torch.linalg.solve(X.T @ (X * one[:, None]) + lam.exp().diag(), X.T @ (y * one).T).T for one in s]
    torch.testing.assert_close(found.inner, torch.stack(fitted))
    agree(found, bl.hypergradient(rows, lam, task, method=bl.KernelEquations(), **STILL))
    agree(found, bl.hypergradient(problem, lam, sums, method=REFERENCE, **STILL))
    agree_with_differences(found.grad, problem, lam, sums, bl.NormalEquations())


def test_singular_normal_equations_have_the_least_norm_solution():
    gram, moments = torch.diag(torch.tensor([1.0, 0.0])).double()[None], torch.tensor([[[1.0, 0.0]]]).double()
    problem = bl.Problem(
        LeastSquares(), lambda w, lam, goal: ((w - goal) ** 2).sum(), init=lambda lam: lam.new_zeros(1, 1, 2)
    )
    task = bl.Task((gram, moments), torch.zeros(1, 1, 2).double())
    lam = torch.full((2,), -800.0).double()
    found = bl.hypergradient(problem, lam, task, method=bl.NormalEquations(), **STILL)
    torch.testing.assert_close(found.inner, torch.tensor([[[1.0, 0.0]]]).double())


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.6, 1.0])
def test_the_active_set_is_the_limit_of_the_proximal_steps(ratio, by_rows):
    rows, lam, task = rows_problem(SquaredError(), intercept=False)
    base, sums = sums_problem(rows, task)
    problem = bl.Problem(LeastSquares(lambda lam: (1 - ratio) * lam.exp()), base.outer, base.init)
    if by_rows:
        X, _, s = task.train
        sums = bl.Task((GramOfRows(X, s, torch.zeros(FOLDS, 6).double()), sums.train[1]), sums.val)
    settings = {"dynamics": lambda lam: bl.FISTA(0.01, bl.L1(8 * ratio * lam.exp())), "steps": 1}
    found = bl.hypergradient(problem, lam, sums, method=bl.ActiveSet(), **settings)
    many = {**settings, "steps": 1_000}
    wanted = bl.hypergradient(
        problem, lam, sums, method=bl.Implicit(bl.FixedPoint(tol=1e-13, max_iter=100_000)), **many
    )
    agree(found, wanted, 1e-8)
    agree_with_differences(found.grad, problem, lam, sums, bl.ActiveSet(), settings)
    assert bool((found.inner == 0).any()) == (ratio > 0)


@pytest.mark.parametrize("method", [bl.NewtonLinear(), bl.StaleNewton(1e-11), bl.KernelEquations()], ids=str)
def test_features_that_depend_on_lambda_are_differentiated_through_encode(method):
    _, _, task = rows_problem(SquaredError(), outputs=1, features=4)
    lam = {"map": torch.randn(4, 4, dtype=torch.float64), "penalty": torch.zeros(4, dtype=torch.float64)}
    inner = LinearModels(penalty=lambda lam: lam["penalty"].exp(), intercept=True)

    def encode(lam, task):
        features = torch.tanh(task.train[0] @ lam["map"])
        return bl.Task((features, *task.train[1:]), (features, *task.val[1:3]))

    def outer(w, lam, batch):
        X, y, v = batch
        return (v * inner.loss.values(inner.scores(w, X), y)).sum()

    init = lambda lam: lam["map"].new_zeros(FOLDS, 1, 5)  # noqa: E731
    problem = bl.Problem(inner, outer, init, encode)
    found, wanted = (bl.hypergradient(problem, lam, task, method=m, **STILL) for m in (method, REFERENCE))
    for key in lam:
        torch.testing.assert_close(found.grad[key], wanted.grad[key], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-6])
def test_old_hessians_give_hypergradients_as_accurate_as_asked_along_a_path(tol):
    problem, lam, task = rows_problem(LogLoss(), rows=300, features=20, outputs=1)
    w, adjoint = torch.zeros(FOLDS, 1, 21).double(), None
    lam = torch.full((20,), 2.0).double()
    for _ in range(8):
        lam = lam + 0.7 * torch.randn(20).double()
        exact = bl.hypergradient(problem, lam, task, method=bl.NewtonLinear(dense=True), **STILL)
        found = bl.hypergradient(problem, lam, task, method=bl.StaleNewton(tol), start=w, adjoint=adjoint, **STILL)
        w, adjoint = found.inner, found.adjoint
        assert (found.grad - exact.grad).norm() <= tol * exact.grad.norm()
        assert float(found.value) == pytest.approx(float(exact.value), rel=tol**1.5)


def test_hessians_are_kept_from_one_hypergradient_to_the_next(monkeypatch):
    problem, lam, task = rows_problem(LogLoss(), rows=600, features=20, outputs=1)
    taken, take = [], stale_newton._Sweeps._cell_hessians
    monkeypatch.setattr(stale_newton._Sweeps, "_cell_hessians", lambda self, *a: taken.append(1) or take(self, *a))
    lam = torch.full((20,), 3.0).double()
    found = bl.hypergradient(problem, lam, task, method=bl.StaleNewton(1e-2), **STILL)
    before = len(taken)
    for _ in range(3):
        lam = lam + 0.02 * torch.randn(20).double()
        warm = {"start": found.inner, "adjoint": found.adjoint}
        found = bl.hypergradient(problem, lam, task, method=bl.StaleNewton(1e-2), **warm, **STILL)
    assert len(taken) == before


@pytest.mark.parametrize("method", [bl.NewtonLinear, bl.RowSpan, bl.StaleNewton])
def test_one_check_serves_all_tolerances(method):
    problem, lam, task = rows_problem(LogLoss(), outputs=1)
    starts = []
    counted = bl.Problem(problem.inner, problem.outer, lambda lam: starts.append(1) or problem.init(lam))
    counts = []
    for tol in (1e-4, 1e-6):
        bl.hypergradient(counted, lam, task, method=method(tol=tol), **STILL)
        counts.append(len(starts))
    assert counts[0] > 1 and counts[1] == counts[0] + 1, "the second tolerance was checked again"


def test_what_is_known_of_other_data_is_not_used():
    problem, lam, task = rows_problem(LogLoss(), rows=60, outputs=1)
    other = bl.Task((1.3 * task.train[0], *task.train[1:]), (1.3 * task.val[0], *task.val[1:]))
    known = bl.hypergradient(problem, lam, other, method=bl.StaleNewton(1e-11), **STILL)
    warm = {"start": known.inner, "adjoint": known.adjoint}
    wanted = bl.hypergradient(problem, lam, task, method=REFERENCE, **STILL)
    agree(bl.hypergradient(problem, lam, task, method=bl.StaleNewton(1e-11), **warm, **STILL), wanted)
    # The same tensors with other numbers in them.
    again = bl.hypergradient(problem, lam, task, method=bl.StaleNewton(1e-11), **STILL)
    task.train[0].mul_(1.3)
    wanted = bl.hypergradient(problem, lam, task, method=REFERENCE, **STILL)
    warm = {"start": again.inner, "adjoint": again.adjoint}
    agree(bl.hypergradient(problem, lam, task, method=bl.StaleNewton(1e-11), **warm, **STILL), wanted)


def test_sweeps_that_do_not_converge_are_left_for_newtons_method(monkeypatch):
    """Hessians that belong to other data altogether cost time and nothing else."""
    problem, lam, task = rows_problem(LogLoss(), rows=300, features=20, outputs=1)
    take = stale_newton._Sweeps._cell_hessians
    monkeypatch.setattr(
        stale_newton._Sweeps,
        "_cell_hessians",
        lambda self, *a: take(self, *a).zero_() + 0.05 * torch.eye(21).double(),
    )
    wanted = bl.hypergradient(problem, lam, task, method=REFERENCE, **STILL)
    agree(bl.hypergradient(problem, lam, task, method=bl.StaleNewton(1e-10), **STILL), wanted, 1e-7)


def test_what_does_not_apply_is_refused():
    problem, lam, task = rows_problem(LogLoss(), outputs=1)
    plain = bl.Problem(lambda w, lam, batch: problem.inner(w, lam, batch), problem.outer, problem.init)
    thin = rows_problem(LogLoss(), outputs=1, sparsely=True)[2]
    for refused, given, method, settings, sentence in [
        (plain, task, bl.NewtonLinear(), {}, "structures.LinearModels"),
        (bl.Problem(LinearClassifiers(), problem.outer, problem.init), task, bl.NormalEquations(), {}, "LeastSquares"),
        (problem, task, bl.KernelEquations(), {}, "squared errors only"),
        (problem, thin, bl.StaleNewton(), {}, "dense tensor"),
        (problem, bl.Task(lambda t: task.train, task.val), bl.NewtonLinear(), {}, "one batch"),
        (problem, task, bl.NewtonLinear(), {"dynamics": bl.AdamW(0.1)}, "not of AdamW"),
        (problem, task, bl.NewtonLinear(), {"dynamics": bl.ISTA(0.1, bl.L1(0.1))}, "not of ISTA"),
    ]:
        with pytest.raises(bl.BilevelError, match=sentence):
            bl.hypergradient(refused, lam, given, method=method, **{**STILL, **settings})
    sums, sums_task = sums_problem(*(rows_problem(SquaredError(), intercept=False)[i] for i in (0, 2)))
    for dynamics in (bl.GradientDescent(0.1), bl.ISTA(0.1, bl.GroupL2(0.1, (0, 0, 1)))):
        with pytest.raises(bl.BilevelError, match="with an L1 penalty"):
            bl.hypergradient(sums, lam, sums_task, method=bl.ActiveSet(), dynamics=dynamics, steps=1)


@pytest.mark.parametrize("soft", [False, True])
def test_losses_know_their_derivatives(soft):
    counted, positive = (PoissonDeviance(), 2), (GammaDeviance(), 1)
    for loss, outputs in ((SquaredError(), 2), (LogLoss(), 1), (LogLoss(), 3), counted, positive):
        scores = 3 * torch.randn(2, outputs, 5, dtype=torch.float64, requires_grad=True)
        y = torch.eye(outputs).double()[:, np.arange(5) % outputs] if outputs > 1 else torch.ones(1, 5).double()
        if soft:
            y = torch.randn(outputs, 5).softmax(0) if outputs > 1 else torch.rand(1, 5)
        loss.check(y)
        (slopes,) = torch.autograd.grad(loss.values(scores, y).sum(), scores, create_graph=True)
        torch.testing.assert_close(slopes, loss.slopes(scores, y))
        v = torch.randn_like(scores)
        (bent,) = torch.autograd.grad((slopes * v).sum(), scores)
        torch.testing.assert_close(bent, loss.hessian_times(scores, y, v))


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("outputs", [1, 3])
def test_weights_of_rows_that_depend_on_lam(outputs, dense):
    """Data cleaning: λ has a weight for every row of the table."""
    problem, _, task = rows_problem(LogLoss(), outputs=outputs)
    table = bl.Task((task.train[0], task.train[1], task.train[2] / 30), task.val)
    inner = LinearModels(LogLoss(), lambda lam: torch.full((6,), 0.1).double(), True, weight=torch.sigmoid)
    cleaning = bl.Problem(inner, problem.outer, problem.init)
    lam = torch.randn(30, dtype=torch.float64)
    method = bl.NewtonLinear(tol=1e-11, dense=dense)
    found = bl.hypergradient(cleaning, lam, table, method=method, **STILL)
    agree(found, bl.hypergradient(cleaning, lam, table, method=REFERENCE, **STILL))
    agree_with_differences(found.grad, cleaning, lam, table, method, rtol=1e-5)
    for other in (bl.RowSpan(), bl.StaleNewton()):
        with pytest.raises(bl.BilevelError, match=r"LinearModels\(weight=…\) computes them from λ. Use NewtonLinear"):
            bl.hypergradient(cleaning, lam, table, method=other, **STILL)


def test_a_large_tolerance_in_single_precision():
    """What data cleaning needs: some per cent of accuracy, from float32 data, in few products."""
    problem, lam, task = rows_problem(LogLoss(), rows=200, outputs=3)
    exact = bl.hypergradient(problem, lam, task, method=REFERENCE, **STILL)
    single = bl.Task(*(tuple(x.float() for x in part) for part in (task.train, task.val)))
    rough = bl.hypergradient(problem, lam.float(), single, method=bl.NewtonLinear(tol=0.02, dense=False), **STILL)
    assert rough.inner.dtype == torch.float32
    torch.testing.assert_close(rough.grad.double(), exact.grad, rtol=0.05, atol=0.05 * float(exact.grad.abs().max()))
    torch.testing.assert_close(rough.inner.double(), exact.inner, rtol=0.05, atol=0.02)


def test_the_log_loss_of_two_classes_is_that_of_the_textbook():
    scores, y = 5 * torch.randn(2, 1, 9), (torch.randn(1, 9) > 0).double()
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(scores, y.expand_as(scores), reduction="none")
    torch.testing.assert_close(LogLoss().values(scores, y), wanted[:, 0], rtol=1e-14, atol=1e-14)
    large = torch.tensor([[[800.0, -800.0]]])
    assert LogLoss().values(large, torch.tensor([[1.0, 0.0]])).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("outputs", [1, 3])
def test_probabilities_as_targets_are_fitted_by_every_method(outputs):
    problem, lam, task = rows_problem(LogLoss(), outputs=outputs)
    y = torch.rand(1, 30) if outputs == 1 else torch.randn(outputs, 30).softmax(0)
    soft = bl.Task((task.train[0], y, task.train[2]), (task.val[0], y, *task.val[2:]))
    wanted = bl.hypergradient(problem, lam, soft, method=REFERENCE, **STILL)
    for method in (bl.NewtonLinear(), bl.NewtonLinear(1e-12, dense=False), bl.StaleNewton(1e-11), bl.RowSpan(1e-12)):
        agree(bl.hypergradient(problem, lam, soft, method=method, **STILL), wanted)
    agree_with_differences(wanted.grad, problem, lam, soft, bl.NewtonLinear())


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("level", ["train", "val"])
@pytest.mark.parametrize("method", [bl.NewtonLinear(), bl.StaleNewton(), bl.RowSpan(), bl.Reverse(), REFERENCE])
def test_targets_that_are_no_probabilities_are_refused(outputs, level, method):
    problem, lam, task = rows_problem(LogLoss(), outputs=outputs)
    bl.hypergradient(problem, lam, task, method=method, **STILL)  # the checks of the code are passed and kept
    train, val = list(task.train), list(task.val)
    for wrong in (2 * task.train[1] - 1, 1.5 * task.train[1], *([0.5 * task.train[1]] if outputs > 1 else [])):
        (train if level == "train" else val)[1] = wrong
        with pytest.raises(bl.BilevelError, match=r"LogLoss takes targets y from 0 to 1.* not as −1 and 1"):
            bl.hypergradient(problem, lam, bl.Task(tuple(train), tuple(val)), method=method, **STILL)


def test_targets_are_read_once_and_again_after_a_change_in_place(monkeypatch):
    problem, lam, task = rows_problem(LogLoss(), outputs=1)
    read, look = [], losses._are_probabilities
    monkeypatch.setattr(losses, "_are_probabilities", lambda y: read.append(1) or look(y))
    for method in (bl.NewtonLinear(), bl.StaleNewton(), bl.Reverse()):
        bl.hypergradient(problem, lam, task, method=method, **{**STILL, "steps": 5})
    assert len(read) == 1
    task.train[1].mul_(2).sub_(1)
    with pytest.raises(bl.BilevelError, match="LogLoss takes targets"):
        bl.hypergradient(problem, lam, task, method=bl.NewtonLinear(), **STILL)


@pytest.mark.parametrize("penalty", [-3.0, -50.0])
def test_conjugate_gradients_refuse_negative_penalties(penalty):
    rows, _, task = rows_problem(SquaredError(), intercept=False)
    inner = LinearModels(penalty=lambda lam: lam)
    problem = bl.Problem(inner, HeldOutLoss(inner, rows.outer.extra), rows.init)
    lam = torch.ones(6)
    lam[0] = penalty
    with pytest.raises(bl.BilevelError, match="A penalty is negative"):
        bl.hypergradient(problem, lam, task, method=bl.NewtonLinear(dense=False), **STILL)


@pytest.mark.parametrize("penalty", [0.0, -1.0])
@pytest.mark.parametrize("method", [bl.RowSpan(), bl.KernelEquations()], ids=str)
def test_methods_that_divide_by_penalties_say_so(method, penalty):
    rows, _, task = rows_problem(SquaredError())
    inner = LinearModels(penalty=lambda lam: lam, intercept=True)
    problem = bl.Problem(inner, HeldOutLoss(inner, rows.outer.extra), rows.init)
    lam = torch.ones(6)
    lam[2] = penalty
    with pytest.raises(bl.BilevelError, match=f"{type(method).__name__} divides by the penalties.* Use NewtonLinear"):
        bl.hypergradient(problem, lam, task, method=method, **STILL)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_one_penalty_may_stand_for_all_features(shape, intercept):
    problem, _, task = rows_problem(SquaredError(), intercept=intercept)
    lam = torch.full(shape, 0.4)
    each = bl.hypergradient(problem, torch.full((6,), 0.4), task, method=bl.NewtonLinear(), **STILL)
    wanted = bl.hypergradient(problem, lam, task, method=REFERENCE, **STILL)
    torch.testing.assert_close(wanted.inner, each.inner)
    methods = [bl.NewtonLinear(dense=True), bl.NewtonLinear(1e-12, dense=False), bl.StaleNewton(1e-11)]
    for method in (*methods, bl.RowSpan(1e-12), bl.KernelEquations()):
        agree(bl.hypergradient(problem, lam, task, method=method, **STILL), wanted)
