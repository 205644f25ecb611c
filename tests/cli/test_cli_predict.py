"""`bilevel predict`: every row in order, equal to the estimator, and clear words about tables that do not fit."""

import csv
import io
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.preprocessing import StandardScaler
from typer.testing import CliRunner

from bilevel.cli import build
from bilevel.estimators import BilevelAdditiveRegressor, BilevelLogisticRegression, BilevelRidge
from bilevel.tabular import TuneSettings, load, read_table
from bilevel.tabular.preparing import used_table

QUICK = ["--max-iter", "5", "--repeats", "1", "--cv", "2"]

FLATS = ["--target", "price", "--penalty", "shared", "--model", "ridge"]


def call(*arguments):
    return CliRunner().invoke(build(), [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models of numbers and of classes, and of a table with text, truth values and gaps, each beside its table."""
    root = tmp_path_factory.mktemp("predict")
    load_diabetes(as_frame=True, scaled=False).frame.to_csv(root / "diabetes.csv", index=False)
    data = load_breast_cancer(as_frame=True)
    data.frame.assign(target=data.target_names[data.target]).to_csv(root / "cancer.csv", index=False)
    draw = np.random.default_rng(0)
    size, town, lift = draw.uniform(20, 120, 80).round(1), draw.choice(["Oslo", "Rome"], 80), draw.random(80) < 0.5
    price = 3 * size + 40 * (town == "Oslo") + 10 * lift + draw.normal(0, 3, 80)
    flats = pd.DataFrame({"size": size, "town": town, "lift": lift, "price": price})
    flats.to_csv(root / "flats.csv", index=False)
    gaps = flats.astype(object)
    gaps.loc[4, "size"] = gaps.loc[6, "town"] = None
    gaps.to_csv(root / "gaps.csv", index=False)
    for name, table, *options in (
        ("number", "diabetes.csv", "--target", "target", "--model", "ridge"),
        ("classes", "cancer.csv", "--target", "target", "--model", "logistic"),
        ("curves", "flats.csv", "--target", "price", "--model", "additive"),
        ("flats", "flats.csv", *FLATS, "--missing", "error"),
        ("filled", "gaps.csv", *FLATS),
        ("dropped", "gaps.csv", *FLATS, "--missing", "drop"),
    ):
        done = call("tune", root / table, *options, "--out", root / name, *QUICK)
        assert done.exit_code == 0, done.output
    return root


@pytest.fixture
def flats(place, tmp_path):
    def write(model="flats", **changes):
        frame = pd.read_csv(place / "flats.csv").astype(object).iloc[:5].drop(columns="price")
        for name, values in changes.items():
            frame[name] = values
        frame.to_csv(tmp_path / "new.csv", index=False)
        return call("predict", place / model, tmp_path / "new.csv", "--only")

    return write


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_predictions_of_curves_equal_the_estimators(place):
    frame = pd.read_csv(place / "flats.csv")
    columns = frame[["size", "town", "lift"]]
    own = BilevelAdditiveRegressor(max_iter=5).fit(columns, frame["price"])
    done = call("predict", place / "curves", place / "flats.csv", "--only", "--json")
    assert np.allclose(json.loads(done.stdout)["predictions"], own.predict(columns), rtol=1e-9)
    page = (place / "curves" / "page.html").read_text(encoding="utf-8")
    assert 'aria-label="The effect of size"' in page and (place / "curves" / "picture.png").stat().st_size > 20_000


@pytest.mark.parametrize("kind", ["number", "classes"])
def test_predictions_equal_the_estimators(place, kind):
    table = read_table(place / ("diabetes.csv" if kind == "number" else "cancer.csv"))
    used = used_table(table, TuneSettings("target", max_iter=5, cv=2))
    estimator = (BilevelRidge if kind == "number" else BilevelLogisticRegression)(
        cv=used.splits.inner(np.arange(len(used.y))), max_iter=5
    )
    every = StandardScaler().fit_transform(used.frame)
    estimator.fit(every, used.y)
    done = call("predict", place / kind, table.path, "--json", *(["--proba"] if kind == "classes" else []))
    found = json.loads(done.stdout)
    if kind == "number":
        assert np.allclose(found["predictions"], estimator.predict(every), rtol=1e-12, atol=1e-12)
    else:
        chances = np.array([found["probabilities"][name] for name in ("benign", "malignant")]).T
        assert np.allclose(chances, estimator.predict_proba(every), rtol=1e-12, atol=1e-12)
        assert found["predictions"] == estimator.predict(every).tolist()


def test_rows_are_kept_as_they_are_with_a_column_more(place, tmp_path):
    text = (place / "diabetes.csv").read_text().splitlines()
    text[1] = text[1].replace("59.0", "59.00000")  # it must come out as it went in
    new = tmp_path / "new.csv"
    new.write_text("\n".join(text) + "\n")
    before = new.read_bytes(), new.stat().st_mtime_ns
    done = call("predict", place / "number" / "model.safetensors", new, "--out", tmp_path / "out.csv")
    assert done.exit_code == 0 and str(tmp_path / "out.csv") in done.stdout
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert [line.rpartition(",")[0] for line in lines] == text and lines[0].endswith(",prediction")
    printed = call("predict", place / "number", new)
    assert printed.stdout.splitlines() == lines
    assert before == (new.read_bytes(), new.stat().st_mtime_ns)
    only = rows(call("predict", place / "number", new, "--only").stdout)
    assert [row["prediction"] for row in only] == [line.rpartition(",")[2] for line in lines[1:]]
    frame = pd.read_csv(new)
    values = load(place / "number").predict(frame).values
    assert [float(row["prediction"]) for row in only] == values


def test_a_semicolon_stays_a_semicolon(place, tmp_path):
    text = (place / "flats.csv").read_text()
    (tmp_path / "new.csv").write_text(text.replace(",", ";"))
    done = call("predict", place / "flats", tmp_path / "new.csv")
    assert done.stdout.splitlines()[0] == "size;town;lift;price;prediction"
    commas = call("predict", place / "flats", place / "flats.csv", "--only").stdout
    assert [line.rpartition(";")[2] for line in done.stdout.splitlines()] == commas.splitlines()


@pytest.mark.parametrize("name", ["new.xlsx", "new.csv.gz"])
def test_excel_and_gzip(place, tmp_path, name):
    frame = pd.read_csv(place / "flats.csv").iloc[:9]
    frame.to_excel(tmp_path / name, index=False) if "xlsx" in name else frame.to_csv(tmp_path / name, index=False)
    expected = call("predict", place / "flats", place / "flats.csv", "--only").stdout.splitlines()[:10]
    assert call("predict", place / "flats", tmp_path / name, "--only").stdout.splitlines() == expected
    done = call("predict", place / "flats", tmp_path / name, "--out", tmp_path / f"out-{name}")
    assert done.exit_code == 0, done.output
    found = (pd.read_excel if "xlsx" in name else pd.read_csv)(tmp_path / f"out-{name}")
    assert found["prediction"].tolist() == pytest.approx([float(value) for value in expected[1:]])
    pd.testing.assert_frame_equal(found.drop(columns="prediction"), frame)


def test_parquet(place, tmp_path):
    pd.read_csv(place / "cancer.csv").to_parquet(tmp_path / "new.parquet")
    one = call("predict", place / "classes", tmp_path / "new.parquet", "--only", "--proba")
    two = call("predict", place / "classes", place / "cancer.csv", "--only", "--proba")
    assert one.stdout == two.stdout and one.stdout.startswith("prediction,probability_benign,probability_malignant\n")


@pytest.mark.parametrize("only", [False, True])
def test_parquet_out(place, tmp_path, only):
    arguments = ["--proba", *(["--only"] if only else [])]
    done = call("predict", place / "classes", place / "cancer.csv", "--out", tmp_path / "p.parquet", *arguments)
    assert done.exit_code == 0, done.output
    found = pd.read_parquet(tmp_path / "p.parquet")
    call("predict", place / "classes", place / "cancer.csv", "--out", tmp_path / "p.csv", *arguments)
    pd.testing.assert_frame_equal(found, pd.read_csv(tmp_path / "p.csv"))
    assert len(found.columns) == (3 if only else 34)


def test_the_error_is_said_where_the_target_is_known(place, tmp_path):
    done = call("predict", place / "classes", place / "cancer.csv", "--only")
    assert "accuracy" in done.stderr and "tuned on this file" in done.stderr
    frame = pd.read_csv(place / "diabetes.csv").iloc[:50]
    frame.loc[3, "target"] = None
    frame.to_csv(tmp_path / "new.csv", index=False)
    done = call("predict", place / "number", tmp_path / "new.csv", "--json")
    found = json.loads(done.stdout)
    error = (np.array(found["predictions"]) - frame["target"]).drop(3)
    assert found["score"]["rmse"] == pytest.approx(np.sqrt((error**2).mean())) and found["score"]["rows"] == 49
    assert any("1 of 50 rows" in note for note in found["notes"])
    assert "Errors on 49 rows" in call("predict", place / "number", tmp_path / "new.csv").stderr
    without = frame.drop(columns="target")
    without.to_csv(tmp_path / "new.csv", index=False)
    done = call("predict", place / "number", tmp_path / "new.csv")
    assert done.exit_code == 0 and "Errors" not in done.stderr and len(done.stdout.splitlines()) == 51


def test_extra_columns_are_named_and_order_does_not_matter(place, flats, tmp_path):
    plain = flats().stdout
    noted = flats(garden=1)
    assert noted.stdout == plain and "does not use: 'garden'" in noted.stderr
    frame = pd.read_csv(tmp_path / "new.csv")
    frame[frame.columns[::-1]].to_csv(tmp_path / "new.csv", index=False)
    assert call("predict", place / "flats", tmp_path / "new.csv", "--only").stdout == plain


def test_a_new_category_is_zeros_and_a_note(place, flats):
    done = flats(town=["Oslo", "Rome", "Bonn", "Oslo", "Bonn"])
    assert done.exit_code == 0 and "'town': 2 rows" in done.stderr and "such as 'Bonn'" in done.stderr
    assert "all of its indicators are 0 there, as for 'Oslo'" in done.stderr
    pipeline = load(place / "flats").pipeline
    assert list(pipeline["columns"].get_feature_names_out()) == ["size", "lift", "town=Rome"]
    frame = pd.read_csv(place / "flats.csv").iloc[2:3].drop(columns="price")
    features = np.array([[frame["size"].iloc[0], float(frame["lift"].iloc[0]), 0]])
    assert float(rows(done.stdout)[2]["prediction"]) == pytest.approx(pipeline[1:].predict(features)[0], rel=1e-14)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": [50, 60, "big", 70, 80]}, ["Column 'size'", "'big' in row 3", "is not a finite number"]),
        ({"size": [50, 60, None, 70, 80]}, ["Column 'size'", "1 row, first in row 3", "--missing median"]),
        ({"town": ["Oslo", None, "Rome", "Rome", "Oslo"]}, ["Column 'town'", "first in row 2"]),
        (
            {"size": ["50,5", "60", "7,25", "70", "80"]},
            ["'50,5' in row 1 is not a finite number", "Write --decimal ','"],
        ),
        ({"size": [50, "inf", 1, 70, 80]}, ["Column 'size'", "'inf' in row 2", "is not a finite number"]),
        ({"lift": ["True", "maybe", "True", "True", "True"]}, ["Column 'lift'", "'maybe' in row 2", "True or False"]),
        ({"lift": [0, 1, 2, 0, 1]}, ["Column 'lift'", "'2' in row 3", "True or False"]),
    ],
)
def test_fields_that_do_not_fit(flats, changes, words):
    failed = flats(**changes)
    assert failed.exit_code == 2 and failed.stdout == ""
    for word in words:
        assert word in failed.stderr, failed.stderr


def test_truth_values_may_be_written_as_numbers(flats):
    plain = flats(lift=[True, False, True, False, True]).stdout
    assert flats(lift=[1, 0, 1, 0, 1]).stdout == plain and len(plain.splitlines()) == 6


def test_gaps_are_filled_or_left_without_a_prediction(place, flats):
    filled = flats("filled", size=[50, None, 60, 70, 80])
    assert filled.exit_code == 0 and "the median of the training rows" in filled.stderr
    assert all(row["prediction"] for row in rows(filled.stdout))
    left = flats("dropped", size=[50, None, 60, 70, 80], town=["Oslo", "Rome", None, "Rome", "Rome"])
    # An empty line is how CSV writes an empty field that stands alone.
    assert [bool(line.strip('"')) for line in left.stdout.splitlines()[1:]] == [True, False, False, True, True]
    assert "2 of 5 rows have empty fields (first row 2)" in left.stderr


def test_a_missing_column_is_named(place, tmp_path):
    frame = pd.read_csv(place / "flats.csv").rename(columns={"size": "sizes"}).drop(columns="lift")
    frame.to_csv(tmp_path / "new.csv", index=False)
    failed = call("predict", place / "flats", tmp_path / "new.csv")
    assert failed.exit_code == 2 and failed.stdout == ""
    for word in ("lacks the columns 'size', 'lift'", "'sizes' is similar to 'size'"):
        assert word in failed.stderr


@pytest.mark.parametrize("wrong", ["text", "foreign", "cut", "none", "folder"])
def test_models_that_are_none(place, tmp_path, wrong):
    file = tmp_path / "model.safetensors"
    if wrong == "text":
        file.write_text("no model")
    if wrong == "foreign":
        import torch
        from safetensors.torch import save_file

        save_file({"weight": torch.zeros(2)}, file)
    if wrong == "cut":
        file.write_bytes((place / "number" / "model.safetensors").read_bytes()[:-16])
    failed = call("predict", tmp_path if wrong == "folder" else file, place / "diabetes.csv")
    assert failed.exit_code == 2 and failed.stderr.startswith("Error: ") and failed.stdout == ""
    word = {"text": "damaged", "foreign": "holds no model", "cut": "damaged", "none": "not exist", "folder": "has no"}
    assert word[wrong] in failed.stderr


def test_outputs_that_cannot_be(place, tmp_path):
    new = tmp_path / "new.csv"
    shutil.copy(place / "diabetes.csv", new)
    before = new.read_bytes()
    for arguments, word in (
        (["--out", new], "is the table itself"),
        (["--out", tmp_path], "it is a folder"),
        (["--out", tmp_path / "out.json"], "cannot be written as .json. Write .csv, .csv.gz, .parquet or .xlsx."),
        (["--out", tmp_path / "no" / "out.csv"], "there is no folder"),
        (["--proba"], "--proba needs a model of classes"),
    ):
        failed = call("predict", place / "number", new, *arguments)
        assert failed.exit_code == 2 and word in failed.stderr
    assert new.read_bytes() == before
    pd.read_csv(new).assign(prediction=1).to_csv(new, index=False)
    failed = call("predict", place / "number", new)
    assert failed.exit_code == 2 and "has a column 'prediction' already" in failed.stderr
    assert call("predict", place / "number", new, "--only").exit_code == 0
