"""Sparse models at their minimiser: scikit-learn's solutions at tol = 1e-15, closed forms, Newton on the support."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from comparing import agree, classification, close, differences, minimiser, regression, slope, squares, zeros
from sklearn import linear_model

import bilevel as bl
from bilevel.testing import relative_error

AT_THE_LIMIT = (
    bl.Unrolled(),
    bl.Reverse(),
    bl.Reverse("sqrt", group_bytes=0),
    bl.Forward(),
    bl.Implicit(bl.FixedPoint(tol=1e-12)),
    bl.Implicit(bl.Direct()),
)
TASK = regression()


def fitted(name, x, y, **settings):
    """scikit-learn's coefficients as a tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 1e-15 cannot always be reached, and it comes close
        model = getattr(linear_model, name)(fit_intercept=False, tol=1e-15, max_iter=100_000, **settings)
        return torch.as_tensor(model.fit(x.numpy(), y.numpy()).coef_)


def held_out(w, data=TASK.val):
    return squares(w, None, data)


SMOOTH = bl.Problem(squares, squares, zeros(6))


@pytest.mark.parametrize("dynamics, steps", [(bl.ISTA, 250), (bl.FISTA, 2000)], ids=["ISTA", "FISTA"])
def test_lasso_judged_on_held_out_data(dynamics, steps):
    lam = torch.tensor(-2.5)
    expected = differences(lambda lam: held_out(fitted("Lasso", *TASK.train, alpha=float(lam.exp()))), lam)
    assert 0 < int((fitted("Lasso", *TASK.train, alpha=float(lam.exp())) == 0).sum()) < 6
    methods = AT_THE_LIMIT if steps == 250 else (bl.Reverse(), bl.Implicit())
    agree(
        expected, SMOOTH, lam, TASK, dynamics=lambda lam: dynamics(0.4, bl.L1(lam.exp())), steps=steps, methods=methods
    )


def test_lasso_through_its_last_steps_only():
    lam, run = torch.tensor(-2.5), {"dynamics": lambda lam: bl.ISTA(0.4, bl.L1(lam.exp())), "steps": 250}
    whole = bl.hypergradient(SMOOTH, lam, TASK, **run).grad
    errors = [
        relative_error(bl.hypergradient(SMOOTH, lam, TASK, method=bl.Truncated(k), **run).grad, whole)
        for k in (5, 30, 150)
    ]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-8


def test_lasso_whose_penalty_is_large_enough_to_switch_everything_off():
    lam = torch.tensor(2.0)
    found = bl.hypergradient(SMOOTH, lam, TASK, dynamics=lambda lam: bl.ISTA(0.4, bl.L1(lam.exp())), steps=20)
    assert float(found.inner.abs().max()) == 0 and float(found.grad) == 0


def test_elastic_net_with_both_penalties_learned():
    lam = {"l1": torch.tensor(-3.0), "l2": torch.tensor(-1.5)}

    def fit(lam):
        l1, l2 = float(lam["l1"].exp()), float(lam["l2"].exp())
        return fitted("ElasticNet", *TASK.train, alpha=l1 + l2, l1_ratio=l1 / (l1 + l2))

    problem = bl.Problem(
        lambda w, lam, data: squares(w, lam, data) + 0.5 * lam["l2"].exp() * (w**2).sum(), squares, zeros(6)
    )
    expected = differences(lambda lam: held_out(fit(lam)), lam)
    agree(
        expected,
        problem,
        lam,
        TASK,
        dynamics=lambda lam: bl.ISTA(0.4, bl.L1(lam["l1"].exp())),
        steps=250,
        methods=AT_THE_LIMIT,
    )


def test_lasso_with_a_penalty_for_each_of_ten_features_over_three_decades():
    task, lam = regression(40, 10, seed=2), torch.linspace(-7.0, -0.5, 10)

    def fit(lam):  # the plain lasso in w·λ, on columns divided by λ
        return fitted("Lasso", task.train[0] / lam.exp(), task.train[1], alpha=1.0) / lam.exp()

    expected = differences(lambda lam: held_out(fit(lam), task.val), lam)
    problem = bl.Problem(squares, squares, zeros(10))
    agree(
        expected,
        problem,
        lam,
        task,
        dynamics=lambda lam: bl.ISTA(0.4, bl.L1(lam.exp())),
        steps=400,
        methods=AT_THE_LIMIT,
    )


def test_lasso_whose_coefficients_are_positive():
    @dataclass(frozen=True)
    class PositiveL1(bl.Penalty):
        strength: Any

        def value(self, w, t=1):
            return (self.strength * w).sum()

        def prox(self, w, step, t=1):
            return torch.relu(w - step * self.strength)

    lam = torch.tensor(-3.0)
    fit = lambda lam: fitted("Lasso", *TASK.train, alpha=float(lam.exp()), positive=True)  # noqa: E731
    assert 0 < int((fit(lam) == 0).sum()) < 6
    agree(
        differences(lambda lam: held_out(fit(lam)), lam),
        SMOOTH,
        lam,
        TASK,
        dynamics=lambda lam: bl.ISTA(0.4, PositiveL1(lam.exp())),
        steps=250,
        methods=AT_THE_LIMIT,
    )


