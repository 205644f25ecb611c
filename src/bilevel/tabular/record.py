"""A study as plain data: what result.json holds and what the page is made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevel.tabular.importance import Feature, features
from bilevel.tabular.study import Study

MOST_POINTS = 3000  # of test rows on the page; more cannot be told apart


def record(study: Study) -> dict[str, Any]:
    """Everything but the predictions, in types that JSON has, up to NaN."""
    prepared, model = study.prepared, study.model
    classes, found = list(model.target.classes), features(study)
    keys = ("accuracy", "log_loss") if classes else ("r2", "rmse")
    return {
        "kind": "tune",
        "data": {
            "file": study.table.path.name,
            "sha256": study.table.sha256,
            "rows": len(study.table.frame),
            "rows_used": len(prepared.y),
            "training_rows": int(prepared.train.sum()),
            "test_rows": int(prepared.test.sum()),
            "columns": study.table.columns,
        },
        "target": model.target.name,
        "classes": classes,
        "model": model.model,
        "model_chosen_because": prepared.reason,
        "penalty": study.settings.penalty,
        "comparison": [
            {
                "name": one.name,
                keys[0]: one.score.share,
                keys[1]: one.score.main,
                "seconds": one.seconds,
                "penalty": one.penalty,
            }
            for one in study.entries
        ],
        "verdict": study.verdict,
        "features": [_feature(one) for one in found],
        "switched_off": [one.name for one in found if one.off],
        "effective_features": sum(1 - one.shrinkage for one in found),
        "intercept": model.intercept.tolist(),
        "notes": study.notes,
        "method": study.fitted.method,
        "outcome": study.fitted.outcome,
        "certificate": study.fitted.certificate,
        "iterations": study.fitted.iterations,
        "history": study.fitted.history,
        "settings": study.settings.plain(),
    }


def _feature(one: Feature) -> dict[str, Any]:
    return {
        "name": one.name,
        "column": one.column,
        "group": one.group,
        "coefficients": list(one.coefficients),
        "coefficients_raw": list(one.raw),
        "penalty": one.penalty,
        "penalty_raw": one.raw_penalty,
        "shrinkage": one.shrinkage,
        "off": one.off,
    }


def test_points(study: Study) -> dict[str, Any]:
    """The test rows for a chart: their numbers in the file, the truth and what was predicted; some, where many."""
    truth, predicted = study.test_predictions()
    rows = study.prepared.rows[study.prepared.test]
    count = len(rows)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int))
    classes = study.model.target.classes
    points: dict[str, Any] = {"rows": rows[chosen].tolist(), "truth": truth[chosen].tolist(), "of": count}
    points["predicted"] = (predicted[chosen, 1] if len(classes) == 2 else predicted[chosen]).tolist()
    if classes:
        confusion = np.zeros((len(classes), len(classes)), dtype=int)
        np.add.at(confusion, (truth, predicted.argmax(1)), 1)
        points["confusion"] = confusion.tolist()
        points["predicted"] = points["predicted"] if len(classes) == 2 else []
    return points
