"""The benchmark of tables: its sets are apart, ranks and failures count as they should, and its errors are right."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("tables", "table_report", "table_models", "table_sets"):
        sys.modules.pop(name, None)


def test_the_sets_are_apart_and_large_enough():
    from table_sets import CLAIM, DEVELOPMENT

    claim, development = ({table.source for table in tables} for tables in (CLAIM, DEVELOPMENT))
    assert not claim & development and len(CLAIM) >= 24
    assert {table.task for table in CLAIM} == {"regression", "classification"}


def test_ranks_and_failures():
    import table_report as tables

    def row(table, model, errors):
        found = {"errors": errors, "seconds": [1.0], "rows": 9, "columns": 2} if errors else {"failed": "too long"}
        return {"set": "claim", "task": "regression", "table": table, "model": model, "repeat": 0, **found}

    rows = [
        *(row("a", m, [e] * 5) for m, e in [("constant", 1.0), ("BilevelAdditive", 0.2), ("RidgeCV", 0.4)]),
        *(row("b", m, [e] * 5) for m, e in [("constant", 1.0), ("BilevelAdditive", 0.5), ("RidgeCV", 0.45)]),
        row("a", "pyGAM", []),
        row("b", "pyGAM", [0.3] * 5),
        row("a", "EBM", [0.1] * 5),
    ]
    found = tables.by_table(rows)
    assert found["a"]["pyGAM"]["error"] == 1.0
    assert tables.ranks(found, ["BilevelAdditive", "RidgeCV", "pyGAM"]) == {
        "BilevelAdditive": 2.0, "RidgeCV": 2.0, "pyGAM": 2.0,
    }  # fmt: skip
    text = tables.markdown(rows, "claim")
    assert (
        "Within 2 % of the best rival of each table: 1 of 2" in text
        and "EBM" not in text.split("| our default against")[0]
    )


def test_models_are_compared_on_the_folds_that_all_have():
    import table_report

    def row(model, errors, repeat=0, **more):
        found = {"errors": errors, "seconds": [1.0] * len(errors), "rows": 9, "columns": 2}
        return {"task": "regression", "table": "a", "model": model, "repeat": repeat, **found, **more}

    ours = [row("BilevelAdditive", [0.2, 0.4, 0.4, 0.4, 0.4]), row("BilevelAdditive", [0.9] * 5, repeat=1)]
    rows = [*ours, row("RidgeCV", [0.5] * 5), row("EBM", [0.1])]
    full, rivals = table_report.ranked(table_report.of_first_folds(rows, 5), "regression")
    found = table_report.by_table(full)["a"]
    assert rivals == ["RidgeCV"] and found["BilevelAdditive"]["error"] == pytest.approx(0.36)  # of draw 0 alone
    some, more = table_report.ranked(table_report.of_first_folds(rows, 1), "regression")
    found = table_report.by_table(some)["a"]
    assert more == ["RidgeCV", "EBM"] and found["BilevelAdditive"]["error"] == 0.2 and found["EBM"]["error"] == 0.1
    late = {"task": "regression", "table": "a", "model": "EBM", "repeat": 0, "failed": "too long", "folds": 1}
    assert late in table_report.of_first_folds([late], 1) and not table_report.of_first_folds([late], 5)


def test_the_noise_of_a_difference():
    import table_report

    errors = {"BilevelLasso": [[0.3, 0.5, 0.4, 0.4, 0.4], [0.5, 0.3, 0.4, 0.4, 0.4]], "LassoCV": [[0.3] * 5, [0.3] * 5]}
    rows = [
        {"table": "a", "model": model, "repeat": draw, "errors": found}
        for model, draws in errors.items()
        for draw, found in enumerate(draws)
    ]
    mean, error, ratio = table_report.differences(rows, "BilevelLasso", "LassoCV")["a"]
    deviation = np.std([0, 0.2, 0.1, 0.1, 0.1] * 2, ddof=1)
    assert (mean, ratio) == (pytest.approx(0.1), pytest.approx(4 / 3))
    assert error == pytest.approx(deviation * np.sqrt(1 / 10 + 1 / 4))


def test_a_stored_result_is_measured_further_and_replaced(tmp_path, monkeypatch):
    import tables
    from table_sets import Table

    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"a": draw.normal(size=60)})
    monkeypatch.setattr(Table, "load", lambda table: (frame, frame["a"] * 2))
    one = tables.measure(Table("x/y", "y", "regression"), "constant", 0, 60.0, folds=2)
    all_of_them = tables.measure(Table("x/y", "y", "regression"), "constant", 0, 60.0)
    further = tables.measure(Table("x/y", "y", "regression"), "constant", 0, 60.0, known=one)
    assert len(one["errors"]) == 2 and further["errors"] == all_of_them["errors"]
    assert further["seconds"][:2] == one["seconds"]
    store = tmp_path / "rows.jsonl"
    key = '"table": "x/y", "model": "constant", "repeat": 0'
    store.write_text(f'{{{key}, "errors": [1]}}\n{{{key}, "errors": [1, 1]}}\n')
    assert [row["errors"] for row in tables.stored(store)] == [[1, 1]]


def test_what_was_stopped_is_measured_again_with_more_time(tmp_path, monkeypatch):
    import argparse

    import table_sets
    import tables

    frame = pd.DataFrame({"a": np.random.default_rng(0).normal(size=60)})
    monkeypatch.setattr(table_sets.Table, "load", lambda table: (frame, frame["a"] * 2))
    monkeypatch.setattr(table_sets, "CLAIM", (table_sets.Table("x/y", "y", "regression"),))
    store = tmp_path / "rows.jsonl"
    options = {"set": "claim", "only": None, "task": None, "models": ["constant"], "repeats": 1, "folds": 1}
    stopped = {"table": "x/y", "model": "constant", "repeat": 0, "failed": "too long", "folds": 1, "limit": 60.0}
    for limit, measured in ((60.0, False), (600.0, True)):
        store.write_text(f"{json.dumps(stopped)}\n")
        tables.work(argparse.Namespace(**options, limit=limit), store)
        assert ("errors" in tables.stored(store)[0]) == measured


@pytest.mark.parametrize("classes", [False, True])
def test_a_constant_has_an_error_of_one_and_models_learn(classes):
    import table_models

    draw = np.random.default_rng(0)
    X = pd.DataFrame({"a": draw.normal(size=120), "b": draw.choice(["x", "y", "z"], 120)})
    X.loc[3, "a"] = None
    y = X["a"].fillna(0).to_numpy() + (X["b"] == "x") + 0.1 * draw.normal(size=120)
    y = np.where(y > 0.3, "yes", "no") if classes else y.to_numpy()
    models = table_models.CLASSIFICATION if classes else table_models.REGRESSION
    train, test = np.arange(80), np.arange(80, 120)
    missing = {"pyGAM", "EBM"}  # need the environment of the benchmark
    for name, build in models.items():
        if name not in missing:
            error = table_models.fitted_error(build, X, y, train, test, classes)
            assert error == pytest.approx(1) if name == "constant" else error < 0.6, name
