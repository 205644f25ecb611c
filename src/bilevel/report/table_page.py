"""The page of `bilevel tune`: one file that shows what the tuning of a table's model found."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from importlib import import_module
from itertools import accumulate
from typing import Any

import bilevel
from bilevel.report.templating import inlined, template

CURVE = 400  # points of the validation history


def render(record: Mapping[str, Any], points: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        record: the content of result.json.
        points: the test rows, as `bilevel.tabular.record.test_points` gives them.
    """
    from markupsafe import Markup

    offline: Any = import_module("plotly.offline")
    measures = ("accuracy", "log_loss") if record["classes"] else ("r2", "rmse")
    page = template("table.html.j2", four=four, fixed=fixed)
    return page.render(
        record=record,
        measures=measures,
        words={"r2": "R²", "rmse": "RMSE", "accuracy": "accuracy", "log_loss": "log loss"},
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        version=bilevel.__version__,
        style=inlined("style.css", "table.css"),
        script=inlined("theme.js", "table.js"),
        plotly=Markup(offline.get_plotlyjs()),
        content=_content(record, points, measures[1]),
    )


def four(value: Any) -> str:
    """A number in four figures, and a dash where there is none.

    >>> four(56.4), four(5000.0), four(float("nan")), four("nan")
    ('56.40', '5000', '–', '–')
    """
    return f"{value:#.4g}".removesuffix(".") if isinstance(value, (int, float)) and value == value else "–"


def fixed(value: Any) -> str:
    """A share in four decimals, and a dash where there is none.

    >>> fixed(-0.0001436), fixed("nan")
    ('-0.0001', '–')
    """
    return f"{value:.4f}" if isinstance(value, (int, float)) and value == value else "–"


def _content(record: Mapping[str, Any], points: Mapping[str, Any], measure: str) -> dict[str, Any]:
    """What the charts are drawn from."""
    history = {"value": [], "seconds": [], **record["history"]}
    history["best"] = list(accumulate(history["value"], min))
    count = len(history["value"])
    rows = range(0, count, max(1, -(-count // CURVE)))
    return {
        "features": [
            {key: one[key] for key in ("name", "coefficients", "penalty", "shrinkage", "off")}
            for one in record["features"]
        ],
        "classes": record["classes"],
        "target": record["target"],
        "errors": [{"name": one["name"], "error": one[measure]} for one in record["comparison"]],
        "history": {
            "step": list(rows),
            **{key: [history[key][i] for i in rows] for key in ("value", "seconds", "best")},
        },
        "shared": record["comparison"][1]["penalty"],
        "points": points,
    }
