"""The benchmark of tables: its sets are apart, ranks and failures count as they should, and its errors are right."""

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
    for name in ("tables", "table_models", "table_sets"):
        sys.modules.pop(name, None)


def test_the_sets_are_apart_and_large_enough():
    from table_sets import CLAIM, DEVELOPMENT

    claim, development = ({table.source for table in tables} for tables in (CLAIM, DEVELOPMENT))
    assert not claim & development and len(CLAIM) >= 24
    assert {table.task for table in CLAIM} == {"regression", "classification"}


def test_ranks_and_failures():
    import tables

    def row(table, model, errors):
        found = {"errors": errors, "seconds": [1.0], "rows": 9, "columns": 2} if errors else {"failed": "too long"}
        return {"set": "claim", "task": "regression", "table": table, "model": model, "repeat": 0, **found}

    rows = [
        *(row("a", model, [error]) for model, error in [("constant", 1.0), ("BilevelAdditive", 0.2), ("RidgeCV", 0.4)]),
        *(
            row("b", model, [error])
            for model, error in [("constant", 1.0), ("BilevelAdditive", 0.5), ("RidgeCV", 0.45)]
        ),
        row("a", "pyGAM", []),
        row("b", "pyGAM", [0.3]),
        row("a", "EBM", [0.1]),
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
