"""The comparison of models: the significance test, the verdict, leaks, and the variance that groups explain."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import r2_score
from table_fixtures import flats, written

from bilevel.estimators import BilevelAdditiveRegressor
from bilevel.tabular import TuneSettings, read_table, tune
from bilevel.tabular.columns import readable_columns
from bilevel.tabular.comparing import ComparedModel, ModelComparison
from bilevel.tabular.leaks import leaks
from bilevel.tabular.preparing import used_table
from bilevel.tabular.results import result_record
from bilevel.tabular.scores import corrected_test, explained_shares, table_score
from bilevel.tabular.verdicts import table_verdict

QUICK = {"max_iter": 5, "repeats": 1, "cv": 2, "model": "ridge"}


def test_the_corrected_test_keeps_its_level():
    """For two equally good models on overlapping training sets, the test is rarely significant."""
    draw, wrong, naive = np.random.default_rng(0), 0, 0
    for _ in range(1000):
        # In repeated 5-fold cross-validation, differences have a correlation of about test rows / all rows.
        d = np.sqrt(0.2) * draw.normal() + np.sqrt(0.8) * draw.normal(size=20)
        wrong += corrected_test(d, np.zeros(20), 0.25).p < 0.05
        naive += stats.ttest_1samp(d, 0).pvalue < 0.05
    assert wrong / 1000 == pytest.approx(0.05, abs=0.025) and naive / 1000 > 0.3


def test_the_corrected_test_against_its_formula():
    first, second = np.array([1.0, 2.0, 4.0, 3.0]), np.array([0.5, 2.5, 1.0, 1.0])
    d = first - second
    t = d.mean() / np.sqrt((1 / 4 + 0.25) * d.var(ddof=1))
    assert corrected_test(first, second, 0.25).p == pytest.approx(2 * stats.t.sf(abs(t), 3))
    assert corrected_test(first, first, 0.25).p == 1 and corrected_test(first[:1], second[:1], 0.25).p == 1


def compared(**losses):
    """A comparison of models with these losses on 20 folds."""
    found = []
    for name, values in losses.items():
        values = np.broadcast_to(values, 20)
        rmse = float(np.sqrt(values.mean()))
        kind = "additive" if "Additive" in name else "ridge" if name.startswith("Bilevel") else None
        scores = {"r2": 1 - rmse**2, "rmse": rmse}
        found.append(ComparedModel(name, kind, values, scores, 1.0, np.zeros(1)))
    return ModelComparison(sorted(found, key=lambda one: one.scores["rmse"]), 0.25, 4, np.ones(1, dtype=bool))


def test_verdicts_are_honest():
    draw = np.random.default_rng(0)
    base, noise = draw.uniform(0.9, 1.1, 20), draw.normal(0, 0.05, 20)
    better = table_verdict(compared(BilevelRidge=base - 0.3, RidgeCV=base + noise / 10, mean=base + 2), [])
    assert better.sentence.startswith("Best: BilevelRidge, significantly") and better.best.name == "BilevelRidge"
    worse = table_verdict(compared(BilevelRidge=base + 0.3, RidgeCV=base + noise / 10, mean=base + 2), [])
    assert worse.sentence.startswith("Recommended: scikit-learn's RidgeCV, significantly better")
    assert worse.best.name == "RidgeCV" and worse.ours.name == "BilevelRidge"
    assert "Saved is the best of ours, BilevelRidge." in worse.sentence
    curved = table_verdict(compared(BilevelAdditive=base - 0.3, BilevelRidge=base, RidgeCV=base, mean=base + 2), [])
    assert curved.best.name == "BilevelAdditive" and curved.ours.name == "BilevelAdditive"
    assert curved.sentence.startswith("Best: BilevelAdditive") and "Saved is" not in curved.sentence
    same = table_verdict(compared(BilevelRidge=base + noise, RidgeCV=base, mean=base + 2), [])
    assert "No significant difference" in same.sentence
    nothing = table_verdict(compared(BilevelRidge=base, RidgeCV=base, mean=base + noise), [])
    assert nothing.sentence.startswith("No model predicts significantly better than the mean")
    # A difference of 1.1 % on a single fold is not significant.
    one = compared(BilevelRidge=0.98, RidgeCV=1.0, mean=9.0)
    for model in one.models:
        model.losses = model.losses[:1]
    said = table_verdict(one, []).sentence
    assert said.startswith("No model predicts significantly better") and "--cv 10" in said
    assert "--cv" not in nothing.sentence  # 20 folds


def test_a_slow_model_is_left_out_and_the_first_round_is_finished(tmp_path):
    table = read_table(flats(tmp_path / "flats.csv"))
    settings = {"target": "price", **QUICK, "repeats": 3}
    told = []
    study = tune(table, TuneSettings(**settings, minutes=1e-6), doing=told.append)
    assert study.comparison.repeats == 1 and [one.name for one in study.comparison.models if one.kind]
    assert any("is not in the comparison" in note and "--minutes" in note for note in study.notes)
    assert any("drawn 1 time, not 3" in note for note in study.notes)
    assert "fold 1 of 6: BilevelRidge" in told and told[-1] == "BilevelRidge on all rows"


@pytest.mark.parametrize("kind", ["numbers", "classes", "text"])
def test_one_column_that_tells_the_target_is_a_hint(tmp_path, kind):
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(200, 3)), columns=["a", "b", "c"])
    frame["y"] = frame["a"] + draw.normal(size=200)
    if kind == "numbers":
        frame["late"] = -3 * frame["y"] + 0.01 * draw.normal(size=200)
    else:
        frame["y"] = np.where(frame["y"] > 0, "yes", "no")
        frame["late"] = np.where(frame["y"] == "yes", 1.0, 0.0) + 0.1 * draw.normal(size=200)
        frame["late"] = np.where(frame["late"] > 0.5, "paid", "owed") if kind == "text" else frame["late"]
    table = read_table(written(tmp_path / "leak.csv", frame))
    found = leaks(used_table(table, TuneSettings("y")), fill=False)
    assert len(found) == 1 and "Column 'late' alone predicts" in found[0] and "--drop late" in found[0]
    assert leaks(used_table(table, TuneSettings("y", drop=("late",))), fill=False) == []


def test_a_leak_is_found_among_many_columns(tmp_path):
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(600, 60)), columns=[f"x{i}" for i in range(60)])
    frame["y"] = np.exp(frame["x59"] / 4)
    table = read_table(written(tmp_path / "leak.csv", frame))
    found = leaks(used_table(table, TuneSettings("y")), fill=False)
    assert len(found) == 1 and "'x59'" in found[0]


def test_the_additive_model_is_compared_on_the_columns_themselves(tmp_path):
    draw = np.random.default_rng(0)
    x, day = draw.uniform(-3, 3, 150), pd.date_range("2024-01-01", periods=150)
    kind = draw.choice(["a", "b", "c"], 150)
    y = np.sin(2 * x) + (kind == "a") + 0.1 * draw.normal(size=150)
    frame = pd.DataFrame({"x": x, "day": day, "kind": kind, "y": y})
    frame.loc[7, "x"] = None
    table = read_table(written(tmp_path / "curved.csv", frame))
    study = tune(table, TuneSettings("y", missing="median", **{**QUICK, "model": None}))
    assert study.verdict.best.name == "BilevelAdditiveRegressor" and study.verdict.best.own
    used = study.used
    train, test = next(iter(used.splits.outer(1)))[0]
    columns = readable_columns(used.frame, used.kinds, gaps=True)
    assert list(columns) == ["x", "day (days)", "day (month)", "day (weekday)", "day (hour)", "kind"]
    own = BilevelAdditiveRegressor(max_iter=study.settings.max_iter).fit(columns.iloc[train], used.y[train])
    assert np.allclose(own.predict(columns.iloc[test]), study.verdict.best.predicted[test])
    record = result_record(study)
    assert record["recommended"] == "BilevelAdditiveRegressor" and record["saved"] == record["recommended"]


def test_the_parts_of_the_variance_sum_to_r2():
    draw = np.random.default_rng(0)
    parts = draw.normal(size=(300, 3)) * np.array([2.0, 1.0, 0.0])
    y = 5 + parts.sum(1) + draw.normal(size=300)
    predicted = 5 + parts.sum(1)
    shares = explained_shares(parts, y, predicted)
    centred = y - 5
    assert shares.sum() == pytest.approx(1 - ((y - predicted) ** 2).sum() / (centred**2).sum())
    assert shares == pytest.approx([4 / 6, 1 / 6, 0], abs=0.05)
    assert shares.sum() == pytest.approx(r2_score(y, predicted), abs=0.01)


def test_the_variance_that_named_groups_explain(tmp_path):
    table = read_table(flats(tmp_path / "flats.csv", noise_1=range(80), noise_2=list(range(40)) * 2))
    settings = TuneSettings("price", drop=("weight",), group=("noise_*=nothing", "town=place"), **QUICK)
    study = tune(table, settings)
    assert next(iter(study.variance)) == "other" and set(study.variance) == {"other", "nothing", "place"}
    assert study.groups["size"] == "other" and study.groups["noise_2"] == "nothing"
    ours = study.verdict.ours
    assert sum(study.variance.values()) == pytest.approx(ours.scores["r2"], abs=0.01)
    assert study.variance["other"] > 0.7 and abs(study.variance["nothing"]) < 0.1


def test_scores_where_they_have_no_meaning():
    assert np.isnan(table_score(np.ones(3), np.zeros(3))["r2"])
    sure = table_score(np.array(["a"]), np.array([[0.0, 1.0]]), classes=["a", "b"])
    assert np.isfinite(sure["log_loss"]) and sure["accuracy"] == 0 and np.isnan(sure["auc"])
