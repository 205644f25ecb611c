"""The page of `bilevel tune`: one HTML file with the result of the tuning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from importlib import import_module
from itertools import accumulate
from typing import Any

import bilevel
from bilevel.report.templating import inlined, template
from bilevel.tabular.scores import measures

CURVE = 400  # points of the validation history


def render(record: Mapping[str, Any], points: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        record: the content of result.json.
        points: held-out rows, as `bilevel.tabular.results.chart_points` gives them.
    """
    from markupsafe import Markup

    offline: Any = import_module("plotly.offline")
    names = measures(record["classes"])
    page = template("table.html.j2", four=four, fixed=fixed, breakable=breakable)
    return page.render(
        record=record,
        words=names,
        measure=list(names)[-1],
        ours=next(one for one in record["comparison"] if one["name"] == record["saved"]),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        version=bilevel.__version__,
        style=inlined("style.css", "table.css"),
        script=inlined("theme.js", "table.js"),
        plotly=Markup(offline.get_plotlyjs()),
        content=_content(record, points, list(names)[-1]),
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


def breakable(name: str) -> Any:
    """The name of a class as HTML that may be broken before each capital after a small letter.

    >>> breakable("RidgeCV"), breakable("class frequencies")
    (Markup('Ridge<wbr>CV'), Markup('class frequencies'))
    """
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split("(?<=[a-z])(?=[A-Z])", name))


def _content(record: Mapping[str, Any], points: Mapping[str, Any], measure: str) -> dict[str, Any]:
    """The data of the charts."""
    history = {"value": [], "seconds": [], **record["history"]}
    history = {key: history[key] for key in ("value", "seconds")}
    history["best"] = list(accumulate(history["value"], min))
    count = len(history["value"])
    rows = range(0, count, max(1, -(-count // CURVE)))
    model: dict[str, Any]
    if "effects" in record:
        model = {"effects": [one for one in record["effects"] if "shape" in one]}
    else:
        kept = ("name", "coefficients", "penalty", "shrinkage", "off")
        model = {
            "features": [{key: one[key] for key in kept} for one in record["features"]],
            "shared": record["shared_penalty"]["penalty"],
        }
    return {
        **model,
        "classes": record["classes"],
        "target": record["target"],
        "errors": [
            {"name": one["name"], "error": one[measure], "ours": one["ours"], "best": one["p"] is None}
            for one in record["comparison"]
        ],
        "history": {
            "step": list(rows),
            **{key: [values[i] for i in rows if values] for key, values in history.items()},
        },
        "points": points,
    }
