"""The estimators through scikit-learn's interface."""

import math
import pickle

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.linear_model import ElasticNet, LogisticRegression, Ridge, RidgeCV
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from bilevel.errors import BilevelError, BilevelWarning
from bilevel.estimators import BilevelElasticNet, BilevelLasso, BilevelLogisticRegression, BilevelRidge

ALL = [BilevelRidge, BilevelElasticNet, BilevelLogisticRegression]
ids = {"ids": lambda value: getattr(value, "__name__", str(value))}


# The defaults, and the shared penalty. Two iterations on two folds are enough for these checks.
FEW = {"max_iter": 2, "cv": 2}


@parametrize_with_checks(
    [
        BilevelRidge(),
        BilevelRidge("shared"),
        BilevelElasticNet(tether=1.0, **FEW),
        BilevelElasticNet("shared", l1_ratio=[0.1, 0.9], **FEW),
        BilevelLasso(tether=1.0, **FEW),
        BilevelLogisticRegression(tether=1.0, **FEW),
        BilevelLogisticRegression("shared", **FEW),
    ]
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.filterwarnings("ignore:The least populated class in y:UserWarning")
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def noisy(rows, features, informative, seed=0, noise=1.0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows + 2000, features))
    signal = X[:, :informative] @ rng.normal(size=informative)
    y = signal + noise * signal.std() * rng.normal(size=len(X))
    return X[:rows], y[:rows], X[rows:], y[rows:]


def binary(X, y):
    return (y > np.median(y)).astype(int)


@pytest.mark.parametrize(("rows", "features", "informative"), [(100, 200, 5), (200, 100, 10)])
def test_ridge_beats_ridge_cv_where_many_features_are_noise(rows, features, informative):
    ours, theirs = [], []
    for seed in range(3):
        X, y, X_test, y_test = noisy(rows, features, informative, seed, noise=0.5)
        ours.append(1 - BilevelRidge().fit(X, y).score(X_test, y_test))
        theirs.append(1 - RidgeCV(np.logspace(-3, 4, 30)).fit(X, y).score(X_test, y_test))
    assert np.mean(ours) < 0.8 * np.mean(theirs)


def test_ridge_is_about_as_good_as_ridge_cv_where_every_feature_counts():
    ours, theirs = [], []
    for seed in range(3):
        X, y, X_test, y_test = noisy(200, 50, 50, seed)
        ours.append(1 - BilevelRidge().fit(X, y).score(X_test, y_test))
        theirs.append(1 - RidgeCV(np.logspace(-3, 4, 30)).fit(X, y).score(X_test, y_test))
    assert np.mean(ours) < 1.05 * np.mean(theirs)


def test_a_shared_penalty_is_the_one_that_a_fine_grid_finds():
    X, y = load_diabetes(return_X_y=True)
    cv = KFold(5, shuffle=True, random_state=0)
    model = BilevelRidge("shared", cv=cv, tol=1e-12).fit(X, y)
    search = GridSearchCV(Ridge(), {"alpha": np.logspace(-4, 2, 121)}, cv=cv, scoring="neg_mean_squared_error")
    search.fit(X, y)
    # Folds differ in size by one row, and the two libraries average them differently.
    assert math.log(model.alpha_ / search.best_params_["alpha"]) == pytest.approx(0, abs=0.1)
    np.testing.assert_allclose(model.coef_, Ridge(model.alpha_).fit(X, y).coef_, rtol=1e-8)
    assert model.tether_ == math.inf


