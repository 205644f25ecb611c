"""Tuning a table: the saved model is the estimator's, the comparison is fair, and files are what was fitted."""

import csv
import io
import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.metrics import accuracy_score, log_loss, r2_score
from table_fixtures import cancer, diabetes, flats, wine, written

from asking import refused
from bilevel.estimators import BilevelElasticNet, BilevelLogisticRegression, BilevelRidge
from bilevel.tabular.importance import _held, features, table_csv
from bilevel.tabular.model import load
from bilevel.tabular.reading import read_table
from bilevel.tabular.record import record, test_points
from bilevel.tabular.rivals import RIDGE_GRID
from bilevel.tabular.scores import Score, class_score, regression_score, verdict
from bilevel.tabular.settings import TuneSettings
from bilevel.tabular.study import tune

test_points.__test__ = False  # a name of the library, not a test


def tuned(path, **settings):
    return tune(read_table(path), TuneSettings(**{"max_iter": 10, **settings}))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def ridge(place):
    return tuned(diabetes(place / "diabetes.csv"), target="target", seed=3)


@pytest.fixture(scope="module")
def logistic(place):
    return tuned(cancer(place / "cancer.csv"), target="target", refit=False)


def standardised(study, rows):
    return (study.prepared.features[rows] - study.model.mean) / study.model.scale


def test_the_model_is_the_estimators_to_the_last_digits(ridge, logistic):
    for study, kind in ((ridge, BilevelRidge), (logistic, BilevelLogisticRegression)):
        prepared = study.prepared
        own = kind(cv=prepared.folds(study.settings), max_iter=10, random_state=study.settings.seed)
        own.fit(standardised(study, prepared.train), prepared.y[prepared.train])
        X = standardised(study, prepared.test)
        expected = own.predict_proba(X) if prepared.target.classes else own.predict(X)
        assert np.allclose(study.test_predictions()[1], expected, rtol=1e-12, atol=1e-12)
        assert np.allclose(study.judged.penalty, own.alpha_, rtol=1e-8)


def test_the_unit_of_the_weights_decides_nothing(tmp_path):
    draw = np.random.default_rng(0).uniform(0.5, 2, 80)
    studies = [
        tuned(flats(tmp_path / f"{unit}.csv", weight=draw * unit), target="price", weights="weight", one_hot=True)
        for unit in (1.0, 2.0**-30)
    ]
    one, other = ([entry.score.main for entry in study.entries] for study in studies)
    np.testing.assert_allclose(other, one, rtol=1e-6)
    np.testing.assert_allclose(studies[1].model.penalty, studies[0].model.penalty, rtol=1e-3)
    assert any("'weight' are divided by their mean" in note for note in studies[0].notes)


def test_the_file_predicts_what_the_model_does_and_holds_no_code(ridge, logistic, tmp_path):
    for study in (ridge, logistic):
        study.model.save(tmp_path / "model.safetensors")
        frame = study.table.frame
        before, after = study.model.predict(frame), load(tmp_path).predict(frame)
        assert before.values == after.values and len(after.values) == len(frame)
        if study.prepared.target.classes:
            assert np.array_equal(before.probabilities, after.probabilities)
            assert set(after.values) == {"benign", "malignant"}
        header = (tmp_path / "model.safetensors").read_bytes()[8:]
        assert (
            json.JSONDecoder().raw_decode(header.decode("utf-8", errors="ignore"))[0]["coefficients"]["dtype"] == "F64"
        )


def test_the_saved_model_is_fitted_to_all_rows_with_the_tuned_penalties(ridge, place):
    X, y = standardised(ridge, slice(None)), ridge.prepared.y
    w, b = ridge.model.coefficients[0], ridge.model.intercept
    residual = y - X @ w - b
    assert np.allclose(X.T @ residual, ridge.model.penalty * w, atol=1e-6 * len(y)) and abs(residual.sum()) < 1e-6
    assert np.array_equal(ridge.model.penalty, ridge.judged.penalty)
    assert not np.allclose(ridge.model.coefficients, ridge.judged.coefficients)
    # On the training rows, the same minimiser is the estimator's own fit.
    rows = ridge.prepared.train
    own = y[rows] - X[rows] @ ridge.judged.coefficients[0] - ridge.judged.intercept
    assert np.allclose(X[rows].T @ own, ridge.judged.penalty * ridge.judged.coefficients[0], atol=1e-4)
    kept = tuned(place / "diabetes.csv", target="target", seed=3, refit=False)
    assert np.array_equal(kept.model.coefficients, ridge.judged.coefficients)


