"""The additive model of `bilevel tune`: fitted to raw columns, saved, loaded, and displayed."""

import csv
import io
import json

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.pipeline import Pipeline
from table_fixtures import flats, written

from bilevel.errors import BilevelError
from bilevel.estimators import BilevelAdditiveRegressor
from bilevel.report.table_page import render
from bilevel.tabular import TuneSettings, load, read_table, tune
from bilevel.tabular.candidates import rivals
from bilevel.tabular.results import chart_points, effects_csv, result_record
from bilevel.training.files import read_tensors, write_tensors

QUICK = {"model": "additive", "cv": 2, "repeats": 1, "max_iter": 3}


@pytest.fixture(autouse=True)
def few_rivals(monkeypatch):
    """Compare only with a linear model and the constant. Other tests compare with forests and boosting."""

    def some(classes, *args):
        found = rivals(classes, *args)
        return {name: one for name, one in found.items() if name in ("mean", "class frequencies", "RidgeCV")}

    monkeypatch.setattr("bilevel.tabular.comparing.rivals", some)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A table with every kind of column and with empty fields."""
    path = tmp_path_factory.mktemp("additive") / "mixed.csv"
    frame = pd.read_csv(flats(path, rows=120)).astype(object)
    frame["rooms"] = [f"{i % 9}%" for i in range(120)]
    frame["seen"] = pd.date_range("2024-01-31", periods=120).astype(str)
    frame.loc[3, "size"], frame.loc[5, "town"], frame.loc[7, "lift"], frame.loc[9, "seen"] = [None] * 4
    return written(path, frame)


def test_the_loaded_pipeline_reads_columns_and_predicts_as_the_saved_one(mixed, tmp_path):
    study = tune(read_table(mixed), TuneSettings("price", missing="median", weights="weight", **QUICK))
    assert study.model.model == "additive" and study.shared is None
    assert study.verdict.ours.scores["r2"] > 0.95
    study.model.save(tmp_path / "model.safetensors")
    loaded, frame = load(tmp_path), pd.read_csv(mixed)
    pipeline = loaded.pipeline
    assert isinstance(pipeline, Pipeline) and list(pipeline.named_steps) == ["columns", "model"]
    assert type(pipeline["model"]) is BilevelAdditiveRegressor
    assert loaded.columns == ["size", "town", "lift", "rooms", "seen"] and loaded.classes == []
    new = frame.drop(columns="price")[::-1]
    assert np.array_equal(pipeline.predict(new), study.model.pipeline.predict(new))
    assert loaded.predict(frame).values == study.model.predict(frame).values
    again = clone(pipeline).fit(frame, frame["price"], model__sample_weight=frame["weight"] / frame["weight"].mean())
    assert np.allclose(again.predict(frame), pipeline.predict(frame), rtol=1e-9)
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_new_fields_are_told_and_have_no_effect(tmp_path):
    path = flats(tmp_path / "flats.csv")
    study = tune(read_table(path), TuneSettings("price", missing="median", drop=("weight",), **QUICK))
    frame = pd.read_csv(path).astype(object)
    frame.loc[0, "town"], frame.loc[1, "size"] = "Bern", None
    found = study.model.predict(frame, "new.csv")
    town = next(note for note in found.notes if "'town'" in note)
    assert "1 row of new.csv has a value that the training rows lack, such as 'Bern'; it has no effect" in town
    assert any("Column 'size': 1 empty field of new.csv, with no effect." in note for note in found.notes)
    model, reader = study.model.pipeline["model"], study.model.pipeline["columns"]
    assert model.explain(reader.transform(frame.iloc[[0]]))["town"] == pytest.approx(0, abs=1e-12)


def test_without_filling_empty_fields_are_refused(tmp_path):
    study = tune(read_table(flats(tmp_path / "flats.csv")), TuneSettings("price", missing="error", **QUICK))
    frame = study.table.frame.astype(object)
    frame.loc[4, "town"] = None
    with pytest.raises(BilevelError, match="Column 'town' has no value in 1 row, first in row 5"):
        study.model.pipeline.predict(frame)


DAMAGES = [
    lambda facts, tensors: facts["state"].pop("_coef"),
    lambda facts, tensors: facts["state"]["_design"]["state"]["terms"].pop(),
    lambda facts, tensors: facts.update(model="os.system"),
    lambda facts, tensors: tensors.update({"_coef": tensors["_coef"][:, :-1]}),
    lambda facts, tensors: tensors.update({"_reduction.mean": tensors["_reduction.mean"] * np.inf}),
]


def test_a_damaged_file_is_refused(tmp_path):
    study = tune(read_table(flats(tmp_path / "flats.csv")), TuneSettings("price", **QUICK))
    study.model.save(tmp_path / "model.safetensors")
    for change in DAMAGES:
        tensors, facts = read_tensors(tmp_path / "model.safetensors")
        change(facts["additive"], tensors)
        write_tensors(tmp_path / "broken.safetensors", tensors, facts)
        with pytest.raises(BilevelError, match="is damaged"):
            load(tmp_path / "broken.safetensors")


def test_the_record_and_the_page_have_the_curves(tmp_path):
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"x": draw.uniform(-2, 2, 150), "<b>": draw.choice(["a & b", "c"], 150)})
    frame["y"] = np.sin(2 * frame["x"]) + (frame["<b>"] == "c") + 0.1 * draw.normal(size=150)
    study = tune(read_table(written(tmp_path / "curved.csv", frame)), TuneSettings("y", **QUICK))
    record = result_record(study)
    effects = {one["term"]: one for one in record["effects"]}
    curve, model = effects["x"], study.model.pipeline["model"]
    assert curve["shape"] == "curve" and curve["importance"] == model.importance_["x"]
    truth = np.sin(2 * np.array(curve["grid"]))
    held = (np.array(curve["outputs"][0]["low"]) < truth) & (truth < np.array(curve["outputs"][0]["high"]))
    assert np.corrcoef(truth, curve["outputs"][0]["mean"])[0, 1] > 0.98 and held.mean() > 0.5
    assert effects["<b>"]["shape"] == "categories" and effects["<b>"]["grid"] == ["a & b", "c"]
    rows = list(csv.DictReader(io.StringIO(effects_csv(record["effects"]))))
    assert {(row["term"], row["part"]) for row in rows} >= {("x", "linear"), ("x", "curve"), ("<b>", "category")}
    run = {"command": "bilevel tune", "machine": {}}
    page = render(json.loads(json.dumps({**record, **run})), json.loads(json.dumps(chart_points(study))))
    assert 'id="effect-1"' in page and "&lt;b&gt;" in page and "<h3><b>" not in page
    assert "All terms" in page and "Coefficients and penalties" not in page


def test_penalties_of_linear_models_are_refused():
    with pytest.raises(BilevelError, match="--penalty shared is for linear models"):
        TuneSettings("y", model="additive", penalty="shared")
    with pytest.raises(BilevelError, match="--group is for linear models"):
        TuneSettings("y", model="additive", group=("prefix",))