@pytest.mark.parametrize("estimator", ALL, **ids)
@pytest.mark.parametrize("penalty", ["shared", "per-feature", "groups"])
def test_coefficients_are_those_of_the_penalties_for_features_in_any_unit(estimator, penalty):
    """If each feature is divided by √α_j, its penalty becomes 1, and scikit-learn can fit the model."""
    X, y, *_ = noisy(80, 6, 3)
    X = X * np.array([1, 10, 0.1, 1, 5, 1])
    groups = np.array([0, 0, 1, 1, 2, 2])
    target = binary(X, y) if estimator is BilevelLogisticRegression else y
    settings = {"l1_ratio": 1.0} if estimator is BilevelElasticNet else {}
    model = estimator(groups if penalty == "groups" else penalty, tether=0.1, cv=3, **settings).fit(X, target)
    alpha = np.broadcast_to(model.alpha_, 6)
    if penalty == "groups":
        np.testing.assert_array_equal(alpha[::2], alpha[1::2])
        assert len(np.unique(alpha)) > 1
    unit = alpha if estimator is BilevelElasticNet else np.sqrt(alpha)
    rival = {
        BilevelRidge: Ridge(1.0),
        BilevelElasticNet: ElasticNet(1.0, l1_ratio=1.0, tol=1e-12, max_iter=1_000_000),
        BilevelLogisticRegression: LogisticRegression(tol=1e-10, max_iter=10_000),
    }[estimator].fit(X / unit, target)
    np.testing.assert_allclose(model.coef_, rival.coef_ / unit, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("estimator", ALL, **ids)
def test_what_a_fit_tells(estimator):
    X, y, *_ = noisy(80, 6, 3)
    target = binary(X, y) if estimator is BilevelLogisticRegression else y
    model = estimator(cv=3).fit(X, target)
    values = model.history_["value"]
    assert len(values) == len(model.history_["seconds"]) == len(model.history_["gradient_norm"]) == model.n_iter_
    assert values[-1] <= values[0]
    assert "Implicit differentiation" in model.method_
    assert model.outcome_.ok
    assert model.alpha_.shape == (6,)
    certificate = model.certificate_
    assert certificate.applies
    assert certificate.value_gap < 1e-6 * certificate.value
    assert clone(model).get_params() == model.get_params()
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert "penalty: " in type(model).__doc__
    assert "{" not in type(model).__doc__


@pytest.mark.parametrize("estimator", ALL, **ids)
def test_sparse_tables_give_the_same_model(estimator):
    X, y, *_ = noisy(60, 8, 3)
    X[np.abs(X) < 0.5] = 0
    target = binary(X, y) if estimator is BilevelLogisticRegression else y
    dense = estimator(cv=3, tether=1.0).fit(X, target)
    thin = estimator(cv=3, tether=1.0).fit(sparse.csr_matrix(X), target)
    np.testing.assert_allclose(thin.coef_, dense.coef_, atol=1e-6)
    np.testing.assert_array_equal(thin.predict(sparse.csc_matrix(X)), dense.predict(X).round(12)) if (
        estimator is BilevelLogisticRegression
    ) else np.testing.assert_allclose(thin.predict(sparse.csc_matrix(X)), dense.predict(X), atol=1e-5)


@pytest.mark.parametrize("estimator", ALL, **ids)
def test_a_sparse_table_may_hold_parts_of_a_number(estimator):
    X, y, *_ = noisy(60, 8, 3)
    target = binary(X, y) if estimator is BilevelLogisticRegression else y
    whole = sparse.csr_matrix(np.where(np.abs(X) < 0.5, 0, X))
    data = np.stack([whole.data + 50, np.full_like(whole.data, -50)], axis=1).ravel()
    parts = sparse.csr_matrix((data, np.repeat(whole.indices, 2), 2 * whole.indptr), shape=whole.shape)
    one, two = (estimator("shared", cv=3).fit(rows, target) for rows in (whole, parts))
    np.testing.assert_allclose(two.coef_, one.coef_, atol=1e-6)
    assert parts.nnz == 2 * whole.nnz


@pytest.mark.parametrize("estimator", ALL, **ids)
def test_rows_of_weight_zero_are_as_if_they_were_not_there(estimator):
    X, y, *_ = noisy(60, 5, 3)
    target = binary(X, y) if estimator is BilevelLogisticRegression else y
    weight = np.ones(60)
    weight[40:] = 0
    folds = [(np.flatnonzero(np.arange(60) % 3 != k), np.flatnonzero(np.arange(60) % 3 == k)) for k in range(3)]
    short = [(train[train < 40], val[val < 40]) for train, val in folds]
    weighted = estimator(cv=folds).fit(X, target, sample_weight=weight)
    fewer = estimator(cv=short).fit(X[:40], target[:40])
    np.testing.assert_allclose(weighted.coef_, fewer.coef_, rtol=1e-5, atol=1e-8)
    assert weighted.tether_ == fewer.tether_


def test_larger_problems_are_solved_in_other_ways_and_agree(monkeypatch):
    X, y, *_ = noisy(60, 8, 3)
    small = [BilevelRidge(tether=1.0, cv=5).fit(X, y), BilevelLogisticRegression(tether=1.0).fit(X, binary(X, y))]
    monkeypatch.setattr("bilevel.estimators.ridge.MAX_DENSE_FEATURES", 0)
    monkeypatch.setattr("bilevel.methods.linear_models.newton_linear.LARGEST", 0)
    middling = BilevelLogisticRegression(tether=1.0).fit(X, binary(X, y))
    monkeypatch.setattr("bilevel.estimators.rows_of_table.MAX_DENSE_FEATURES", 0)
    large = [BilevelRidge(tether=1.0, cv=5).fit(X, y), BilevelLogisticRegression(tether=1.0).fit(X, binary(X, y))]
    assert (
        all("conjugate gradients" in model.method_ for model in large)
        and "updated only when needed" in middling.method_
    )
    for a, b in [*zip(small, large, strict=True), (small[1], middling)]:
        np.testing.assert_allclose(b.coef_, a.coef_, rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(b.intercept_, a.intercept_, atol=1e-3)
        assert b.history_["value"][-1] == pytest.approx(a.history_["value"][-1], rel=1e-4)


def test_several_outputs_share_their_penalties():
    X, y, *_ = noisy(60, 6, 2)
    Y = np.stack([y, 2 * y], axis=1)
    for estimator in (BilevelRidge, BilevelElasticNet):
        model = estimator(cv=3, tether=1.0).fit(X, Y)
        assert model.coef_.shape == (2, 6)
        assert model.alpha_.shape == (6,)
        assert model.predict(X).shape == (60, 2)
    np.testing.assert_allclose(BilevelRidge(cv=3).fit(X, Y).coef_[1], 2 * BilevelRidge(cv=3).fit(X, Y).coef_[0])


def test_three_classes_and_their_names():
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = BilevelLogisticRegression(cv=3).fit(X, names)
    assert list(model.classes_) == ["setosa", "versicolor", "virginica"]
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    np.testing.assert_array_equal(model.classes_[probabilities.argmax(1)], model.predict(X))
    assert model.coef_.shape == (3, 4)
    assert model.score(X, names) > 0.95


def test_logarithms_of_probabilities_stay_finite():
    X, y = load_iris(return_X_y=True)
    for rows in (y < 2, y < 3):
        model = BilevelLogisticRegression("shared", cv=3).fit(X[rows], y[rows])
        near, far = model.predict_log_proba(X[rows]), model.predict_log_proba(1e4 * X[rows])
        np.testing.assert_allclose(near, np.log(model.predict_proba(X[rows])), rtol=1e-9, atol=1e-14)
        assert np.isfinite(far).all() and far.min() < -1000
        np.testing.assert_allclose(model.predict_proba(X[rows]).sum(1), 1)


def test_a_fold_that_never_saw_a_class_it_is_judged_on_is_refused():
    X, *_ = noisy(60, 5, 3)
    halves = [(np.arange(30), np.arange(30, 60)), (np.arange(30, 60), np.arange(30))]
    with pytest.raises(BilevelError, match="Fold 0 of cv is evaluated on class 'b' but has no row of it"):
        BilevelLogisticRegression(cv=halves).fit(X, np.repeat(["a", "b"], 30))
    with pytest.raises(BilevelError, match="class 2"):
        BilevelLogisticRegression(cv=halves).fit(X, np.r_[np.arange(30) % 2, np.arange(30) % 3])


def test_in_pipelines_cross_validation_and_grids():
    X, y = load_breast_cancer(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), BilevelLogisticRegression(cv=3, tether=1.0, max_iter=5))
    assert cross_val_score(pipeline, X[:250], y[:250], cv=3).mean() > 0.9
    X, y, *_ = noisy(80, 20, 3)
    search = GridSearchCV(BilevelRidge(cv=3, max_iter=10), {"penalty": ["shared", "per-feature"]}, cv=3).fit(X, y)
    assert search.best_params_ == {"penalty": "per-feature"}


def test_columns_of_a_data_frame_keep_their_names():
    pandas = pytest.importorskip("pandas")
    X, y, *_ = noisy(60, 4, 2)
    frame = pandas.DataFrame(X, columns=list("abcd"))
    model = BilevelRidge(cv=3).fit(frame, y)
    assert list(model.feature_names_in_) == list("abcd")
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[list("dcba")])


