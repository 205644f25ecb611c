"""Tuning a table: the saved model equals the estimator, the comparison is fair, and files hold the fitted model."""

import csv
import io
import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LassoCV, Ridge
from sklearn.metrics import balanced_accuracy_score, log_loss, r2_score, roc_auc_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from table_fixtures import cancer, diabetes, flats, wine, written

from asking import refused
from bilevel.estimators import BilevelElasticNet, BilevelLogisticRegression, BilevelRidge
from bilevel.tabular import TuneSettings, load, read_table, tune
from bilevel.tabular.results import _shrinkage, chart_points, feature_rows, features_csv, result_record
from bilevel.training.files import read_tensors, write_tensors

# No time limit, so that all repeats are made on a busy machine too.
QUICK = {"max_iter": 5, "repeats": 1, "cv": 2, "minutes": 1000.0}


def tuned(path, **settings):
    settings = {"model": "ridge", **QUICK, **settings}
    return tune(read_table(path), TuneSettings(**settings))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def ridge(place):
    return tuned(diabetes(place / "diabetes.csv"), target="target", seed=3, repeats=2, cv=3)


@pytest.fixture(scope="module")
def logistic(place):
    return tuned(cancer(place / "cancer.csv", rows=250), target="target", model="logistic")


def standardised(study):
    return study.model.pipeline[:-1].transform(study.used.frame)


def every_row(study):
    return study.used.splits.inner(np.arange(len(study.used.y)))


def compared(study, name):
    return next(one for one in study.comparison.models if one.name == name)


def test_the_saved_model_is_the_estimators_to_the_last_digits(ridge, logistic):
    for study, kind in ((ridge, BilevelRidge), (logistic, BilevelLogisticRegression)):
        own = kind(cv=every_row(study), max_iter=5, random_state=study.settings.seed)
        X = standardised(study)
        own.fit(X, study.used.y)
        expected = own.predict_proba(X) if study.model.classes else own.predict(X)
        assert np.allclose(study.model.outputs(study.used.frame), expected, rtol=1e-12, atol=1e-12)
        assert np.allclose(study.model.penalty, own.alpha_, rtol=1e-8)


def test_every_model_is_tested_on_rows_it_was_not_fitted_to(ridge, logistic):
    """Each fold is computed again, step by step: everything is learned from its training rows."""
    y, frame = ridge.used.y, ridge.used.frame
    lasso, ours, losses = np.empty(len(y)), np.empty(len(y)), []
    pairs = next(iter(ridge.used.splits.outer(1)))
    assert sorted(np.concatenate([test for _, test in pairs])) == list(range(len(y)))
    for train, test in pairs:
        folds = ridge.used.splits.inner(train)
        assert all(not set(a) & set(b) for a, b in folds)
        theirs = make_pipeline(StandardScaler(), LassoCV(cv=folds, max_iter=5000)).fit(frame.iloc[train], y[train])
        lasso[test] = theirs.predict(frame.iloc[test])
        own = make_pipeline(StandardScaler(), BilevelRidge(cv=folds, max_iter=5, random_state=3))
        ours[test] = own.fit(frame.iloc[train], y[train]).predict(frame.iloc[test])
        losses.append(((ours[test] - y[test]) ** 2).mean())
    assert np.allclose(compared(ridge, "LassoCV").predicted, lasso)
    assert np.allclose(compared(ridge, "BilevelRidge").predicted, ours)
    assert np.allclose(compared(ridge, "BilevelRidge").losses[:3], losses) and ridge.comparison.repeats == 2
    assert len(compared(ridge, "LassoCV").losses) == 6
    assert ridge.comparison.ratio == pytest.approx(0.5, rel=0.02)
    names = {one.name for one in ridge.comparison.models}
    assert names == {"mean", "RidgeCV", "LassoCV", "ElasticNetCV", "RandomForestRegressor",
                     "HistGradientBoostingRegressor", "BilevelRidge"}  # fmt: skip
    assert compared(logistic, "BilevelLogisticRegression").scores == pytest.approx(
        scores_by_hand(logistic.used.y, compared(logistic, "BilevelLogisticRegression").predicted)
    )