def test_the_comparison_is_on_the_same_split(ridge, logistic):
    prepared = ridge.prepared
    X, Z = standardised(ridge, prepared.train), standardised(ridge, prepared.test)
    theirs = RidgeCV(RIDGE_GRID, cv=prepared.folds(ridge.settings)).fit(X, prepared.y[prepared.train])
    error = np.sqrt(((theirs.predict(Z) - prepared.y[prepared.test]) ** 2).mean())
    assert ridge.entries[1].score.main == pytest.approx(error) and ridge.entries[1].penalty == theirs.alpha_
    truth, ours = ridge.test_predictions()
    assert ridge.entries[0].score.share == pytest.approx(r2_score(truth, ours))
    mean = prepared.y[prepared.train].mean()
    assert ridge.entries[2].score.main == pytest.approx(np.sqrt(((truth - mean) ** 2).mean()))
    truth, chances = logistic.test_predictions()
    assert logistic.entries[0].score.share == pytest.approx(accuracy_score(truth, chances.argmax(1)))
    assert logistic.entries[0].score.main == pytest.approx(log_loss(truth, chances))
    share = np.bincount(truth) / len(truth)
    assert logistic.entries[2].score.share == pytest.approx(share.max())
    penalty = logistic.entries[1].penalty
    rows = logistic.prepared.train
    theirs = LogisticRegression(C=1 / penalty, max_iter=1000).fit(
        standardised(logistic, rows), logistic.prepared.y[rows]
    )
    expected = log_loss(truth, theirs.predict_proba(standardised(logistic, ~rows)))
    assert logistic.entries[1].score.main == pytest.approx(expected, rel=1e-2)


def test_weights_count_rows_in_proportion(place, tmp_path):
    path = flats(tmp_path / "flats.csv")
    study = tuned(path, target="price", one_hot=True, weights="weight", penalty="shared")
    weights = study.prepared.weights
    assert "weight" not in study.prepared.names and set((weights / weights.min()).round(9)) == {1, 2, 3}
    assert weights[study.prepared.train].mean() == pytest.approx(1)
    X, y, rows = standardised(study, slice(None)), study.prepared.y, study.prepared.train
    own = Ridge(study.model.penalty[0]).fit(X[rows], y[rows], weights[rows])
    assert np.allclose(study.judged.coefficients[0], own.coef_, rtol=1e-6)
    expected = r2_score(y[~rows], own.predict(X[~rows]), sample_weight=weights[~rows])
    assert study.entries[0].score.share == pytest.approx(expected, rel=1e-6)
    assert np.ptp(study.model.penalty) == 0