def test_a_warm_start_goes_on_where_the_last_fit_ended():
    X, y, *_ = noisy(80, 30, 3)
    model = BilevelRidge(warm_start=True).fit(X, y)
    cold, tuned, strength = model.n_iter_, model.history_["value"][-1], model.tether_
    model.fit(X, y)
    assert model.n_iter_ < cold / 2
    assert model.tether_ == strength
    assert model.history_["value"][-1] <= tuned * 1.001


def test_a_warm_start_takes_nothing_over_from_other_features_or_groups():
    X, y, *_ = noisy(80, 30, 3, noise=0.5)
    cold = BilevelRidge().fit(X, y)
    assert cold.tether_ < math.inf
    for first in ({"penalty": "shared"}, {"penalty": np.arange(30) % 2}, {"penalty": np.zeros(1)}):
        model = BilevelRidge(warm_start=True, **first)
        model.fit(X[:, : np.size(first["penalty"])] if len(first["penalty"]) == 1 else X, y)
        model.set_params(penalty="per-feature").fit(X, y)
        assert model.tether_ == cold.tether_
        np.testing.assert_array_equal(model.alpha_, cold.alpha_)


def test_a_warm_start_keeps_the_tether_in_the_unit_of_the_new_target():
    X, y, *_ = noisy(80, 30, 3)
    model = BilevelRidge(tether=1.0, warm_start=True).fit(X, y)
    before = model.alpha_
    model.fit(X, 1e4 * y)
    np.testing.assert_allclose(np.log(model.alpha_), np.log(before), atol=0.3)