def scores_by_hand(y, chances):
    labels, found = np.array(["benign", "malignant"]), chances.argmax(1)
    return {
        "accuracy": (labels[found] == y).mean(),
        "balanced_accuracy": balanced_accuracy_score(y, labels[found]),
        "auc": roc_auc_score(y == "malignant", chances[:, 1]),
        "log_loss": log_loss(y, chances),
    }


def test_the_measures_of_numbers(ridge):
    scores = compared(ridge, "BilevelRidge").scores
    assert scores["rmse"] == pytest.approx(np.sqrt(compared(ridge, "BilevelRidge").losses.mean()), rel=1e-3)
    first = r2_score(ridge.used.y, compared(ridge, "BilevelRidge").predicted)
    assert scores["r2"] == pytest.approx(first, abs=0.02) and compared(ridge, "mean").scores["r2"] < 0.01


def test_the_unit_of_the_weights_decides_nothing(tmp_path):
    draw = np.random.default_rng(0).uniform(0.5, 2, 80)
    studies = [
        tuned(flats(tmp_path / f"{unit}.csv", weight=draw * unit), target="price", weights="weight")
        for unit in (1.0, 2.0**-30)
    ]
    one, other = ([entry.scores["rmse"] for entry in study.comparison.models] for study in studies)
    np.testing.assert_allclose(other, one, rtol=1e-6)
    np.testing.assert_allclose(studies[1].model.penalty, studies[0].model.penalty, rtol=1e-3)
    assert any("'weight' are divided by their mean" in note for note in studies[0].notes)


def test_the_file_predicts_what_the_model_does_and_holds_no_code(ridge, logistic, tmp_path):
    for study in (ridge, logistic):
        study.model.save(tmp_path / "model.safetensors")
        frame = study.table.frame
        before, after = study.model.predict(frame), load(tmp_path).predict(frame)
        assert before.values == after.values and len(after.values) == len(frame)
        if study.model.classes:
            assert np.array_equal(before.probabilities, after.probabilities)
            assert set(after.values) == {"benign", "malignant"}
        assert np.array_equal(study.model.outputs(frame), load(tmp_path).outputs(frame))
        header = (tmp_path / "model.safetensors").read_bytes()[8:]
        assert (
            json.JSONDecoder().raw_decode(header.decode("utf-8", errors="ignore"))[0]["model.coef_"]["dtype"] == "F64"
        )


def mixed(study_settings, place):
    """A model of every kind of column, with empty fields, and the table as pandas reads it."""
    frame = pd.read_csv(flats(place / "flats.csv", rows=120)).astype(object)
    frame["rooms"] = [f"{i % 9}%" for i in range(120)]
    frame["door"] = ["left", "right"] * 60
    frame.loc[3, "size"], frame.loc[5, "town"], frame.loc[7, "lift"], frame.loc[9, "door"] = [None] * 4
    path = written(place / "mixed.csv", frame)
    return tuned(path, target="price", missing="median", **study_settings), pd.read_csv(path)


