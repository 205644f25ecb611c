"""Three inner problems whose minimisers are computed without the certificate, so that it can be compared with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import bilevel as bl
from bilevel import trees
from bilevel.experiments import ridge
from bilevel.experiments._feature_map import draw_data, feature_map, minimiser
from bilevel.experiments.base import described, single_precision
from bilevel.learners import library
from bilevel.learners.streams import episodes, open_data
from bilevel.trees import Tree


@dataclass(frozen=True)
class KnownProblem:
    """A problem at one λ, with its minimiser, its value and its hypergradient.

    Attributes:
        name: a short name.
        title: what it is.
        lr: η of gradient descent.
        mu: the modulus of strong convexity, if it is known; None: the certificate computes it.
        w: w_λ.
        value: f(λ).
        grad: ∇f(λ).
        unrolled: the method for ∇f_T.
        source: where μ and the truth come from, as a sentence.
        data: the data set's name and description; empty for generated data.
    """

    name: str
    title: str
    problem: bl.Problem
    lam: Tree
    task: bl.Task
    lr: float
    mu: float | None
    w: Tensor
    value: float
    grad: Tree
    unrolled: bl.Method
    source: str
    data: tuple[str, str] | None = None

    @property
    def dynamics(self) -> bl.GradientDescent:
        return bl.GradientDescent(self.lr)


def ridge_problem(seed: int, log_penalty: float) -> KnownProblem:
    """Appendix C: ridge regression with a penalty per feature."""
    data = ridge.draw_data(ridge.RidgeSettings(), seed)
    lam = torch.full((data.train[0].shape[1],), log_penalty, dtype=torch.float64)
    task, dynamics = bl.Task(data.train, data.val), bl.GradientDescent(data.lr)
    truth = bl.hypergradient(ridge.ridge(data, None), lam, task, dynamics=dynamics, steps=0)
    return KnownProblem(
        "ridge",
        "ridge regression with a penalty per feature (Appendix C)",
        ridge.ridge(data, 1),
        lam,
        task,
        data.lr,
        None,
        truth.inner,
        float(truth.value),
        truth.grad,
        bl.Reverse(),
        "μ is found by the certificate's Lanczos, which is exact here: L is quadratic in 30 unknowns; w_λ, f and ∇f "
        "are the closed form and its derivative",
    )


def feature_map_problem(dataset: str, model: str, classes: int, rho: float, seed: int) -> KnownProblem:
    """Section 5.1: ridge regression on a linear map of a network's features, at H = I."""
    data = draw_data(dataset, model, classes, (3, 3, 14), seed)
    h = data.start()
    lr = 1 / data.curvature(h, rho)
    exact = feature_map(data, rho, exact=True)
    truth = bl.hypergradient(exact, h, data.task, dynamics=bl.GradientDescent(lr), steps=0)
    return KnownProblem(
        "feature map",
        f"linear feature map below ridge regression, {classes} classes of {data.name} (Section 5.1)",
        feature_map(data, rho),
        h,
        data.task,
        lr,
        rho,
        minimiser(h, data.train, rho),
        float(truth.value),
        truth.grad,
        bl.Spectral(),
        "μ = ρ is given (Example 3.1); w_H, f and ∇f are the closed form and its derivative; ∇f_T is Spectral's, equal "
        "to Reverse's",
        (data.name, data.description),
    )


def head_problem(dataset: str, model: str, l2: float, seed: int) -> KnownProblem:
    """Section 4: the logistic head of one few-shot episode, λ the network's weights."""
    with single_precision():
        trained = library.find(model)
        source = open_data(replace(trained.settings, dataset=dataset))
        if dataset == trained.settings.dataset:
            trained.check_data(source)
        task = episodes(trained.settings, source, "test", seed).batch([0])
    learner = trained.learner
    learner.l2 = l2
    lam = {name: weight.double() for name, weight in learner.lam.items()}
    ways = trained.settings.ways
    problem = learner.problem(1, ways)
    encode = problem.encode
    assert encode is not None  # a hyper-representation has one by definition
    with torch.no_grad():
        known, labels = encode(lam, task).train
    w = head_minimiser(known[0], labels[0], ways, l2)[None]
    # At the minimiser the implicit function theorem gives ∇f itself.
    implicit = bl.Implicit(bl.CG(tol=1e-14))
    truth = bl.hypergradient(problem, lam, task, dynamics=learner.dynamics, steps=0, start=w, method=implicit)
    return KnownProblem(
        "few-shot head",
        f"logistic head of a {ways}-way {trained.settings.shots}-shot episode of {source.name} (Section 4)",
        problem,
        lam,
        task,
        learner.inner_lr,
        l2,
        w,
        float(truth.value),
        trees.map(lambda part: part.clone(), truth.grad),
        bl.Reverse(),
        "μ = l2 is given and holds everywhere, because cross-entropy is convex; w_λ is Newton's solution of the dual "
        "problem, a number per example and class, and ∇f the implicit gradient there",
        (source.name, described(source)),
    )


def head_minimiser(features: Tensor, labels: Tensor, ways: int, l2: float) -> Tensor:
    """argmin_w of the mean cross-entropy + l2/2 ‖w‖² over heads w, to rounding.

    w = Φᵀa at the minimum, so that Newton's method has only a number per example and class to find: with P the
    probabilities, ∇L = Φᵀ(P − Y)/n + l2 w = 0 means F(a) = (P(K a) − Y)/n + l2 a = 0, K = ΦΦᵀ.
    """
    count = len(features)
    kernel = features @ features.T
    one_hot = torch.nn.functional.one_hot(labels, ways).to(features)
    a = torch.zeros_like(one_hot)

    def residual(a: Tensor) -> Tensor:
        return ((kernel @ a).softmax(1) - one_hot) / count + l2 * a

    best = float(residual(a).norm())
    for _ in range(100):
        jacobian: Tensor = torch.autograd.functional.jacobian(residual, a)  # type: ignore[no-untyped-call]
        step = torch.linalg.solve(jacobian.reshape(a.numel(), -1), residual(a).flatten()).view_as(a)
        length = 1.0
        while length > 1e-6 and not float(residual(a - length * step).norm()) < best:
            length /= 2
        if length <= 1e-6:  # rounding is reached
            break
        a = a - length * step
        best = float(residual(a).norm())
    return features.T @ a