def test_lasso_judged_by_steins_unbiased_risk_estimate():
    """Two lassos, one of them on slightly moved data, give the degrees of freedom by a finite difference."""
    (x, y), noise, width = TASK.train, 0.3, 0.05
    probe = torch.randn(len(y), generator=torch.Generator().manual_seed(3))

    def risk(w):
        freedom = (probe * (x @ w["moved"] - x @ w["plain"])).sum() / width
        return ((y - x @ w["plain"]) ** 2).mean() + 2 * noise**2 * freedom / len(y)

    def fit(lam):
        alpha = float(lam.exp())
        return {
            "plain": fitted("Lasso", x, y, alpha=alpha),
            "moved": fitted("Lasso", x, y + width * probe, alpha=alpha),
        }

    problem = bl.Problem(
        lambda w, lam, data: squares(w["plain"], lam, (x, y)) + squares(w["moved"], lam, (x, y + width * probe)),
        lambda w, lam, data: risk(w),
        lambda lam: {"plain": torch.zeros(6), "moved": torch.zeros(6)},
    )
    lam = torch.tensor(-2.5)
    agree(
        differences(lambda lam: risk(fit(lam)), lam),
        problem,
        lam,
        dynamics=lambda lam: bl.ISTA(0.4, bl.L1(lam.exp())),
        steps=250,
        methods=AT_THE_LIMIT,
    )


def logistic(w, lam, data):
    return torch.nn.functional.softplus(-(2 * data[1] - 1) * (data[0] @ w)).mean()


def sparse_logistic(x, labels, penalty):
    """The minimiser of the logistic loss + penalty·‖w‖₁: scikit-learn finds support and signs, Newton the digits."""
    strength = float(penalty.detach())
    model = linear_model.LogisticRegression(
        C=1 / (strength * len(x)), l1_ratio=1, solver="saga", fit_intercept=False, tol=1e-10, max_iter=100_000
    )
    rough = torch.as_tensor(model.fit(x.numpy(), labels.numpy()).coef_[0])
    support = rough.abs() > 1e-6
    signs = rough.sign()[support]

    def on_the_support(w, penalty):
        return logistic(w, None, (x[:, support], labels)) + penalty * (signs * w).sum()

    w = minimiser(on_the_support, rough[support], penalty)
    return torch.zeros_like(rough).index_put((support,), w)


def test_sparse_logistic_regression():
    task, lam = classification(60, 6, seed=1), torch.tensor(-2.7)
    expected = slope(lambda lam: logistic(sparse_logistic(*task.train, lam.exp()), None, task.val), lam)
    problem = bl.Problem(logistic, logistic, zeros(6))
    found = bl.hypergradient(problem, lam, task, dynamics=lambda lam: bl.ISTA(4.0, bl.L1(lam.exp())), steps=400).inner
    assert 0 < int((found == 0).sum()) < 6
    agree(
        expected,
        problem,
        lam,
        task,
        dynamics=lambda lam: bl.ISTA(4.0, bl.L1(lam.exp())),
        steps=400,
        methods=AT_THE_LIMIT,
    )


def test_one_sparse_classifier_for_each_class_with_its_own_penalty():
    task, lam = classification(60, 5, 3, seed=1), torch.tensor([-2.6, -3.0, -3.4])

    def loss(w, lam, data):  # one column of w for each class against the others
        return sum(logistic(w[:, c], None, (data[0], (data[1] == c).long())) for c in range(3))

    def fit(lam):
        x, y = task.train
        columns = [sparse_logistic(x, (y == c).long(), strength) for c, strength in enumerate(lam.exp())]
        return torch.stack(columns, dim=1)

    agree(
        slope(lambda lam: loss(fit(lam), None, task.val), lam),
        bl.Problem(loss, loss, zeros(5, 3)),
        lam,
        task,
        dynamics=lambda lam: bl.ISTA(4.0, bl.L1(lam.exp())),
        steps=400,
        methods=AT_THE_LIMIT,
    )


def test_lasso_judged_by_five_fold_cross_validation():
    folds, lam = bl.CrossValidation(TASK.train, folds=5).tasks, torch.tensor(-2.5)
    fit = lambda task, lam: fitted("Lasso", *task.train, alpha=float(lam.exp()))  # noqa: E731
    expected = differences(lambda lam: sum(held_out(fit(task, lam), task.val) for task in folds) / 5, lam)
    agree(
        expected,
        SMOOTH,
        lam,
        folds,
        dynamics=lambda lam: bl.ISTA(0.4, bl.L1(lam.exp())),
        steps=300,
        methods=(bl.Reverse(), bl.Forward(), bl.Implicit()),
    )


