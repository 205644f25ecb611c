"""Linear models at given penalties: they are minimisers, and scikit-learn's where all penalties are equal."""

import numpy as np
import pytest
from sklearn import linear_model

from bilevel.tabular.penalised import minimise


@pytest.fixture
def data():
    draw = np.random.default_rng(0)
    X = draw.normal(size=(60, 4)) + np.array([0, 1, -2, 0.5])
    y = X @ np.array([1.0, -2.0, 0.0, 0.1]) + 3 + draw.normal(size=60)
    return X, y, draw.uniform(0.5, 2.0, 60)


PENALTY = np.array([0.3, 2.0, 40.0, 1e-3])


@pytest.mark.parametrize("weighted", [False, True])
def test_ridge(data, weighted):
    X, y, weights = data
    weights = weights if weighted else None
    w, b = minimise("ridge", X, y, PENALTY, weights)
    s = np.ones(60) if weights is None else weights
    residual = y - X @ w[0] - b
    assert np.allclose(X.T @ (s * residual), PENALTY * w[0], atol=1e-9) and abs(s @ residual) < 1e-9
    same, b = minimise("ridge", X, y, np.full(4, 7.0), weights)
    theirs = linear_model.Ridge(7.0).fit(X, y, weights)
    assert np.allclose(same[0], theirs.coef_, rtol=1e-9) and b == pytest.approx(theirs.intercept_)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_elastic_net(data, weighted, ratio):
    X, y, weights = data
    weights = weights if weighted else None
    penalty = np.array([0.1, 0.5, 5.0, 0.01])
    w, b = minimise("elastic-net", X, y, penalty, weights, ratio)
    s = np.full(60, 1 / 60) if weights is None else weights / weights.sum()
    slope = X.T @ (s * (y - X @ w[0] - b)) - (1 - ratio) * penalty * w[0]
    off = w[0] == 0
    assert off.tolist() == [False, False, True, False]
    assert np.allclose(slope[~off], (ratio * penalty * np.sign(w[0]))[~off], atol=1e-6)
    assert (np.abs(slope[off]) <= ratio * penalty[off]).all()
    same, b = minimise("elastic-net", X, y, np.full(4, 0.3), weights, ratio)
    theirs = linear_model.ElasticNet(alpha=0.3, l1_ratio=ratio, tol=1e-12, max_iter=100_000).fit(X, y, weights)
    assert np.allclose(same[0], theirs.coef_, atol=1e-7) and b == pytest.approx(theirs.intercept_)


@pytest.mark.parametrize("weighted", [False, True])
def test_two_classes(data, weighted):
    X, y, weights = data
    weights = weights if weighted else None
    labels = (y > np.median(y)).astype(int)
    w, b = minimise("logistic", X, labels, PENALTY, weights)
    s = np.ones(60) if weights is None else weights
    surprise = s * (labels - 1 / (1 + np.exp(-(X @ w[0] + b))))
    assert w.shape == (1, 4) and np.allclose(X.T @ surprise, PENALTY * w[0], atol=1e-4) and abs(surprise.sum()) < 1e-4


def test_three_classes(data):
    X, y, _ = data
    labels = np.digitize(y, np.quantile(y, [1 / 3, 2 / 3]))
    w, b = minimise("logistic", X, labels, PENALTY, None)
    scores = np.exp(X @ w.T + b)
    surprise = np.eye(3)[labels] - scores / scores.sum(1, keepdims=True)
    assert w.shape == (3, 4) and np.allclose(surprise.T @ X, PENALTY * w, atol=1e-4)
