"""What is said about tables that cannot be used: always the column, the row where there is one, and a way out."""

import numpy as np
import pandas as pd
import pytest
from table_fixtures import cancer, diabetes, flats, written

from asking import refused
from bilevel.tabular.preparing import prepare
from bilevel.tabular.reading import read_table
from bilevel.tabular.settings import TuneSettings

FLATS = {"target": "price", "one_hot": True, "drop": ("weight",)}


def prepared(path, **settings):
    return prepare(read_table(path), TuneSettings(**settings))


def column(values, rows=80):
    return [values[i % len(values)] for i in range(rows)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (column(["Oslo", "Rome"]), ["Column 'new' holds text", "'Oslo' in row 1", "--categorical new", "--drop new"]),
        ([f"flat {i}" for i in range(80)], ["'new' has another value in every row", "--drop new"]),
        ([f"street {i % 50}" for i in range(80)], ["50 different values in 80 rows", "--drop new"]),
        ([*column([1, 2, 3, 4], 79), "x"], ["'new' has text among its numbers", "'x' in row 80", "1 row"]),
        (column(["2020-01-01", "2020-02-01"]), ["'new' holds dates", "row 1", "days since"]),
        ([7] * 80, ["'new' is constant", "'7'", "--drop new"]),
        (["same"] * 80, ["'new' is constant", "'same'"]),
        ([None] * 80, ["'new' has no values at all"]),
        ([1.0, float("inf"), *range(78)], ["'new' is infinite", "row 2"]),
        ([1.0, -2e200, *range(78)], ["'new' is too large", "row 2"]),
        ([1.0, None, *range(78)], ["empty fields in column 'new'", "1 row, first row 2", "--missing median"]),
        (column(["1,5", "2,5", "3,0"]), ["'new' holds numbers with a decimal comma", "--decimal ','"]),
    ],
)
def test_a_column_that_cannot_be_a_feature(tmp_path, values, words):
    path = flats(tmp_path / "flats.csv", new=values)
    with refused(*words):
        prepared(path, target="price", drop=("weight", "town"))


def test_a_target_with_decimal_commas(tmp_path):
    path = flats(tmp_path / "flats.csv", price=[f"{i},5" for i in range(80)])
    with refused("target 'price' holds numbers with a decimal comma", "'0,5' in row 1", "--decimal ','"):
        prepared(path, **FLATS)


@pytest.mark.parametrize("positive", ["training", "test"])
def test_weights_that_reach_one_side_of_the_split_only(tmp_path, positive):
    train = prepared(flats(tmp_path / "a.csv"), **FLATS).train
    path = flats(tmp_path / "b.csv", weight=(train if positive == "training" else ~train).astype(float))
    with refused("--weights 'weight' is 0 in all", "test row" if positive == "training" else "training row"):
        prepared(path, **{**FLATS, "drop": (), "weights": "weight"})


def test_all_bad_columns_are_named_at_once(tmp_path):
    path = flats(tmp_path / "flats.csv", flat=1, day=column(["2020-01-01", "2020-02-01"]), gap=[None, *range(79)])
    with refused("Some columns", "'town'", "'flat'", "'day'", "'gap'"):
        prepared(path, target="price")


