"""Errors about unusable tables name the column, the row if there is one, and what to write instead."""

import numpy as np
import pandas as pd
import pytest
from table_fixtures import cancer, diabetes, flats, written

from asking import refused
from bilevel.tabular.columns import preprocessing, transformed
from bilevel.tabular.model import field_notes
from bilevel.tabular.preparing import used_table
from bilevel.tabular.reading import read_table
from bilevel.tabular.settings import TuneSettings
from bilevel.tabular.study import tune

FLATS = {"target": "price", "drop": ("weight",)}


def prepared(path, **settings):
    return used_table(read_table(path), TuneSettings(**settings))


def features(used, fill=False, rows=slice(None)):
    """The preprocessing of a table, fitted to some of its rows."""
    return preprocessing(used.kinds, fill).fit(used.frame.iloc[rows])


def column(values, rows=80):
    return [values[i % len(values)] for i in range(rows)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            [f"${i},000.50" for i in range(80)],
            ["'new' holds numbers with '\\$'", "'\\$0,000.50' in row 1", "--drop new"],
        ),
        ([f"street {i % 50}" for i in range(80)], ["50 different values in 80 rows", "--drop new"]),
        (
            [*column([1, 2, 3, 4], 79), "x"],
            ["'new' has values of another kind among its numbers", "'x' in row 80", "1 row"],
        ),
        (column(["1/2/2020", "3/4/2020"]), ["'new' holds dates", "whether the day or the month", "2024-03-31"]),
        ([*column(["2020-01-01", "2020-02-03"], 79), "2020-19-45"], ["'new' holds dates, but '2020-19-45' in row 80"]),
        (column(["1,200%", "85%", "7%"]), ["percentages with a comma", "'1,200%' in row 1", "1200%"]),
        ([f"{i},{i:03}%" for i in range(1, 81)], ["percentages with a comma", "--drop new"]),
        ([*column(["7%", "8%"], 79), "much"], ["'new' has values of another kind", "'much' in row 80"]),
        ([1.0, float("inf"), *range(78)], ["'new' is infinite", "row 2"]),
        ([1.0, -2e200, *range(78)], ["'new' is too large", "row 2"]),
        ([1.0, None, *range(78)], ["empty fields in column 'new'", "1 row, first row 2", "--missing median"]),
        (column(["1,5", "2,5", "3,0"]), ["'new' holds numbers with a comma", "'1,5' in row 1", "--decimal ','"]),
        (column(["1,5", "2", "3,0"]), ["'new' holds numbers with a comma", "--decimal ','"]),
        ([f"{i},5" for i in range(80)], ["'new' holds numbers with a comma", "--decimal ','"]),
        (column(["1,500", "12,000", "3"]), ["'new' holds numbers with a comma", "--thousands ','", "--decimal ','"]),
        (column(["1,500.5", "12,000.0", "3"]), ["Write --thousands ','."]),
        (column(["1.500,25", "12.000", "3,5"]), ["numbers with a comma", "--decimal ',' --thousands '.'"]),
    ],
)
def test_a_column_that_cannot_be_a_feature(tmp_path, values, words):
    path = flats(tmp_path / "flats.csv", new=values)
    with refused(*words):
        prepared(path, target="price", drop=("weight", "town"), missing="error")


def test_a_target_with_decimal_commas(tmp_path):
    path = flats(tmp_path / "flats.csv", price=[f"{i},5" for i in range(80)])
    with refused("target 'price' holds numbers with a comma", "'0,5' in row 1", "--decimal ','"):
        prepared(path, **FLATS)


def test_all_bad_columns_are_named_at_once(tmp_path):
    path = flats(
        tmp_path / "flats.csv",
        flat=column(["1,5", "2,5"]),
        day=column(["1/2/2020", "2/2/2020"]),
        gap=[None, *range(79)],
    )
    with refused("Some columns", "'flat'", "'day'", "'gap'"):
        prepared(path, target="price", missing="error")