def test_group_lasso():
    """On orthonormal columns a group's coefficients are z·(1 − λ/‖z‖)₊ with z = Xᵀy/n."""
    x = torch.linalg.qr(TASK.train[0])[0] * 30**0.5
    task, lam, groups = bl.Task((x, TASK.train[1]), TASK.val), torch.tensor([-2.0, -3.0, -0.5]), (0, 0, 1, 1, 2, 2)

    def fit(lam):
        z = (x.T @ task.train[1] / 30).reshape(3, 2)
        return (z * torch.relu(1 - lam.exp() / z.norm(dim=1))[:, None]).reshape(6)

    assert int((fit(lam) == 0).sum()) == 2
    agree(
        slope(lambda lam: held_out(fit(lam)), lam),
        SMOOTH,
        lam,
        task,
        dynamics=lambda lam: bl.ISTA(0.4, bl.GroupL2(lam.exp(), groups)),
        steps=150,
        methods=AT_THE_LIMIT,
    )


def test_lasso_of_several_targets_that_share_their_features():
    x, generator = TASK.train[0], torch.Generator().manual_seed(5)
    y = torch.stack([TASK.train[1], TASK.train[1] + 0.3 * torch.randn(30, generator=generator)], dim=1)
    task = bl.Task((x, y), (TASK.val[0], TASK.val[1][:, None].expand(-1, 2)))
    error = lambda w, lam, data: 0.5 * ((data[0] @ w - data[1]) ** 2).sum(1).mean()  # noqa: E731
    fit = lambda lam: fitted("MultiTaskLasso", x, y, alpha=float(lam.exp())).T  # noqa: E731
    lam = torch.tensor(-1.5)
    assert 0 < int((fit(lam).norm(dim=1) == 0).sum()) < 6
    agree(
        differences(lambda lam: error(fit(lam), None, task.val), lam),
        bl.Problem(error, error, zeros(6, 2)),
        lam,
        task,
        dynamics=lambda lam: bl.ISTA(0.4, bl.GroupL2(lam.exp(), tuple(range(6)))),
        steps=250,
        methods=AT_THE_LIMIT,
    )


def test_sparse_coding_with_a_learned_dictionary():
    generator = torch.Generator().manual_seed(7)
    signals, dictionary = torch.randn(4, 6, generator=generator), torch.randn(6, 5, generator=generator)
    rebuild = lambda code, lam: 0.5 * ((code @ lam.T - signals) ** 2).sum()  # noqa: E731

    def fit(lam):
        return torch.stack([fitted("Lasso", lam, signal, alpha=0.4 / 6) for signal in signals])

    assert 0 < int((fit(dictionary) == 0).sum()) < 20
    agree(
        differences(lambda lam: rebuild(fit(lam), lam), dictionary),
        bl.Problem(lambda w, lam, data: rebuild(w, lam), lambda w, lam, data: rebuild(w, lam), zeros(4, 5)),
        dictionary,
        dynamics=bl.ISTA(0.06, bl.L1(0.4)),
        steps=1000,
        methods=(bl.Reverse(), bl.Implicit(bl.Direct())),
    )


def test_denoising_of_a_matrix_of_low_rank():
    """min ½‖W − Y‖² + λ‖W‖_* has singular values (s − λ)₊."""

    @dataclass(frozen=True)
    class Nuclear(bl.Penalty):
        strength: Any

        def value(self, w, t=1):
            return self.strength * torch.linalg.matrix_norm(w, "nuc")

        def prox(self, w, step, t=1):
            u, s, v = torch.linalg.svd(w, full_matrices=False)
            return u @ torch.diag(torch.relu(s - step * self.strength)) @ v

    generator = torch.Generator().manual_seed(8)
    noisy, clean = torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)
    lam = torch.tensor(0.3)

    def fit(lam):
        u, s, v = torch.linalg.svd(noisy, full_matrices=False)
        return u @ torch.diag(torch.relu(s - lam.exp())) @ v

    assert int(torch.linalg.matrix_rank(fit(lam))) in (1, 2, 3)
    problem = bl.Problem(
        lambda w, lam, data: 0.5 * ((w - noisy) ** 2).sum(),
        lambda w, lam, data: ((w - clean) ** 2).mean(),
        lambda lam: torch.eye(5, 4),
    )
    agree(
        slope(lambda lam: ((fit(lam) - clean) ** 2).mean(), lam),
        problem,
        lam,
        dynamics=lambda lam: bl.ISTA(0.5, Nuclear(lam.exp())),
        steps=60,
        methods=(bl.Unrolled(), bl.Reverse(), bl.Implicit()),
    )


def test_a_penalty_of_zero_is_least_squares():
    x, y = TASK.train
    found = bl.hypergradient(SMOOTH, torch.tensor(0.0), TASK, dynamics=lambda lam: bl.ISTA(0.4, bl.L1(lam)), steps=300)
    close(found.inner, torch.linalg.lstsq(x, y[:, None]).solution[:, 0], 1e-9)