def test_a_saved_row_number(tmp_path):
    pd.read_csv(flats(tmp_path / "a.csv")).to_csv(tmp_path / "b.csv")
    with refused("no name in the header", "--drop 'Unnamed: 0'"):
        prepared(tmp_path / "b.csv", **FLATS)
    assert prepared(tmp_path / "b.csv", **{**FLATS, "drop": ("weight", "Unnamed: 0")}).names[0] == "size"
    path = flats(tmp_path / "c.csv", number=range(100, 180))
    assert any("'number' counts the rows" in note for note in prepared(path, **FLATS).notes)
    path = flats(tmp_path / "d.csv", flat_id=np.random.default_rng(0).permutation(1000)[:80])
    assert [note for note in prepared(path, **FLATS).notes if "'flat_id'" in note and "--drop flat_id" in note]
    assert not [note for note in prepared(flats(tmp_path / "e.csv"), **FLATS).notes if "--drop" in note]


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({}, {"target": "prize"}, ["--target 'prize'", "Did you mean 'price'", "'size'"]),
        ({}, {"target": "Price"}, ["Did you mean 'price'"]),
        ({}, {"drop": ("sise",)}, ["--drop 'sise'", "Did you mean 'size'"]),
        ({}, {"weights": "w"}, ["--weights 'w' is not a column"]),
        ({}, {"categorical": ("twon",)}, ["--categorical 'twon'", "Did you mean 'town'"]),
        ({}, {"categorical": ("weight",)}, ["--categorical 'weight' is not a feature"]),
        ({}, {"drop": ("size", "town", "lift", "weight")}, ["no column left to predict 'price' from", "--separator"]),
        ({"price": 3}, {}, ["target 'price' has a single value, '3'"]),
        ({"price": "yes"}, {}, ["target 'price' has a single class, 'yes'"]),
        ({"price": [None] * 80}, {}, ["target 'price' has no values"]),
        (
            {"price": [*range(79), None]},
            {},
            ["target 'price' has no value in 1 row, first in row 80", "--missing drop"],
        ),
        ({"price": [*range(79), "cheap"]}, {}, ["text among its numbers: 'cheap' in row 80"]),
        ({"price": [*range(79), "inf"]}, {}, ["'price' is infinite", "row 80"]),
        ({"price": [*range(79), 1e200]}, {}, ["target 'price' is too large to be squared", "row 80"]),
        ({"price": column(["2020-01-01", "2020-01-02"])}, {}, ["holds dates"]),
        ({"price": [f"p{i % 40}" for i in range(80)]}, {}, ["40 different values in 80 rows", "too many for classes"]),
        ({}, {"model": "logistic"}, ["different values", "--model ridge"]),
        ({"price": column(["a", "b"])}, {"model": "ridge"}, ["'price' holds text", "--model logistic"]),
        ({"price": ["a"] * 77 + ["b"] * 3}, {}, ["classes with few rows: 'b'", "--cv 5"]),
        ({"weight": [-1, *[1] * 79]}, {"weights": "weight", "drop": ()}, ["--weights 'weight'", "-1.* in row 1"]),
        ({"weight": 0}, {"weights": "weight", "drop": ()}, ["--weights 'weight'", "more than 0"]),
        ({"weight": column(["a", "b"])}, {"weights": "weight", "drop": ()}, ["--weights 'weight'", "'a' in row 1"]),
    ],
)
def test_targets_and_options_that_cannot_work(tmp_path, changes, settings, words):
    path = flats(tmp_path / "flats.csv", **changes)
    with refused(*words):
        prepared(path, **{**FLATS, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "svm"}, ["--model svm", "ridge, elastic-net, logistic"]),
        ({"penalty": "all"}, ["--penalty all", "shared, per-feature, groups"]),
        ({"missing": "mean"}, ["--missing mean", "error, median, drop"]),
        ({"cv": 1}, ["--cv 1", "2 or more"]),
        ({"test": 1.0}, ["--test 1", "0.25"]),
        ({"l1_ratio": 0.0}, ["--l1-ratio 0", "--model ridge"]),
        ({"penalty": "groups"}, ["--penalty groups needs --groups"]),
        ({"groups": "prefix"}, ["--groups needs --penalty groups, not per-feature"]),
        ({"drop": ("price",)}, ["'price' cannot be dropped"]),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with refused(*words):
        TuneSettings(**{"target": "price", **settings})


def test_too_few_rows_say_how_many_are_needed(tmp_path):
    for rows in (2, 5, 12):
        with refused(f"{rows} usable rows", "--cv 5", "need 14"):
            prepared(flats(tmp_path / "few.csv", rows=rows), target="price", drop=("weight", "town", "lift"))
    assert (
        prepared(flats(tmp_path / "enough.csv", rows=14), target="price", drop=("weight", "town", "lift")).train.sum()
        == 10
    )