@pytest.mark.parametrize("settings", [{"penalty": "shared"}, {"group": ("columns",)}, {"model": "elastic-net"}])
def test_the_loaded_pipeline_is_a_scikit_learn_pipeline(tmp_path, settings):
    study, frame = mixed({"max_iter": 3, **settings}, tmp_path)
    study.model.save(tmp_path / "model.safetensors")
    saved, loaded = study.model.pipeline, load(tmp_path).pipeline
    assert isinstance(loaded, Pipeline) and isinstance(loaded["columns"], ColumnTransformer)
    assert isinstance(loaded["scale"], StandardScaler) and type(loaded["model"]) is type(saved["model"])
    new = frame.drop(columns="price")[::-1]
    assert np.array_equal(loaded.predict(new), saved.predict(new))
    expected = study.model.predict(frame).values[::-1]
    assert loaded.predict(new).tolist() == expected
    names = loaded[:-1].get_feature_names_out()
    assert list(names) == list(saved[:-1].get_feature_names_out())
    assert {"size", "rooms", "lift", "town=Oslo", "door=right"} <= set(names) and "door=left" not in names
    for step in ("columns", "varying", "scale"):
        before = saved[step].transform(frame if step == "columns" else np.ones((2, saved[step].n_features_in_)))
        after = loaded[step].transform(frame if step == "columns" else np.ones((2, saved[step].n_features_in_)))
        assert np.array_equal(before, after)
    assert repr(loaded["model"].get_params()) == repr(saved["model"].get_params())
    again = clone(loaded).fit(frame.drop(columns="price"), frame["price"])
    assert again.score(frame, frame["price"]) > 0.9
    # The same bytes are written for the same model.
    load(tmp_path).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_a_pipeline_without_filling_refuses_empty_fields(tmp_path):
    study = tuned(flats(tmp_path / "flats.csv"), target="price", penalty="shared", missing="error")
    frame = study.table.frame.astype(object)
    frame.loc[4, "town"] = None
    with refused("Column 'town' has no value in 1 row, first in row 5", "--missing median"):
        study.model.pipeline.predict(frame)


def test_weights_count_rows_in_proportion(place, tmp_path):
    path = flats(tmp_path / "flats.csv")
    study = tuned(path, target="price", weights="weight", penalty="shared")
    weights = study.used.weights
    assert "weight" not in study.model.features and set((weights / weights.min()).round(9)) == {1, 2, 3}
    assert weights.mean() == pytest.approx(1)
    X, y = standardised(study), study.used.y
    own = Ridge(study.model.penalty[0]).fit(X, y, weights)
    assert np.allclose(study.model.coefficients[0], own.coef_, rtol=1e-6)
    ours = study.verdict.ours
    assert ours.scores["r2"] == pytest.approx(r2_score(y, ours.predicted, sample_weight=weights))
    assert np.ptp(study.model.penalty) == 0


def test_noise_is_switched_off_and_penalties_are_told_in_both_units(tmp_path):
    draw = np.random.default_rng(2)
    X = draw.normal(size=(110, 60)) * np.array([100.0, *[1.0] * 59])
    frame = pd.DataFrame(X, columns=["signal_0", "signal_1", *(f"noise_{i}" for i in range(58))])
    frame["y"] = X[:, 0] / 100 - 2 * X[:, 1] + draw.normal(size=110)
    path = written(tmp_path / "sparse.csv", frame)
    study = tuned(path, target="y", penalty="groups", group=("prefix",), max_iter=100, cv=3)
    found = {one["name"]: one for one in feature_rows(study)}
    noise = [one for name, one in found.items() if name.startswith("noise")]
    assert min(one["penalty"] for one in noise) > 20 * found["signal_1"]["penalty"]
    assert all(one["off"] == (one["shrinkage"] > 0.95) for one in found.values())
    assert min(one["shrinkage"] for one in noise) > 0.5 > found["signal_1"]["shrinkage"]
    assert study.variance["signal"] > 0.7 > 0.1 > abs(study.variance["noise"])
    for one, scale in zip(found.values(), study.model.pipeline["scale"].scale_, strict=True):
        assert one["coefficients_raw"][0] == pytest.approx(one["coefficients"][0] / scale)
        assert one["penalty_raw"] == pytest.approx(one["penalty"] * scale**2)
    assert compared(study, "BilevelRidge").scores["rmse"] < compared(study, "RidgeCV").scores["rmse"]
    Z, penalty = standardised(study), np.diag(study.model.penalty)
    held = np.diag(penalty @ np.linalg.inv(Z.T @ Z + penalty))
    assert np.allclose([one["shrinkage"] for one in found.values()], held, atol=1e-6)
    # The trace of the matrix that maps targets to predictions.
    trace = np.trace(Z @ np.linalg.solve(Z.T @ Z + penalty, Z.T))
    assert result_record(study)["effective_features"] == pytest.approx(trace, rel=1e-6)
    rows = list(csv.DictReader(io.StringIO(features_csv(list(found.values()), []))))
    assert [row["feature"] for row in rows] == list(found)
    assert float(rows[1]["penalty"]) == found["signal_1"]["penalty"]
    # Standardising changes neither the predictions nor the penalties in the units of the table.
    ours = Ridge(1.0).fit(X / np.sqrt([one["penalty_raw"] for one in found.values()]), frame["y"])
    assert np.allclose(
        ours.coef_ / np.sqrt([one["penalty_raw"] for one in found.values()]),
        [one["coefficients_raw"][0] for one in found.values()],
    )


