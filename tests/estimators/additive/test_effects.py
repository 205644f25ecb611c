"""Effects, explanations, intervals and monotone curves of additive models."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import LinearConstraint, minimize

from bilevel.errors import BilevelError
from bilevel.estimators import BilevelAdditiveClassifier, BilevelAdditiveRegressor


def table(rows=150, seed=0):
    rng = np.random.default_rng(seed)
    X = pd.DataFrame({"a": rng.uniform(-2, 2, rows), "b": rng.normal(size=rows), "c": rng.choice(list("uvw"), rows)})
    truth = np.sin(2 * X["a"]) + 0.5 * X["a"] * X["b"] + (X["c"] == "u")
    X.loc[::9, "b"] = np.nan
    return X, truth.fillna(0).to_numpy() + 0.3 * rng.normal(size=rows)


@pytest.fixture(scope="module")
def fitted():
    X, y = table()
    return BilevelAdditiveRegressor(pairs=[("a", "b"), ("a", "c")]).fit(X, y), X, y


def test_shares_of_terms_add_up_to_the_prediction(fitted):
    model, X, _ = fitted
    for row in (X.iloc[[3]], X.iloc[4], X.iloc[[9]]):
        shares = model.explain(row)
        frame = row if isinstance(row, pd.DataFrame) else row.to_frame().T
        assert sum(shares.values()) == pytest.approx(model.predict(frame)[0], rel=1e-10)
    assert next(iter(shares)) == "(intercept)" and set(shares) == {"(intercept)", *model.terms_}
    with pytest.raises(BilevelError, match="one row"):
        model.explain(X)


def test_shares_add_up_to_the_scores_of_every_class(fitted):
    _, X, y = fitted
    model = BilevelAdditiveClassifier(pairs=0).fit(X, np.digitize(y, [-0.5, 0.8]))
    total = sum(model.explain(X.iloc[[5]]).values())
    np.testing.assert_allclose(total, model.decision_function(X.iloc[[5]])[0], rtol=1e-10)


def test_an_effect_on_its_grid_is_the_share_of_its_term(fitted):
    model, X, _ = fitted
    effect = model.effect("a", points=5)
    rows = X.iloc[[1] * 5].assign(a=effect.grid)
    shares = [model.explain(rows.iloc[[i]])["a"] for i in range(5)]
    np.testing.assert_allclose(effect.mean, shares, rtol=1e-10)
    surface = model.effect("a × b", points=7)
    rows = X.iloc[[1] * 7].assign(a=surface.grid[0][2], b=surface.grid[1])
    shares = [model.explain(rows.iloc[[i]])["a × b"] for i in range(7)]
    np.testing.assert_allclose(surface.mean[2], shares, rtol=1e-9, atol=1e-12)
    absent = model.explain(X.iloc[[9]])["b"]
    assert model.effect("b").missing[0] == pytest.approx(absent, rel=1e-9)


def test_bands_and_intervals_hold_what_they_promise():
    """The coverage of 95 % bands of a curve and of 90 % intervals of new targets, over 12 tables with skewed noise."""
    in_band, in_interval = [], []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        X = rng.uniform(-2, 2, size=(160, 3))
        y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.3 * (rng.exponential(size=160) - 1)
        model = BilevelAdditiveRegressor(pairs=0, max_iter=10).fit(X[:80], y[:80])
        effect = model.effect("x0")
        truth = np.sin(2 * effect.grid) - np.sin(2 * X[:80, 0]).mean()
        low, high = effect.band()
        in_band.append(((low <= truth) & (truth <= high)).mean())
        low, high = model.predict_interval(X[80:], 0.9).T
        in_interval.append(((low <= y[80:]) & (y[80:] <= high)).mean())
    assert 0.88 < np.mean(in_band) <= 1
    assert 0.86 < np.mean(in_interval) < 0.95


def test_a_standard_deviation_of_new_targets(fitted):
    model, X, _ = fitted
    mean, deviation = model.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, model.predict(X))
    assert 0.2 < deviation.mean() < 0.5
    far = model.predict(X.iloc[[0]].assign(a=20.0), return_std=True)[1]
    assert far[0] > 2 * deviation.mean()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_monotone_effect_is_monotone_everywhere_and_fits_best_among_them(sign):
    X, _ = table(100)
    y = sign * np.tanh(3 * X["a"]) + 0.5 * np.random.default_rng(1).normal(size=100)
    free = BilevelAdditiveRegressor(pairs=0).fit(X, y)
    model = BilevelAdditiveRegressor(pairs=0, monotone={"a": sign}).fit(X, y)
    rows = X.iloc[[0] * 3000].assign(a=np.linspace(-10, 10, 3000))
    slopes = np.diff(model.predict(rows))
    assert (sign * slopes >= -1e-12).all() and np.abs(slopes).max() > 1e-3
    assert (np.diff(free.predict(rows)) * sign < -1e-5).any()
    # Another solver finds no smaller penalised loss under the same constraints.
    features, goal = model._features(X), y.to_numpy() - y.mean()
    alpha = np.zeros(features.shape[1])
    for piece in model._pieces:
        alpha[piece.where] = model.penalties_[model.terms_[piece.term]][piece.kind]
    rises = sign * np.diff(model._features(X.iloc[[0] * 300].assign(a=np.linspace(-2.1, 2.1, 300))), axis=0)

    def loss(w):
        return 0.5 * ((goal - features @ w) ** 2).sum() + 0.5 * (alpha * w**2).sum()

    def slope(w):
        return features.T @ (features @ w - goal) + alpha * w

    other = minimize(loss, 0 * alpha, jac=slope, constraints=[LinearConstraint(rises, 0, np.inf)], method="SLSQP")
    assert loss(model._coef[0]) == pytest.approx(other.fun, rel=1e-3)
    assert loss(model._coef[0]) > loss(free._coef[0])


def test_a_monotone_log_odds():
    X, _ = table()
    chance = 1 / (1 + np.exp(-3 * np.tanh(3 * X["a"])))
    model = BilevelAdditiveClassifier(pairs=0, monotone={"a": 1}).fit(X, np.random.default_rng(1).random(150) < chance)
    slopes = np.diff(model.decision_function(X.iloc[[0] * 500].assign(a=np.linspace(-5, 5, 500))))
    assert (slopes >= -1e-12).all() and slopes.max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"monotone": {"c": 1}}, "categories"),
        ({"monotone": {"a": 2}}, "rising"),
        ({"monotone": {"z": 1}}, "not a column"),
        ({"monotone": {"a": 1}, "pairs": [("a", "b")]}, "monotone= and in pairs="),
        ({"pairs": "all"}, "pairs="),
        ({"tether": -1}, "tether="),
        ({"categorical": ["q"]}, "categorical"),
        ({"max_iter": 0}, "max_iter"),
        ({"tol": -1}, "tol="),
    ],
)
def test_settings_that_cannot_work_say_what_to_write(settings, sentence):
    X, y = table(60)
    with pytest.raises(BilevelError, match=sentence):
        BilevelAdditiveRegressor(**settings).fit(X, y)


def test_a_constant_column_has_no_effect_and_cannot_be_in_a_pair():
    X, y = table(60)
    X = X.assign(d=1.0)
    effect = BilevelAdditiveRegressor(pairs=0).fit(X, y).effect("d", points=7)
    assert effect.grid.shape == effect.mean.shape == effect.deviation.shape == (7,)
    assert not effect.mean.any() and effect.missing is None
    with pytest.raises(BilevelError, match="'d' is constant"):
        BilevelAdditiveRegressor(pairs=[("a", "d")]).fit(X, y)


def test_a_picture_has_a_panel_for_every_term(fitted):
    model, *_ = fitted
    figure = model.plot()
    titles = [axes.get_title() for axes in figure.axes]
    assert set(model.terms_) <= set(titles)
    pair = BilevelAdditiveRegressor(pairs=[("a", "b")]).fit(*table(60)).plot(["a × b"]).axes[0]
    assert [len(line.get_xdata()) for line in pair.lines] == [60]  # the rows, over the surface
    with pytest.raises(BilevelError, match="not a term"):
        model.plot(["q"])


@pytest.mark.parametrize("sign", [1, -1])
def test_an_effect_in_the_wrong_direction_becomes_constant(sign):
    X = pd.DataFrame(np.random.default_rng(0).normal(size=(120, 3)), columns=["a", "b", "c"])
    y = -3 * sign * X["a"] + np.tanh(3 * X["b"])
    model = BilevelAdditiveRegressor(pairs=0, monotone={"a": sign}).fit(X, y)
    assert np.ptp(model.effect("a").mean) < 1e-6
    assert (sign * np.diff(model.effect("a", points=1000).mean) >= -1e-12).all()


def test_effects_of_two_classes_are_those_of_the_second():
    X, y = table()
    model = BilevelAdditiveClassifier(pairs=0, max_iter=3).fit(X, y > 0.3)
    np.testing.assert_array_equal(model.effect("a", output=1).mean, model.effect("a").mean)
    with pytest.raises(BilevelError, match="output=0 has no effects"):
        model.effect("a", output=0)
    with pytest.raises(BilevelError, match="output=0 has no effects"):
        model.plot(output=0)
    three = BilevelAdditiveClassifier(pairs=0, max_iter=3).fit(X, np.digitize(y, [-0.5, 0.8]))
    np.testing.assert_array_equal(three.effect("a", output=2).mean, three.effect("a").mean)
    with pytest.raises(BilevelError, match="Pass an index from 0 to 2"):
        three.effect("a", output=3)


def test_intervals_of_more_coverage_than_rows_can_tell_are_refused():
    X, y = table(30)
    model = BilevelAdditiveRegressor(pairs=0).fit(X, y)
    model.predict_interval(X, 30 / 31)
    with pytest.raises(BilevelError, match=r"of 30 held-out rows\. Pass at most 0\.967"):
        model.predict_interval(X, 0.97)


def test_intervals_of_few_rows_include_the_uncertainty_of_the_penalties():
    inside = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(1030, 3))
        y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] ** 2 + X[:, 2] + 0.5 * rng.normal(size=1030)
        low, high = BilevelAdditiveRegressor().fit(X[:30], y[:30]).predict_interval(X[30:], 0.5).T
        inside.append(((low <= y[30:]) & (y[30:] <= high)).mean())
    # Errors of rows that tuned the penalties give 0.4.
    assert 0.44 < np.mean(inside) < 0.56


@pytest.mark.parametrize("cv", [None, 4])
def test_intervals_count_rows_by_their_weights(cv):
    inside = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        X, noisy = rng.uniform(-2, 2, size=(1200, 2)), rng.random(1200) < 0.3
        y = X[:, 0] + np.where(noisy, 2.0, 0.3) * rng.normal(size=1200)
        weight = np.where(noisy, 6.0, 1.0)
        model = BilevelAdditiveRegressor(pairs=0, cv=cv, max_iter=5).fit(X[:200], y[:200], weight[:200])
        low, high = model.predict_interval(X[200:], 0.9).T
        inside.append(np.average((low <= y[200:]) & (y[200:] <= high), weights=weight[200:]))
    assert 0.86 < np.mean(inside) < 0.94