def test_everything_learned_comes_from_the_training_rows(tmp_path):
    path = flats(tmp_path / "flats.csv")
    found = prepared(path, **FLATS)
    assert found.names == ["size", "town=Lima", "town=Oslo", "town=Rome", "lift"]
    assert found.train.sum() == 60 and found.test.sum() == 20
    z = found.standardised(found.train)
    assert np.allclose(z.mean(0), 0, atol=1e-12) and np.allclose(z.std(0), 1)
    assert not np.allclose(found.standardised(found.test).mean(0), 0, atol=1e-3)
    # Test rows that are changed change nothing else.
    frame = pd.read_csv(path)
    frame.loc[np.flatnonzero(found.test), "size"] = 1e6
    frame.loc[np.flatnonzero(found.test), "town"] = "Bonn"
    other = prepared(written(tmp_path / "other.csv", frame), **FLATS)
    assert np.array_equal(other.train, found.train)
    assert np.array_equal(other.standardised(other.train), z)
    assert any("'Bonn' in row" in note and "20 rows" in note for note in other.notes)
    assert (other.features[other.test, 1:4] == 0).all()


def test_missing_fields_are_filled_or_their_rows_left_out(tmp_path):
    frame = pd.read_csv(flats(tmp_path / "flats.csv")).astype(object)
    frame.loc[3, "size"], frame.loc[5, "town"], frame.loc[7, "lift"], frame.loc[9, "price"] = [None] * 4
    path = written(tmp_path / "gaps.csv", frame)
    filled = prepared(path, **FLATS, missing="median")
    assert len(filled.y) == 79 and 10 not in filled.rows
    known = frame["size"].to_numpy(dtype=float)[filled.rows[filled.train] - 1]
    assert filled.features[list(filled.rows).index(4), 0] == pytest.approx(np.nanmedian(known))
    assert filled.features[list(filled.rows).index(6), 1:4].sum() == 1
    assert filled.features[list(filled.rows).index(8), 4] in (0, 1)
    assert sum("filled with" in note for note in filled.notes) == 3
    left = prepared(path, **FLATS, missing="drop")
    assert len(left.y) == 76 and not set(left.rows) & {4, 6, 8, 10} and not np.isnan(left.features).any()
    assert any("Left out 3 rows with empty fields" in note for note in left.notes)


def test_a_feature_that_is_constant_in_training_gets_no_coefficient(tmp_path):
    path = flats(tmp_path / "flats.csv")
    rows = prepared(path, **FLATS).test
    rare = np.zeros(80)
    rare[np.flatnonzero(rows)[0]] = 1
    found = prepared(flats(tmp_path / "rare.csv", rare=rare), **FLATS)
    assert found.used.tolist() == [True] * 5 + [False] and any("'rare'" in note for note in found.notes)
    assert np.isfinite(found.standardised(found.test)).all()


def test_the_model_follows_from_the_target(tmp_path):
    assert prepared(diabetes(tmp_path / "a.csv"), target="target").model == "ridge"
    found = prepared(cancer(tmp_path / "b.csv"), target="target")
    assert found.model == "logistic" and found.target.classes == ("benign", "malignant")
    share = [(found.y[rows] == 1).mean() for rows in (found.train, found.test)]
    assert share[0] == pytest.approx(share[1], abs=0.01)  # both classes are split alike
    two = prepared(flats(tmp_path / "c.csv"), target="lift", one_hot=True)
    assert two.model == "logistic" and two.target.classes == ("False", "True")
    assert "'lift' has two values" in two.reason
    as_number = prepared(flats(tmp_path / "c.csv"), target="lift", one_hot=True, model="ridge")
    assert set(as_number.y) == {0.0, 1.0} and as_number.reason == ""