def test_held_out_fractions_and_splitters():
    X, y, *_ = noisy(80, 10, 3)
    for cv in (0.25, 2, KFold(4), None):
        model = BilevelRidge(cv=cv).fit(X, y)
        assert model.alpha_[:3].max() < model.alpha_[3:].max()
    first, second = (BilevelRidge(random_state=1).fit(X, y) for _ in range(2))
    np.testing.assert_array_equal(first.alpha_, second.alpha_)


def test_a_constant_column_is_no_obstacle():
    X, y, *_ = noisy(60, 5, 3)
    X[:, 4] = 7.0
    for estimator in (BilevelRidge, BilevelElasticNet):
        model = estimator(cv=3).fit(X, y)
        assert np.isfinite(model.coef_).all()
        assert abs(model.coef_[4]) < 1e-6


@pytest.mark.parametrize("estimator", [BilevelRidge, BilevelElasticNet, BilevelLasso])
def test_only_constant_columns_predict_the_mean(estimator):
    y = noisy(60, 5, 3)[1]
    X = np.full((60, 3), 1.1)
    np.testing.assert_allclose(estimator(cv=3).fit(X, y).predict(X), y.mean())


def test_verbose_shows_a_bar(capsys):
    X, y, *_ = noisy(40, 5, 3)
    BilevelRidge(verbose=True, cv=3).fit(X, y)
    assert "hypergradients" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"penalty": "each"}, "penalty='each' is not possible"),
        ({"penalty": [0, 1]}, "shape \\(2,\\), but X has 5 features"),
        ({"cv": 1}, "cv=1 leaves no rows to train on"),
        ({"cv": 1.5}, "cv=1.5 is not a fraction"),
        ({"tether": "loose"}, "tether='loose' is not possible"),
        ({"tether": -1}, "tether=-1 is not possible"),
        ({"max_iter": 0}, "max_iter=0"),
        ({"tol": -1}, "tol=-1"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_say_what_to_write(settings, sentence):
    X, y, *_ = noisy(40, 5, 3)
    with pytest.raises(BilevelError, match=sentence):
        BilevelRidge(**settings).fit(X, y)
    with pytest.raises(BilevelError, match=sentence):
        BilevelRidge(**settings).fit(X, y, groups=np.arange(40) // 4)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_a_table_of_few_rows_gets_a_shared_penalty(rows):
    X, y, *_ = noisy(rows, 2, 1)
    assert BilevelRidge().fit(X, y).tether_ == np.inf


def test_data_that_cannot_work_says_why():
    X, y, *_ = noisy(40, 5, 3)
    with pytest.raises(BilevelError, match="l1_ratio=2"):
        BilevelElasticNet(l1_ratio=2).fit(X, y)
    with pytest.raises(BilevelError, match="only one class"):
        BilevelLogisticRegression().fit(X, np.zeros(40))
    with pytest.raises(ValueError, match="zero"):
        BilevelRidge().fit(X, y, sample_weight=np.zeros(40))
    with pytest.raises(BilevelError, match="Fold 0 of cv"):
        BilevelRidge(cv=[(np.arange(20), np.arange(20, 40))]).fit(X, y, sample_weight=np.r_[np.ones(20), np.zeros(20)])


ROWS = np.arange(40)


@pytest.mark.parametrize(
    ("cv", "says"),
    [
        ([(ROWS, ROWS)], "Fold 0 of cv trains on row 0 and is evaluated on it"),
        ([(ROWS[:30], ROWS[30:]), (ROWS[10:], ROWS[:11])], "Fold 1 of cv trains on row 10"),
        ([(np.r_[ROWS[:30], 0, 0], ROWS[30:])], "a row several times.*sample_weight"),
        ([(ROWS[:30], [40])], "Fold 0 of cv .* positions of the 40 rows"),
        ([(ROWS[:30] / 2, ROWS[30:])], "float64 numbers"),
        ([(ROWS[:9] > 3, ROWS[30:])], "masks of 40 entries"),
        ([(1, 2, 3)], "gives no folds.*list of"),
        (True, "cv=True gives no folds"),
        ("loo", "cv='loo' gives no folds"),
        (GroupKFold(2), r"groups=…"),
        (iter([]), "A generator gives its splits only once"),
    ],
)
def test_folds_that_cannot_work_say_why(cv, says):
    X, y, *_ = noisy(40, 5, 3)
    with pytest.raises(BilevelError, match=says):
        BilevelRidge(cv=cv).fit(X, y)


def test_labels_of_groups_have_an_order():
    X, y, *_ = noisy(40, 5, 3)
    with pytest.raises(BilevelError, match="penalty mixes labels"):
        BilevelRidge(["a", 1, 1, 2, None]).fit(X, y)
    with pytest.raises(BilevelError, match="groups mixes labels"):
        BilevelRidge().fit(X, y, groups=[None] * 20 + ["a"] * 20)


def test_weights_that_count_rows_as_less_than_one_are_pointed_out():
    X, y, *_ = noisy(40, 5, 3)
    weight = np.full(40, 1 / 40)
    weight.flags.writeable = False
    with pytest.warns(BilevelWarning, match="40 rows add up to 1.*Multiply the weights by 40 "):
        assert BilevelRidge().fit(X, y, sample_weight=weight).tether_ == math.inf
    # One penalty does not depend on the unit of the weights.
    alike = BilevelRidge("shared").fit(X, y)
    np.testing.assert_allclose(BilevelRidge("shared").fit(X, y, sample_weight=weight).coef_, alike.coef_, rtol=1e-3)