def test_text_is_categories_and_a_note_says_so(tmp_path):
    one = prepared(flats(tmp_path / "one.csv"), target="price")
    assert one.kinds["town"] == "categories"
    values = pd.read_csv(tmp_path / "one.csv")["town"].nunique()
    assert f"Column 'town' holds text: its {values} values are categories." in one.notes
    two = prepared(flats(tmp_path / "two.csv", colour=column(["red", "blue"])), target="price")
    assert two.kinds["colour"] == "categories"
    assert "Columns 'town', 'colour' hold text: their values are categories." in two.notes
    named = prepared(tmp_path / "one.csv", target="price", categorical=("town",))
    assert not any("holds text" in note for note in named.notes)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("new", [7] * 80, "constant (always '7')"),
        ("new", ["same"] * 80, "constant (always 'same')"),
        ("new", [None] * 80, "no values"),
        ("new", [f"flat {i}" for i in range(80)], "another value in every row ('flat 0' in row 1)"),
        ("flat_id", np.random.default_rng(0).permutation(1000)[:80], "another value in every row"),
        ("userId", range(80), "another value in every row"),
        ("Unnamed: 7", range(80), "no name in the header"),
        ("rownames", range(1, 81), "it counts the rows"),
    ],
)
def test_a_column_from_which_nothing_can_be_learned_is_left_out(tmp_path, name, values, words):
    path = flats(tmp_path / "flats.csv", **{name: values})
    found = prepared(path, **FLATS)
    assert list(found.kinds) == list(found.frame.columns) == ["size", "town", "lift"]
    assert [note for note in found.notes if f"Left out column {name!r}" in note and words in note]


def test_nothing_is_left_to_learn_from(tmp_path):
    path = flats(tmp_path / "flats.csv", size=1, town="Rome", lift=True)
    with refused("no column to learn from", "'size'", "constant"):
        prepared(path, **FLATS)


def test_a_column_that_counts_the_rows_is_kept_with_a_note(tmp_path):
    found = prepared(flats(tmp_path / "flats.csv", number=range(100, 180)), **FLATS)
    assert "number" in found.kinds
    assert any("'number' counts the rows" in note and "--drop number" in note for note in found.notes)
    assert not any("counts the rows" in note for note in prepared(flats(tmp_path / "flats.csv"), **FLATS).notes)


@pytest.mark.parametrize("name", ["heat_index", "Covid", "grid", "flat_id"])
def test_measurements_that_differ_in_every_row_are_kept(tmp_path, name):
    values = np.random.default_rng(0).normal(size=80)
    assert name in prepared(flats(tmp_path / "flats.csv", **{name: values}), **FLATS).kinds


def test_percentages_are_one_feature(tmp_path):
    path = flats(tmp_path / "flats.csv", new=[f"{i % 60}%" for i in range(80)])
    found = prepared(path, **FLATS)
    assert found.kinds["new"] == "numbers"
    steps = features(found)
    place = list(steps.get_feature_names_out()).index("new")
    assert steps["columns"].transform(found.frame)[:, place].tolist() == [i % 60 for i in range(80)]


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
            {"missing": "error"},
            ["target 'price' has no value in 1 row, first in row 80", "--missing drop"],
        ),
        ({"price": [*range(79), "cheap"]}, {}, ["among its numbers: 'cheap' in row 80"]),
        ({"price": [*range(79), "inf"]}, {}, ["'price' is infinite", "row 80"]),
        ({"price": [*range(79), 1e200]}, {}, ["target 'price' is too large to be squared", "row 80"]),
        ({"price": column(["2020-01-01", "2020-01-02"])}, {}, ["holds dates"]),
        ({"price": [f"p{i % 40}" for i in range(80)]}, {}, ["40 different values in 80 rows", "too many for classes"]),
        ({}, {"model": "logistic"}, ["different values", "--model ridge"]),
        ({"price": column(["a", "b"])}, {"model": "ridge"}, ["'price' holds text", "--model logistic"]),
        ({}, {"model": "ridge", "classes": True}, ["--model ridge predicts numbers, not --classes"]),
        ({}, {"groups": "prefix"}, ["--groups 'prefix' is not a column", "--group prefix"]),
        ({}, {"groups": "town"}, ["--groups 'town' has 3 groups, and --cv 5 needs 10"]),
        ({}, {"time": "town"}, ["--time 'town' needs a date or a number", "row 1"]),
        (
            {"town": column(["3/4/2024", "5/6/2024"])},
            {"time": "town"},
            ["--time 'town'", "day or the month comes first"],
        ),
        ({"price": ["a"] * 77 + ["b"] * 3}, {}, ["classes with few rows: 'b'", "--cv 5 needs 7 of each. Remove"]),
        ({"price": ["a"] * 76 + ["b"] * 4}, {}, ["classes with few rows: 'b'", "--cv 5", "Write fewer folds"]),
        (
            {"price": ["a"] * 58 + [f"c{i % 11}" for i in range(22)]},
            {},
            ["few rows: " + ", ".join(rf"'c{i}' \(2\)" for i in sorted(range(11), key=str)), "--cv 5"],
        ),
        ({"weight": [-1, *[1] * 79]}, {"weights": "weight", "drop": ()}, ["--weights 'weight'", "-1.* in row 1"]),
        ({"weight": 0}, {"weights": "weight", "drop": ()}, ["--weights 'weight' is 0 in all 80 rows"]),
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
        ({"missing": "mean"}, ["--missing mean", "median, drop, error"]),
        ({"cv": 1}, ["--cv 1", "2 or more"]),
        ({"repeats": 0}, ["--repeats 0", "1 or more"]),
        ({"minutes": 0}, ["--minutes 0", "above 0"]),
        ({"time": "t", "groups": "g"}, ["--time and --groups", "one of them"]),
        ({"l1_ratio": 0.0, "model": "elastic-net"}, ["--l1-ratio 0", "--model ridge"]),
        ({"penalty": "groups"}, ["--penalty groups needs --group"]),
        ({"group": ("prefix",), "penalty": "shared"}, ["--group needs --penalty groups, not shared"]),
        ({"l1_ratio": 0.5}, ["--l1-ratio 0.5 is for the elastic net", "--model elastic-net"]),
        ({"l1_ratio": 0.5, "model": "ridge"}, ["--l1-ratio 0.5 is for the elastic net", "--model elastic-net"]),
        ({"drop": ("price",)}, ["'price' cannot be dropped"]),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with refused(*words):
        TuneSettings(**{"target": "price", **settings})