def test_noise_is_switched_off_and_penalties_are_told_in_both_units(tmp_path):
    draw = np.random.default_rng(2)
    X = draw.normal(size=(110, 60)) * np.array([100.0, *[1.0] * 59])
    frame = pd.DataFrame(X, columns=["signal_0", "signal_1", *(f"noise_{i}" for i in range(58))])
    frame["y"] = X[:, 0] / 100 - 2 * X[:, 1] + draw.normal(size=110)
    path = written(tmp_path / "sparse.csv", frame)
    study = tuned(path, target="y", penalty="groups", groups="prefix", max_iter=100)
    found = {one.name: one for one in features(study)}
    assert [name for name, one in found.items() if not one.off] == ["signal_0", "signal_1"]
    for one, scale in zip(found.values(), study.model.scale, strict=True):
        assert one.raw[0] == pytest.approx(one.coefficients[0] / scale)
        assert one.raw_penalty == pytest.approx(one.penalty * scale**2)
    assert study.entries[0].score.main < study.entries[1].score.main
    Z, penalty = standardised(study, study.prepared.train), np.diag(study.model.penalty)
    held = np.diag(penalty @ np.linalg.inv(Z.T @ Z + penalty))
    assert np.allclose([one.shrinkage for one in found.values()], held, atol=1e-6)
    # The trace of the matrix that maps targets to predictions.
    trace = np.trace(Z @ np.linalg.solve(Z.T @ Z + penalty, Z.T))
    assert record(study)["effective_features"] == pytest.approx(trace, rel=1e-6)
    rows = list(csv.DictReader(io.StringIO(table_csv(study.model, list(found.values())))))
    assert [row["feature"] for row in rows] == list(found)
    assert float(rows[1]["penalty"]) == found["signal_1"].penalty
    # Standardising changes neither the predictions nor the penalties in the units of the table.
    ours = Ridge(1.0).fit(X / np.sqrt([one.raw_penalty for one in found.values()]), frame["y"])
    assert np.allclose(
        ours.coef_ / np.sqrt([one.raw_penalty for one in found.values()]), [one.raw[0] for one in found.values()]
    )


def test_what_holds_a_coefficient_where_features_outnumber_rows():
    draw = np.random.default_rng(0)
    X, penalty, weights = draw.normal(size=(20, 45)), draw.uniform(0.1, 50, 45), draw.uniform(0.5, 2, 20)
    centred = np.sqrt(weights)[:, None] * (X - weights @ X / weights.sum())
    expected = penalty * np.diag(np.linalg.inv(centred.T @ centred + np.diag(penalty)))
    assert np.allclose(_held(X, penalty, weights), expected, rtol=1e-9)


def test_three_classes(place):
    study = tuned(wine(place / "wine.csv"), target="target", model="logistic", max_iter=3)
    assert study.model.coefficients.shape == (3, 13) and study.model.target.classes == ("0", "1", "2")
    _, chances = study.test_predictions()
    assert np.allclose(chances.sum(1), 1) and study.entries[0].score.share > 0.9
    header = table_csv(study.model, features(study)).splitlines()[0]
    assert header.startswith("feature,column,coefficient 0,coefficient 1,coefficient 2,coefficient_raw 0")
    confusion = np.array(test_points(study)["confusion"])
    assert confusion.sum() == 45 and confusion.trace() == round(45 * study.entries[0].score.share)


def test_groups_share_a_penalty(place, tmp_path):
    path = cancer(place / "cancer.csv")
    file = tmp_path / "groups.json"
    names = [name for name in pd.read_csv(path).columns if name != "target"]
    file.write_text(json.dumps({"mean": names[:10], "error": names[10:20], "worst": names[20:]}))
    study = tuned(path, target="target", penalty="groups", groups=str(file), max_iter=3)
    penalties = study.model.penalty.reshape(3, 10)
    assert np.ptp(penalties, axis=1).max() == 0 and len(np.unique(penalties)) <= 3
    assert [one.group for one in features(study)] == ["mean"] * 10 + ["error"] * 10 + ["worst"] * 10
    assert "group" in table_csv(study.model, features(study)).splitlines()[0]


def test_indicators_of_a_column_may_share_a_penalty(tmp_path):
    path = flats(tmp_path / "flats.csv")
    study = tuned(path, target="price", one_hot=True, drop=("weight",), penalty="groups", groups="columns")
    assert study.groups == ["size", "town", "lift"] and study.group_of.tolist() == [0, 1, 1, 1, 2]
    assert np.ptp(study.model.penalty[1:4]) == 0


