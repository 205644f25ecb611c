"""Support vector machines in their duals, with learned costs, tubes and kernels.

The references solve the optimality conditions on the active set.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from comparing import Within, agree, classification, descent_rate, quadratic_program, regression, slope, squares, zeros
from torch.nn.functional import one_hot, softplus

import bilevel as bl

STEPS = (bl.Unrolled(), bl.Reverse(), bl.Forward())
LIMIT = (*STEPS, bl.Implicit(bl.FixedPoint(tol=1e-12)), bl.Implicit(bl.Direct()))


def kernel(x, z, width=1.5):
    return torch.exp(-(torch.cdist(x, z) ** 2) / (2 * width**2))


def test_support_vector_machine_with_a_learned_cost():
    """min ½aᵀQa − Σa with 0 ≤ a ≤ C, where Q = yyᵀK."""
    (x, labels), (z, truth) = classification(12).train, classification(12).val
    y, truth = 2.0 * labels - 1, 2.0 * truth - 1
    q = y[:, None] * y * (kernel(x, x) + 0.2 * torch.eye(12))
    judge = lambda a: softplus(-truth * (kernel(z, x) @ (y * a))).mean()  # noqa: E731
    lam = torch.tensor(0.1)
    fit = lambda lam: quadratic_program(  # noqa: E731
        q, torch.ones(12), lambda a: a.clamp(torch.zeros(()), lam.detach().exp()), high=lam.exp()
    )
    assert 0 < int((fit(lam) == lam.exp()).sum()) < 12
    problem = bl.Problem(lambda a, lam, data: 0.5 * a @ q @ a - a.sum(), lambda a, lam, data: judge(a), zeros(12))
    agree(
        slope(lambda lam: judge(fit(lam)), lam),
        problem,
        lam,
        dynamics=lambda lam: bl.ISTA(descent_rate(q), Within(lambda a: a.clamp(torch.zeros(()), lam.exp()))),
        steps=600,
        methods=LIMIT,
    )


def test_support_vector_machine_with_a_learned_kernel_width():
    (x, labels), (z, truth) = classification(12).train, classification(12).val
    y, truth = 2.0 * labels - 1, 2.0 * truth - 1
    q = lambda lam: y[:, None] * y * (kernel(x, x, lam.exp()) + 0.2 * torch.eye(12))  # noqa: E731
    judge = lambda a, lam: softplus(-truth * (kernel(z, x, lam.exp()) @ (y * a))).mean()  # noqa: E731
    clip = lambda a: a.clamp(0, 1)  # noqa: E731
    lam = torch.tensor(0.4)
    problem = bl.Problem(
        lambda a, lam, data: 0.5 * a @ q(lam) @ a - a.sum(), lambda a, lam, data: judge(a, lam), zeros(12)
    )
    agree(
        slope(lambda lam: judge(quadratic_program(q(lam), torch.ones(12), clip, high=1.0), lam), lam),
        problem,
        lam,
        dynamics=bl.ISTA(descent_rate(q(lam)), Within(clip)),
        steps=600,
        methods=LIMIT,
    )


def test_support_vector_regression_with_learned_cost_and_width_of_the_tube():
    """min ½bᵀKb − yᵀb + ε‖b‖₁ with |b| ≤ C: soft thresholding, then clipping."""
    task = regression(12, 3)
    (x, y), (z, truth) = task.train, task.val
    k = kernel(x, x) + 0.3 * torch.eye(12)
    lam = {"cost": torch.tensor(-0.4), "tube": torch.tensor(-2.0)}

    @dataclass(frozen=True)
    class Tube(bl.Penalty):
        cost: torch.Tensor
        width: torch.Tensor

        def value(self, w, t=1):
            return self.width * w.abs().sum()

        def prox(self, w, step, t=1):
            return bl.L1(self.width).prox(w, step).clamp(-self.cost, self.cost)

    def fit(lam):
        cost, tube = lam["cost"].exp(), lam["tube"].exp()
        rough = torch.zeros(12)
        for _ in range(3000):
            rough = Tube(cost, tube).prox(rough - descent_rate(k) * (k @ rough - y), descent_rate(k)).detach()
        signs, inside = rough.sign(), (rough.abs() > 1e-7) & (rough.abs() < cost - 1e-7)
        fixed = torch.where(rough.abs() > 1e-7, signs * cost, torch.zeros(()))
        right = y[inside] - tube * signs[inside] - k[inside][:, ~inside] @ fixed[~inside]
        return fixed.index_put((inside,), torch.linalg.solve(k[inside][:, inside], right))

    b = fit(lam)
    zero, met = b == 0, b.abs() == lam["cost"].exp()
    assert zero.any() and met.any() and (~zero & ~met).any()
    judge = lambda b: ((kernel(z, x) @ b - truth) ** 2).mean()  # noqa: E731
    problem = bl.Problem(lambda b, lam, data: 0.5 * b @ k @ b - y @ b, lambda b, lam, data: judge(b), zeros(12))
    agree(
        slope(lambda lam: judge(fit(lam)), lam),
        problem,
        lam,
        dynamics=lambda lam: bl.ISTA(descent_rate(k), Tube(lam["cost"].exp(), lam["tube"].exp())),
        steps=600,
        methods=LIMIT,
    )


def test_support_vector_regression_whose_coefficients_are_shares():
    """min ½‖w‖² + C Σ(|Xw − y| − ε)₊ over w ≥ 0, Σw = 1: a dual with a singular Hessian in four kinds of variables."""
    task = regression(5, 3, seed=9)
    x, y = task.train
    tube, lam = 0.1, torch.tensor(-0.5)
    lift = torch.cat([x.T, -x.T, torch.eye(3), torch.ones(3, 1)], dim=1)  # w = lift · (a₊, a₋, g, m)
    q, c = lift.T @ lift, torch.cat([y - tube, -y - tube, torch.zeros(3), torch.ones(1)])
    low = torch.tensor([0.0] * 13 + [-math.inf])

    def highest(cost):
        return torch.cat([cost.expand(10), torch.full((4,), math.inf)])

    def project(v, cost):
        return torch.maximum(torch.minimum(v, highest(cost)), low)

    def fit(lam):
        v = quadratic_program(q, c, lambda v: project(v, lam.detach().exp()), low, highest(lam.exp()))
        return lift @ v

    w = fit(lam)
    assert float(w.sum()) == pytest.approx(1) and float(w.min()) > -1e-9

    def dual(v):
        return torch.cat([v["tube"], v["shares"], v["total"]])

    def split(v):
        return {"tube": v[:10], "shares": v[10:13], "total": v[13:]}

    problem = bl.Problem(
        lambda v, lam, data: 0.5 * ((lift @ dual(v)) ** 2).sum() - c @ dual(v),
        lambda v, lam, data: squares(lift @ dual(v), lam, data),
        lambda lam: split(torch.zeros(14)),
    )
    agree(
        slope(lambda lam: squares(fit(lam), None, task.val), lam),
        problem,
        lam,
        task,
        dynamics=lambda lam: bl.ISTA(descent_rate(q), Within(lambda v: split(project(dual(v), lam.exp())))),
        steps=1500,
        methods=(bl.Reverse(),),
        tolerance=1e-5,
    )


def test_support_vector_machine_of_several_classes_on_simplices():
    """min ½‖Xᵀ(Y − b)‖² − λ Σ b(1 − Y), every row of b on the simplex; the coefficients are Xᵀ(Y − b)/λ."""
    rows, classes = 6, 3
    task = classification(rows, 24, classes)
    x, y = task.train[0], one_hot(task.train[1], classes).double()
    lam = torch.tensor(2.5)
    q = torch.kron(x @ x.T, torch.eye(classes))
    sums = torch.kron(torch.eye(rows), torch.ones(1, classes))

    def fit(lam):
        c = q @ y.reshape(-1) + lam.exp() * (1 - y).reshape(-1)
        project = lambda b: bl.Simplex().project(b.reshape(rows, classes)).reshape(-1)  # noqa: E731
        return quadratic_program(q, c, project, a=sums, b=torch.ones(rows)).reshape(rows, classes)

    judge = lambda b, lam: torch.nn.functional.cross_entropy(  # noqa: E731
        task.val[0] @ (x.T @ (y - b)) / lam.exp(), task.val[1]
    )
    problem = bl.Problem(
        lambda b, lam, data: 0.5 * ((x.T @ (y - b)) ** 2).sum() - lam.exp() * (b * (1 - y)).sum(),
        lambda b, lam, data: judge(b, lam),
        lambda lam: torch.full((rows, classes), 1 / classes),
    )
    agree(
        slope(lambda lam: judge(fit(lam), lam), lam),
        problem,
        lam,
        dynamics=bl.ISTA(descent_rate(q), Within(bl.Simplex().project)),
        steps=800,
        methods=LIMIT,
    )
