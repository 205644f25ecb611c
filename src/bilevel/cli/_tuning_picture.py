"""The picture of `bilevel tune`: errors side by side, the largest coefficients with penalties, predictions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bilevel.experiments._plotting import BLUE, GREY, ORANGE, picture, titled

FEATURES = 15


def draw(record: dict[str, Any], points: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG."""
    top = sorted(record["features"], key=lambda one: -sum(value**2 for value in one["coefficients"]))[:FEATURES][::-1]
    with picture(path, width=13, height=max(4.2, 1.6 + 0.27 * len(top))) as figure:
        grid = figure.add_gridspec(1, 4, width_ratios=[1, 1.3, 1.1, 1.3])
        _errors(figure.add_subplot(grid[0]), record)
        first = figure.add_subplot(grid[1])
        _coefficients(first, record, top)
        _penalties(figure.add_subplot(grid[2], sharey=first), record, top)
        _points(figure.add_subplot(grid[3]), record, points)


def _errors(axes: Any, record: dict[str, Any]) -> None:
    key, word = ("log_loss", "log loss") if record["classes"] else ("rmse", "RMSE")
    found = record["comparison"]
    bars = axes.bar(range(len(found)), [one[key] for one in found], color=[BLUE, ORANGE, GREY])
    axes.bar_label(bars, [f"{one[key]:#.4g}" for one in found], fontsize=9)
    names = [one["name"].replace("LogisticRegressionCV", "Logistic\nRegressionCV") for one in found]
    axes.set_xticks(range(len(found)), [*names[:2], "constant"], fontsize=9)
    axes.grid(axis="x", visible=False)
    titled(axes, f"{word} on test rows", "", "")


def _coefficients(axes: Any, record: dict[str, Any], top: list[dict[str, Any]]) -> None:
    several = len(record["classes"]) > 2
    sizes = [sum(v**2 for v in one["coefficients"]) ** 0.5 if several else one["coefficients"][0] for one in top]
    colours = ["none" if one["off"] else BLUE for one in top]
    axes.barh(range(len(top)), sizes, color=colours, edgecolor=BLUE)
    axes.set_yticks(range(len(top)), [_plain(one["name"]) for one in top], fontsize=9)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    titled(axes, "Coefficients", "length over the classes" if several else "per standard deviation", "")


def _penalties(axes: Any, record: dict[str, Any], top: list[dict[str, Any]]) -> None:
    known = [(place, one) for place, one in enumerate(top) if isinstance(one["penalty"], float) and one["penalty"] > 0]
    colours = ["none" if one["off"] else BLUE for _, one in known]
    axes.scatter([one["penalty"] for _, one in known], [place for place, _ in known], c=colours, edgecolors=BLUE, s=45)
    rival = record["comparison"][1]
    axes.axvline(rival["penalty"], color=ORANGE, linestyle="--", linewidth=1.4, label=rival["name"])
    axes.legend(fontsize=8)
    axes.set_xscale("log")
    values = [math.log10(value) for value in (*(one["penalty"] for _, one in known), rival["penalty"])]
    # Two decades at least, so that penalties that hardly differ do not look as if they did.
    room = max(0.2, (2 - (max(values) - min(values))) / 2)
    axes.set_xlim(10 ** (min(values) - room), 10 ** (max(values) + room))
    axes.tick_params(labelleft=False)
    titled(axes, "Penalties (hollow: off)", "α, logarithmic", "")


def _points(axes: Any, record: dict[str, Any], points: dict[str, Any]) -> None:
    classes = record["classes"]
    if not classes:
        axes.scatter(points["truth"], points["predicted"], s=14, alpha=0.6, color=BLUE, linewidths=0)
        ends = [min(points["truth"]), max(points["truth"])]
        axes.plot(ends, ends, "--", color=GREY, linewidth=1.2)
        titled(axes, "Test rows", f"true {_plain(record['target'])}", "predicted")
    elif len(classes) == 2:
        chances = [
            [p for p, true in zip(points["predicted"], points["truth"], strict=True) if true == k] for k in (0, 1)
        ]
        labels = [f"true: {_plain(name)}" for name in classes]
        axes.hist(chances, bins=20, range=(0, 1), stacked=True, color=[BLUE, ORANGE], label=labels)
        axes.legend()
        titled(axes, "Test rows", f"probability of {_plain(classes[1])}", "rows")
    else:
        confusion = points["confusion"]
        axes.imshow(confusion, cmap="Blues")
        most = max(map(max, confusion))
        for row, line in enumerate(confusion):
            for column, count in enumerate(line):
                if len(classes) <= 12:
                    colour = "white" if 2 * count > most else "black"
                    axes.text(column, row, count, ha="center", va="center", fontsize=9, color=colour)
        names = [_plain(name, 10) for name in classes]
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.grid(False)
        titled(axes, "Test rows", "predicted", "true")


def _plain(text: str, width: int = 22) -> str:
    """Short, and with dollars that do not begin a formula."""
    short = text if len(text) <= width else text[: width - 1] + "…"
    return short.replace("$", r"\$")
