"""The search for the signs of a quadratic with an L1 penalty: optimality conditions, and scikit-learn's minimiser."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import ElasticNet

from bilevel.methods.linear_models._feature_signs import feature_sign_search
from bilevel.methods.linear_models.active_set import _Nets


def quadratic(rows, features, seed=0):
    """Correlated features, which coordinate descent needs many sweeps for."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features)) + 2 * rng.normal(size=(rows, 1))
    y = X[:, :3] @ [3.0, -2.0, 2.0] + rng.normal(size=rows)
    return X - X.mean(0), y - y.mean()


def violation(matrix, linear, l1, w, positive):
    """How far w is from the optimality conditions, relative to the largest slope at zero."""
    slope, on = linear - matrix @ w, w != 0
    inside = np.abs(slope - l1 * np.sign(w))[on].max(initial=0)
    outside = ((slope if positive else np.abs(slope)) - l1)[~on].max(initial=0)
    return max(inside, outside) / np.abs(linear).max()


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("size", [(60, 20), (20, 60)], ids=str)
def test_the_conditions_of_a_minimiser_hold_from_any_start(size, ratio, positive):
    X, y = quadratic(*size)
    rng = np.random.default_rng(1)
    gram, linear = X.T @ X / len(y), X.T @ y / len(y)
    for strength in (10.0, 1.0, 0.1, 1e-3):
        alpha = strength * np.exp(rng.normal(size=size[1]))
        matrix, l1 = gram + np.diag((1 - ratio) * alpha), ratio * alpha
        for start in (np.zeros(size[1]), rng.normal(size=size[1])):
            w = feature_sign_search(matrix, linear, l1, start, positive)
            assert violation(matrix, linear, l1, w, positive) < 1e-9
            assert not positive or w.min() >= 0
            assert ((w == 0).sum() > 0) or strength < 0.1


def test_it_is_scikit_learns_minimiser():
    X, y = quadratic(80, 12)
    rival = ElasticNet(0.3, l1_ratio=0.7, fit_intercept=False, tol=1e-13, max_iter=100_000).fit(X, y)
    matrix = X.T @ X / 80 + 0.3 * 0.3 * np.eye(12)
    found = feature_sign_search(matrix, X.T @ y / 80, np.full(12, 0.3 * 0.7), np.zeros(12))
    np.testing.assert_allclose(found, rival.coef_, atol=1e-8)


def test_a_working_set_and_singular_systems_end_at_minimisers(monkeypatch):
    monkeypatch.setattr("bilevel.methods.linear_models.active_set.WORKING", 5)
    X, y = quadratic(20, 60)
    gram, linear = torch.from_numpy(X.T @ X / 20)[None], torch.from_numpy(X.T @ y / 20)[None, None]
    for strength in (1.0, 1e-2, 1e-3):
        l1 = torch.full((1, 1, 60), strength, dtype=torch.float64)
        w, _ = _Nets(gram, linear, l1, torch.zeros(60, dtype=torch.float64)).minimise(torch.ones_like(l1))
        found = [part.numpy() for part in (gram[0], linear[0, 0], l1[0, 0], w[0, 0])]
        assert violation(*found, False) < 1e-8
        assert int((w != 0).sum()) <= 20