def test_what_holds_a_coefficient_where_features_outnumber_rows():
    draw = np.random.default_rng(0)
    X, penalty, weights = draw.normal(size=(20, 45)), draw.uniform(0.1, 50, 45), draw.uniform(0.5, 2, 20)
    centred = np.sqrt(weights)[:, None] * (X - weights @ X / weights.sum())
    expected = penalty * np.diag(np.linalg.inv(centred.T @ centred + np.diag(penalty)))
    assert np.allclose(_shrinkage(X, penalty, weights), expected, rtol=1e-9)


def test_three_classes(place):
    study = tuned(wine(place / "wine.csv"), target="target", model="logistic", max_iter=3)
    assert study.model.coefficients.shape == (3, 13) and study.model.classes == ["0", "1", "2"]
    ours = study.verdict.ours
    assert np.allclose(ours.predicted.sum(1), 1) and ours.scores["accuracy"] > 0.9
    y = study.used.y
    assert ours.scores["auc"] == pytest.approx(roc_auc_score(y, ours.predicted, multi_class="ovr"))
    assert ours.scores["balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(y, np.array(["0", "1", "2"])[ours.predicted.argmax(1)])
    )
    header = features_csv(feature_rows(study), study.model.classes).splitlines()[0]
    assert header.startswith("feature,column,coefficient 0,coefficient 1,coefficient 2,coefficient_raw 0")
    confusion = np.array(chart_points(study)["confusion"])
    assert confusion.sum() == 178 and confusion.trace() == round(178 * ours.scores["accuracy"])


def test_groups_share_a_penalty(place, tmp_path):
    path = cancer(place / "cancer.csv")
    file = tmp_path / "groups.json"
    names = [name for name in pd.read_csv(path).columns if name != "target"]
    file.write_text(json.dumps({"mean": names[:10], "error": names[10:20], "worst": names[20:]}))
    study = tuned(path, target="target", model="logistic", penalty="groups", group=(str(file),), max_iter=3)
    penalties = study.model.penalty.reshape(3, 10)
    assert np.ptp(penalties, axis=1).max() == 0 and len(np.unique(penalties)) <= 3
    assert [one["group"] for one in feature_rows(study)] == ["mean"] * 10 + ["error"] * 10 + ["worst"] * 10
    assert "group" in features_csv(feature_rows(study), study.model.classes).splitlines()[0]


def test_groups_may_name_columns_that_are_left_out(tmp_path):
    path = flats(tmp_path / "flats.csv", constant=1)
    file = tmp_path / "groups.json"
    groups = {"size": "one", "lift": "one", "town": "two", "constant": "two"}
    file.write_text(json.dumps(groups))
    settings = {"target": "price", "drop": ("weight",), "group": (str(file),), "max_iter": 2}
    assert {one["group"] for one in feature_rows(tuned(path, **settings))} == {"one", "two"}
    file.write_text(json.dumps({**groups, "garden": "one"}))
    with refused("names 'garden', not among the columns of the table"):
        tuned(path, **settings)
    file.write_text(json.dumps({"size": "one", "lift": "one"}))
    with refused("has no group for column 'town'"):
        tuned(path, **settings)