def test_a_column_with_two_categories_is_one_indicator(tmp_path):
    path = flats(tmp_path / "flats.csv", town=column(["Rome", "Oslo"]))
    found = prepared(path, **FLATS)
    assert list(features(found).get_feature_names_out()) == ["size", "lift", "town=Rome"]


def test_missing_fields_are_filled_or_their_rows_left_out(tmp_path):
    frame = pd.read_csv(flats(tmp_path / "flats.csv")).astype(object)
    frame.loc[3, "size"], frame.loc[5, "town"], frame.loc[7, "lift"], frame.loc[9, "price"] = [None] * 4
    path = written(tmp_path / "gaps.csv", frame)
    filled = prepared(path, **FLATS)
    steps = features(filled, fill=True)
    X = pd.DataFrame(steps["columns"].transform(filled.frame), filled.frame.index)
    assert len(filled.y) == 79 and 9 not in X.index
    known = filled.frame["size"].astype(float)
    assert X.loc[3, 0] == pytest.approx(known.median())
    assert X.loc[7, 1] in (0, 1) and X.loc[5, 2:].sum() == 1
    assert sum("filled with" in note for note in field_notes(steps, filled.frame, "gaps.csv")) == 3
    left = prepared(path, **FLATS, missing="drop")
    assert len(left.y) == 76 and not set(left.frame.index) & {3, 5, 7, 9} and not left.frame.isna().to_numpy().any()
    assert any("Left out 3 rows with empty fields" in note for note in left.notes)


def test_too_few_rows_say_how_many_are_needed(tmp_path):
    numbers = {"target": "price", "drop": ("weight", "town", "lift")}
    for rows in (2, 5, 13):
        with refused(f"{rows} usable rows", "--cv 5", "needs 14"):
            prepared(flats(tmp_path / "few.csv", rows=rows), **numbers)
    splits = prepared(flats(tmp_path / "enough.csv", rows=14), **numbers).splits
    for train, _ in next(iter(splits.outer(1))):
        assert len(splits.inner(train)) == 5


def test_everything_learned_comes_from_the_training_rows(tmp_path):
    path, train, test = flats(tmp_path / "flats.csv"), np.arange(60), np.arange(60, 80)
    found = prepared(path, **FLATS)
    steps = features(found, rows=train)
    assert list(steps.get_feature_names_out()) == ["size", "lift", "town=Lima", "town=Oslo", "town=Rome"]
    z = steps.transform(found.frame.iloc[train])
    assert np.allclose(z.mean(0), 0, atol=1e-12) and np.allclose(z.std(0), 1)
    # Changes of the test rows do not change the features of other rows.
    frame = pd.read_csv(path)
    frame.loc[test, "size"], frame.loc[test, "town"] = 1e6, "Bonn"
    other = prepared(written(tmp_path / "other.csv", frame), **FLATS)
    again = features(other, rows=train)
    assert np.array_equal(transformed(again, other.frame.iloc[train]), z)
    assert "20 rows of other.csv have a value that the training rows lack, such as 'Bonn'" in " ".join(
        field_notes(again, other.frame, "other.csv")
    )
    assert (transformed(again[:1], other.frame)[test, 2:] == 0).all()