def test_elastic_net(place):
    study = tuned(diabetes(place / "diabetes.csv"), target="target", model="elastic-net", l1_ratio=0.8, max_iter=5)
    prepared = study.prepared
    own = BilevelElasticNet(cv=prepared.folds(study.settings), max_iter=5, l1_ratio=0.8)
    own.fit(standardised(study, prepared.train), prepared.y[prepared.train])
    assert np.allclose(study.test_predictions()[1], own.predict(standardised(study, prepared.test)), rtol=1e-12)
    assert study.entries[1].name == "ElasticNetCV"
    X, y = standardised(study, slice(None)), prepared.y
    w, b = study.model.coefficients[0], study.model.intercept
    slope = X.T @ (y - X @ w - b) / len(y) - 0.2 * study.model.penalty * w
    on = w != 0
    assert np.allclose(slope[on], (0.8 * study.model.penalty * np.sign(w))[on], atol=1e-4)
    assert (np.abs(slope[~on]) <= 0.8 * study.model.penalty[~on] * (1 + 1e-6)).all()


def test_a_run_is_a_function_of_its_seed(place, ridge):
    again = tuned(place / "diabetes.csv", target="target", seed=3)
    other = tuned(place / "diabetes.csv", target="target", seed=4)
    assert np.array_equal(again.model.coefficients, ridge.model.coefficients)
    assert not np.array_equal(other.prepared.train, ridge.prepared.train)
    one, two = record(again), record(ridge)
    for entry in (*one["comparison"], *two["comparison"]):
        del entry["seconds"]
    del one["history"]["seconds"], two["history"]["seconds"]
    assert one == two


def test_the_record_is_json(ridge):
    found = json.loads(json.dumps(record(ridge), allow_nan=False))
    assert found["data"]["training_rows"] == 331 and found["data"]["test_rows"] == 111
    assert len(found["features"]) == 10 and found["comparison"][0]["rmse"] == ridge.entries[0].score.main


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"nothing of the kind", ["damaged"]),
        (None, ["holds no model of `bilevel tune`"]),
    ],
)
def test_files_that_are_no_models(tmp_path, content, words):
    file = tmp_path / "model.safetensors"
    if content is None:
        save_file({"weight": torch.zeros(3)}, file)
    else:
        file.write_bytes(content)
    with refused("model.safetensors", *words):
        load(file)
    with refused("does not exist", "bilevel tune"):
        load(tmp_path / "nothing")
    file.unlink()
    with refused("has no model.safetensors"):
        load(tmp_path)


def test_a_damaged_model_is_noticed(ridge, tmp_path):
    file = tmp_path / "model.safetensors"
    ridge.model.save(file)
    content = bytearray(file.read_bytes())
    for change, word in ((content[:-100], "damaged"), (content[:-8] + bytes(8), "checksum")):
        file.write_bytes(bytes(change))
        with refused("model.safetensors", word):
            load(file)


def score(losses):
    losses = np.array(losses)
    return Score(float(losses.mean()), 0.0, losses, np.ones(len(losses)))


def test_verdicts_are_honest():
    draw = np.random.default_rng(0)
    theirs, noise = draw.uniform(1, 2, 400), draw.normal(0, 0.5, 400)
    assert verdict(score(theirs - 0.5), score(theirs), "RidgeCV", "RMSE", False).startswith("Better than RidgeCV")
    worse = verdict(score(theirs + 0.5), score(theirs), "RidgeCV", "RMSE", False)
    assert worse.startswith("Worse than RidgeCV") and "--penalty shared" in worse
    assert "--penalty shared" not in verdict(score(theirs + 0.5), score(theirs), "RidgeCV", "RMSE", True)
    same = verdict(score(theirs + noise - noise.mean()), score(theirs), "RidgeCV", "RMSE", False)
    assert same.startswith("No difference that 400 test rows could show")
    assert verdict(score(theirs), score(theirs), "RidgeCV", "RMSE", False).startswith("No difference")
    # Three rows cannot tell what four hundred can.
    few = verdict(score(theirs[:3] - noise[:3] ** 2), score(theirs[:3]), "RidgeCV", "RMSE", False)
    assert few.startswith("No difference that 3 test rows")


def test_scores_where_they_have_no_meaning():
    assert np.isnan(regression_score(np.ones(3), np.zeros(3), np.ones(3)).share)
    sure = class_score(np.array([0]), np.array([[0.0, 1.0]]), np.ones(1))
    assert np.isfinite(sure.main) and sure.share == 0