def test_indicators_of_a_column_may_share_a_penalty(tmp_path):
    # The target depends only on the town, so its penalty differs from the others.
    rows = pd.read_csv(flats(tmp_path / "all.csv", seed=1))
    noise = np.random.default_rng(11).normal(0, 20, len(rows))
    price = (30.0 * (rows["town"] == "Oslo") - 30.0 * (rows["town"] == "Rome") + noise).round(2)
    path = flats(tmp_path / "flats.csv", seed=1, price=price)
    study = tuned(path, target="price", drop=("weight",), penalty="groups", group=("columns",))
    assert study.groups == {"size": "size", "town": "town", "lift": "lift"}
    assert [one["group"] for one in feature_rows(study)] == ["size", "town", "town", "town", "lift"]
    assert study.model.features[2:] == ["town=Lima", "town=Oslo", "town=Rome"]
    assert np.ptp(study.model.penalty[2:]) == 0 and len(set(study.model.penalty)) == 3


def test_elastic_net(place):
    study = tuned(diabetes(place / "diabetes.csv"), target="target", model="elastic-net", l1_ratio=0.8, max_iter=5)
    own = BilevelElasticNet(cv=every_row(study), max_iter=5, l1_ratio=0.8)
    own.fit(standardised(study), study.used.y)
    assert np.allclose(study.model.outputs(study.used.frame), own.predict(standardised(study)), rtol=1e-12)
    assert study.shared[0] == "ElasticNetCV"
    X, y = standardised(study), study.used.y
    w, b = study.model.coefficients[0], study.model.pipeline[-1].intercept_
    slope = X.T @ (y - X @ w - b) / len(y) - 0.2 * study.model.penalty * w
    on = w != 0
    assert np.allclose(slope[on], (0.8 * study.model.penalty * np.sign(w))[on], atol=1e-4)
    assert (np.abs(slope[~on]) <= 0.8 * study.model.penalty[~on] * (1 + 1e-6)).all()


def test_a_run_is_a_function_of_its_seed(place, ridge):
    again = tuned(place / "diabetes.csv", target="target", seed=3, repeats=2, cv=3)
    other = tuned(place / "diabetes.csv", target="target", seed=4, cv=3)
    assert np.array_equal(again.model.coefficients, ridge.model.coefficients)
    assert not np.array_equal(other.verdict.ours.losses, ridge.verdict.ours.losses[:3])
    one, two = result_record(again), result_record(ridge)
    for entry in (*one["comparison"], *two["comparison"]):
        del entry["seconds"]
    del one["history"]["seconds"], two["history"]["seconds"]
    assert one == two


def test_the_record_is_json(ridge):
    found = json.loads(json.dumps(result_record(ridge), allow_nan=False))
    assert found["data"]["rows_used"] == 442 and found["folds"] == 6 and len(found["features"]) == 10
    ours = next(one for one in found["comparison"] if one["ours"])
    assert ours["rmse"] == ridge.verdict.ours.scores["rmse"] and found["saved"] == "BilevelRidge"
    assert sum(one["p"] is None for one in found["comparison"]) == 1
    errors = [one["rmse"] for one in found["comparison"]]
    assert errors == sorted(errors)


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


@pytest.mark.parametrize(
    ("tensors", "facts", "word"),
    [
        ({"scale.mean_": torch.zeros(3)}, {}, "shapes"),
        ({"model.coef_": torch.zeros(3)}, {}, "size"),
        ({"varying.variances_": torch.zeros(4)}, {}, "features"),
        ({}, {"model": "os.system"}, "os.system"),
        ({}, {"settings": {"command": "ls"}}, "command"),
        ({}, {"columns": []}, "empty"),
        ({}, {"version": 1}, "version 1 of the format"),
    ],
)
def test_content_that_does_not_fit_is_refused(ridge, tmp_path, tensors, facts, word):
    file = tmp_path / "model.safetensors"
    ridge.model.save(file)
    arrays, about = read_tensors(file)
    write_tensors(file, {**arrays, **tensors}, {**about, **facts})
    with refused("model.safetensors", word):
        load(file)
