"""Linear heads against closed forms and other solvers; the battery compares their hypergradients with differences."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from sklearn.linear_model import ElasticNet, LogisticRegression

import bilevel as bl
from bilevel import learners
from bilevel.learners.catalogue.logistic_head import LogisticHead
from bilevel.learners.catalogue.proximal_head import ProximalHead
from bilevel.learners.catalogue.ridge_head import BIAS, RidgeHead
from bilevel.learners.catalogue.svm_head import SvmHead
from bilevel.learners.linear_head import PENALTY, SCALE, of_unit_curvature, row_weights
from bilevel.testing.learners import episodes, small

HEADS = ["ridge-head", "logistic-head", "svm-head", "proximal-head"]


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data(learner, ways=3, shots=4, count=2, seed=0):
    """Features of two episodes with the constant one at the end, and labels."""
    generator = torch.Generator().manual_seed(seed)
    size = learner.features - 1
    means = torch.randn(count, ways, 1, size, generator=generator)
    features = (means + torch.randn(count, ways, shots, size, generator=generator)).flatten(1, 2)
    labels = torch.arange(ways).repeat_interleave(shots).expand(count, -1)
    return F.pad(features, (0, 1), value=1.0), labels


def fitted(learner, features, labels):
    """The classifiers of features, and the features as the learner scales them."""
    ways = int(labels.max()) + 1
    support, _ = learner.prepared(learner.lam, features, features, labels, ways)
    with torch.no_grad():
        return learner.weights(learner.lam, support, labels, ways), support


@pytest.mark.parametrize("shots", [2, 20])  # fewer examples than features, and more
def test_ridge_is_the_closed_form(shots):
    learner = small(RidgeHead, penalty=0.7)
    learner.lam[BIAS].fill_(2.0)
    features, labels = data(learner, shots=shots)
    found, support = fitted(learner, features, labels)
    assert torch.equal(support[..., -1], torch.full_like(support[..., -1], 2.0))
    for X, y, W in zip(support.numpy(), labels.numpy(), found.numpy(), strict=True):
        expected = np.linalg.solve(X.T @ X + 0.7 * np.eye(X.shape[1]), X.T @ np.eye(3)[y])
        np.testing.assert_allclose(W, expected, rtol=1e-8, atol=1e-10)


def test_ridge_weights_classes_equally():
    learner = small(RidgeHead, penalty=0.7)
    features, labels = data(learner)
    rows = [0, 1, 2, 3, 4, 8, 9]  # four, one and two images
    found, support = fitted(learner, features[:, rows], labels[:, rows])
    X, y = support[0].numpy(), labels[0, rows].numpy()
    S = np.diag(7 / 3 / np.bincount(y)[y])
    expected = np.linalg.solve(X.T @ S @ X + 0.7 * np.eye(X.shape[1]), X.T @ S @ np.eye(3)[y])
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-8, atol=1e-10)


def test_logistic_is_that_of_scikit_learn():
    learner = small(LogisticHead, penalty=0.05)
    features, labels = data(learner)
    found, support = fitted(learner, features, labels)
    for X, y, W in zip(support.numpy(), labels.numpy(), found.numpy(), strict=True):
        other = LogisticRegression(C=1 / (0.05 * len(y)), fit_intercept=False, tol=1e-12, max_iter=10_000).fit(X, y)
        np.testing.assert_allclose(W.T, other.coef_, atol=1e-6)


def test_certificates_hold_for_the_logistic_head():
    learner = small(LogisticHead, penalty=0.5)
    features, labels = data(learner, shots=2)
    problem, lam = learner.problem(2, 3, 6, encoded=True), {name: learner.lam[name] for name in (SCALE, PENALTY)}
    task = bl.Task((features, labels), (features, labels, features, labels))
    with torch.no_grad():
        w = learner.weights(learner.lam, features, labels, 3)
    lr = 1 / (float(torch.linalg.matrix_norm(features, 2).max()) ** 2 / 6 + 0.5)
    settings = {"dynamics": bl.GradientDescent(lr), "steps": 200, "method": bl.Implicit()}
    found = bl.certify(problem, lam, task, mu=0.5, **settings)
    reached = bl.hypergradient(problem, lam, task, **settings).inner
    assert found.applies
    assert float((reached - w).norm()) <= found.inner_distance < 1e-3


def test_svm_is_the_quadratic_program():
    learner = small(SvmHead, penalty=0.5, smoothing=0.2)
    features, labels = data(learner, shots=2)
    found, support = fitted(learner, features, labels)
    for X, y, W in zip(support.numpy(), labels.numpy(), found.numpy(), strict=True):
        n, C, Y = len(y), 2.0, np.eye(3)[y]
        assert np.linalg.eigvalsh(X @ X.T)[-1] == pytest.approx(n)
        kernel = X @ X.T + 0.2 * np.eye(n)

        def dual(a, kernel=kernel, Y=Y):  # alpha of Crammer and Singer
            a = a.reshape(Y.shape)
            return np.sum(a * (kernel @ a)) / 2 - np.sum(a * Y), (kernel @ a - Y).ravel()

        sums = {
            "type": "eq",
            "fun": lambda a, Y=Y: a.reshape(Y.shape).sum(1),
            "jac": lambda a, Y=Y: np.kron(np.eye(len(Y)), np.ones(Y.shape[1])),
        }
        bounds = [(None, C * same) for same in Y.ravel()]
        options = {"maxiter": 1000, "ftol": 1e-14}
        other = minimize(
            dual, np.zeros(Y.size), jac=True, bounds=bounds, constraints=sums, method="SLSQP", options=options
        )
        assert other.success
        np.testing.assert_allclose(W, X.T @ other.x.reshape(Y.shape), atol=1e-5)


def test_svm_without_smoothing_keeps_its_margins():
    """With a large C and hardly any smoothing, separable classes have margins of 1 at least, and some of exactly 1."""
    learner = small(SvmHead, penalty=1e-4, smoothing=1e-6)
    features, labels = data(learner, shots=2)
    found, support = fitted(learner, features, labels)
    logits = torch.bmm(support, found)
    right = logits.gather(2, labels[..., None])
    margins = (right - logits).masked_fill(F.one_hot(labels, 3).bool(), torch.inf).amin(2)
    assert margins.min() == pytest.approx(1, abs=1e-3)


def test_the_face_of_the_svm_is_the_fixed_point_of_projected_steps():
    value, grads = small(SvmHead).hypergradient(episodes())
    steps = small(SvmHead, method=bl.Implicit(bl.Direct()))
    steps.inner_steps = 1000
    other, expected = steps.hypergradient(episodes())
    assert torch.allclose(value, other, rtol=1e-12)
    assert all(torch.allclose(grads[name], expected[name], rtol=1e-8, atol=1e-11) for name in grads)


@pytest.mark.parametrize("l2", [0.01, 0.3])
def test_proximal_is_the_elastic_net_of_scikit_learn(l2):
    learner = small(ProximalHead, penalty=0.02, l2=l2)
    features, labels = data(learner)
    found, support = fitted(learner, features, labels)
    assert 0 < int((found == 0).sum()) < found.numel()
    for X, y, W in zip(support.numpy(), labels.numpy(), found.numpy(), strict=True):
        settings = {"alpha": 0.02 + l2, "l1_ratio": 0.02 / (0.02 + l2), "fit_intercept": False, "tol": 1e-12}
        other = ElasticNet(max_iter=100_000, **settings).fit(X, np.eye(3)[y])
        np.testing.assert_allclose(W.T, other.coef_, atol=1e-7)


def test_the_active_set_of_the_proximal_head_is_the_fixed_point_of_proximal_steps():
    value, grads = small(ProximalHead).hypergradient(episodes())
    steps = small(ProximalHead, method=bl.Implicit(bl.Direct()))
    steps.inner_steps = 4000
    other, expected = steps.hypergradient(episodes())
    assert torch.allclose(value, other, rtol=1e-9)
    assert all(torch.allclose(grads[name], expected[name], rtol=1e-6, atol=1e-8) for name in grads)


def test_unit_curvature_is_what_the_name_says():
    features, labels = (
        torch.randn(3, 6, 4) * torch.tensor([1.0, 10.0, 0.1])[:, None, None],
        torch.tensor([[0] * 5 + [1]]),
    )
    weights = row_weights(labels, 2).expand(3, 6)
    support, queries = of_unit_curvature(features, 2 * features, weights)
    hessian = support.mT @ (support * weights[..., None]) / 6
    assert torch.allclose(torch.linalg.eigvalsh(hessian)[:, -1], torch.ones(3))
    assert torch.allclose(queries, 2 * support)


@pytest.mark.parametrize("name", HEADS)
def test_normalised_features_and_other_batch_norms(name):
    kind = learners.get(name)
    plain = small(kind, batch_norm="support").hypergradient(episodes())[0]
    learner = small(kind, batch_norm="support", normalise=True)
    value, grads = learner.hypergradient(episodes())
    assert value != plain
    assert all(bool(grads[leaf].any()) for leaf in (SCALE, PENALTY, "normalised.centre"))


@pytest.mark.parametrize("name", HEADS)
def test_float32_images_are_solved_in_double_precision(name):
    batch = episodes()
    exact = small(learners.get(name)).hypergradient(batch)
    single = bl.Task(*((images.float(), labels) for images, labels in (batch.train, batch.val)))
    learner = small(learners.get(name))
    learner.lam = {leaf: value.float() for leaf, value in learner.lam.items()}
    learner.module.float()
    value, grads = learner.hypergradient(single)
    assert value.dtype == torch.float32 and all(grad.dtype == torch.float32 for grad in grads.values())
    assert float(value) == pytest.approx(float(exact[0]), rel=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_settings_that_must_be_positive(name):
    with pytest.raises(bl.BilevelError, match=r"penalty=0\.0 must be above 0"):
        small(learners.get(name), penalty=0.0)