def test_a_feature_that_is_constant_in_training_gets_no_coefficient(tmp_path):
    rare = np.zeros(80)
    rare[70] = 1
    found = prepared(flats(tmp_path / "rare.csv", rare=rare), **FLATS)
    steps = features(found, rows=np.arange(60))
    assert "rare" in steps["columns"].get_feature_names_out() and "rare" not in steps.get_feature_names_out()
    assert np.isfinite(steps.transform(found.frame)).all()


def test_a_column_that_a_fold_has_no_value_of_is_left_out_there(tmp_path):
    path = flats(tmp_path / "b.csv", new=[None if row < 60 else row for row in range(80)])
    found = prepared(path, **FLATS, missing="median")
    steps = features(found, fill=True, rows=np.arange(60))
    assert "new" not in steps.get_feature_names_out() and np.isfinite(steps.transform(found.frame)).all()


def test_the_task_follows_from_the_target(tmp_path):
    assert not prepared(diabetes(tmp_path / "a.csv"), target="target").classes
    found = prepared(cancer(tmp_path / "b.csv"), target="target")
    assert found.classes and set(found.y) == {"benign", "malignant"}
    shares = [(found.y[test] == "benign").mean() for _, test in next(iter(found.splits.outer(1)))]
    assert np.ptp(shares) < 0.02  # the classes are split alike
    two = prepared(flats(tmp_path / "c.csv"), target="lift")
    assert two.classes and set(two.y) == {"False", "True"} and "'lift' has two values" in two.reason
    as_number = prepared(flats(tmp_path / "c.csv"), target="lift", model="ridge")
    assert set(as_number.y) == {0.0, 1.0} and as_number.reason == ""
    rooms = flats(tmp_path / "d.csv", rooms=column([1, 2, 3]))
    assert not prepared(rooms, target="rooms").classes
    assert prepared(rooms, target="rooms", classes=True).classes


def test_dates_become_numbers_of_the_calendar(tmp_path):
    days = pd.date_range("2024-01-30 18:00", periods=80)
    path = flats(tmp_path / "flats.csv", day=days.strftime("%d.%m.%Y %H:%M"), since=days)
    found = prepared(path, **FLATS)
    assert found.kinds["day"] == "day-first dates" and found.kinds["since"] == "dates"
    steps = features(found)
    X = pd.DataFrame(steps["columns"].transform(found.frame), columns=steps["columns"].get_feature_names_out())
    for name in ("day", "since"):
        assert X[f"{name} (days)"].diff().dropna().eq(1).all() and X[f"{name} (days)"][0] == 19752.75
        assert X[f"{name} (month)"].tolist() == days.month.tolist()
        assert X[f"{name} (weekday)"].tolist() == days.day_of_week.tolist() and X[f"{name} (hour)"].eq(18).all()
    assert "day (hour)" not in steps.get_feature_names_out()


def test_rows_of_a_group_stay_together(tmp_path):
    path = flats(tmp_path / "flats.csv", owner=[f"o{i // 4}" for i in range(80)])
    found = prepared(path, **FLATS, groups="owner")
    owners = np.array([f"o{i // 4}" for i in range(80)])
    assert "owner" not in found.kinds and any("same 'owner' (20 groups)" in note for note in found.notes)
    for pairs in found.splits.outer(3):
        for train, test in pairs:
            assert not set(owners[train]) & set(owners[test])
            for one, other in found.splits.inner(train):
                assert not set(owners[train[one]]) & set(owners[train[other]])


def test_with_time_models_see_the_past_only(tmp_path):
    order = np.random.default_rng(0).permutation(80)
    path = flats(tmp_path / "flats.csv", day=[f"2024-{1 + i // 28:02}-{1 + i % 28:02}" for i in order])
    found = prepared(path, **FLATS, time="day")
    assert "day" not in found.kinds and order[found.frame.index].tolist() == list(range(80))
    assert len(list(found.splits.outer(4))) == 1
    for train, test in next(iter(found.splits.outer(1))):
        assert train.max() < test.min()
        assert all(train[one].max() < train[other].min() for one, other in found.splits.inner(train))


@pytest.mark.parametrize("special", ["groups", "time"])
def test_additive_models_are_tuned_on_the_folds_of_groups_and_time(tmp_path, special):
    column = [f"o{i // 4}" for i in range(80)] if special == "groups" else list(range(80))
    path = flats(tmp_path / "flats.csv", special=column)
    study = tune(read_table(path), TuneSettings(**FLATS, **{special: "special"}, model="additive", repeats=1))
    model = study.model.pipeline[-1]
    assert "5 folds" in model.method_ and model.cv == 5
