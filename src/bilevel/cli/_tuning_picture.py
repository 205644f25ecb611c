"""The picture of `bilevel tune`: errors, the largest coefficients with their penalties, and predictions."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from bilevel.estimators.additive.pictures import draw_term
from bilevel.plotting import BLUE, GREY, ORANGE, picture, shortened, titled
from bilevel.tabular.candidates import CONSTANT
from bilevel.tabular.scores import measures

FEATURES, EFFECTS = 15, 12


def draw(record: dict[str, Any], points: dict[str, Any], model: Any, path: Path) -> None:
    """Write the picture of the fitted `model` as PNG."""
    if "effects" in record:
        _draw_effects(record, points, model, path)
        return
    top = sorted(record["features"], key=lambda one: -sum(value**2 for value in one["coefficients"]))[:FEATURES][::-1]
    with picture(path, width=13, height=max(4.2, 1.6 + 0.27 * len(top))) as figure:
        grid = figure.add_gridspec(1, 4, width_ratios=[1.2, 1.3, 1.1, 1.3])
        _errors(figure.add_subplot(grid[0]), record)
        first = figure.add_subplot(grid[1])
        _coefficients(first, record, top)
        _penalties(figure.add_subplot(grid[2], sharey=first), record, top)
        _points(figure.add_subplot(grid[3]), record, points)


def _draw_effects(record: dict[str, Any], points: dict[str, Any], model: Any, path: Path) -> None:
    """Errors and predictions above, and the effects of the most important terms below, of the last class."""
    shown = [one["term"] for one in record["effects"] if one["importance"] > 0][:EFFECTS]
    down = math.ceil(len(shown) / 4)
    with picture(path, width=13, height=4.2 + 2.6 * down) as figure:
        grid = figure.add_gridspec(1 + down, 4, height_ratios=[1.6, *[1] * down])
        _errors(figure.add_subplot(grid[0, :2]), record)
        _points(figure.add_subplot(grid[0, 2:]), record, points)
        of = f" ({shortened(record['classes'][-1], 10)})" if len(record["classes"]) > 2 else ""
        for place, term in enumerate(shown):
            axes = figure.add_subplot(grid[1 + place // 4, place % 4])
            draw_term(axes, model, model.terms_.index(term), -1)
            axes.set_title(f"{shortened(term, 30)}{of}")


def _errors(axes: Any, record: dict[str, Any]) -> None:
    key, word = list(measures(record["classes"]).items())[-1]
    found = record["comparison"][::-1]
    colours = [BLUE if one["ours"] else GREY if one["name"] in CONSTANT.values() else ORANGE for one in found]
    bars = axes.barh(range(len(found)), [one[key] for one in found], color=colours)
    axes.bar_label(bars, [f"{one[key]:#.4g}" for one in found], fontsize=8, padding=2)
    names = [
        re.sub(r"(?<=[a-z])(Regressor|Regression|Classifier|Boosting)", r"\n\1", one["name"], count=1) for one in found
    ]
    axes.set_yticks(range(len(found)), names, fontsize=8)
    for label, one in zip(axes.get_yticklabels(), found, strict=True):
        label.set_fontweight("bold" if one["p"] is None else "normal")
    axes.set_xlim(0, 1.25 * max(one[key] for one in found))
    axes.grid(axis="y", visible=False)
    titled(axes, f"{word}, held-out rows", "blue: ours", "")


def _coefficients(axes: Any, record: dict[str, Any], top: list[dict[str, Any]]) -> None:
    several = len(record["classes"]) > 2
    sizes = [sum(v**2 for v in one["coefficients"]) ** 0.5 if several else one["coefficients"][0] for one in top]
    colours = ["none" if one["off"] else BLUE for one in top]
    axes.barh(range(len(top)), sizes, color=colours, edgecolor=BLUE)
    axes.set_yticks(range(len(top)), [shortened(one["name"]) for one in top], fontsize=9)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    titled(axes, "Coefficients", "length over the classes" if several else "per standard deviation", "")


def _penalties(axes: Any, record: dict[str, Any], top: list[dict[str, Any]]) -> None:
    penalties = [one["penalty"] for one in top]
    colours = ["none" if one["off"] else BLUE for one in top]
    axes.scatter(penalties, range(len(top)), c=colours, edgecolors=BLUE, s=45)
    rival = record["shared_penalty"]
    axes.axvline(rival["penalty"], color=ORANGE, linestyle="--", linewidth=1.4, label=rival["name"])
    axes.legend(fontsize=8)
    axes.set_xscale("log")
    values = [math.log10(value) for value in (*penalties, rival["penalty"])]
    # Two decades at least, so that small differences do not look large.
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
        titled(axes, "Held-out rows", f"true {shortened(record['target'])}", "predicted")
    elif len(classes) == 2:
        chances = [
            [p for p, true in zip(points["predicted"], points["truth"], strict=True) if true == k] for k in (0, 1)
        ]
        labels = [f"true: {shortened(name)}" for name in classes]
        axes.hist(chances, bins=20, range=(0, 1), stacked=True, color=[BLUE, ORANGE], label=labels)
        axes.legend()
        titled(axes, "Held-out rows", f"probability of {shortened(classes[1])}", "rows")
    else:
        confusion = points["confusion"]
        axes.imshow(confusion, cmap="Blues")
        most = max(map(max, confusion))
        for row, line in enumerate(confusion):
            for column, count in enumerate(line):
                if len(classes) <= 12:
                    colour = "white" if 2 * count > most else "black"
                    axes.text(column, row, count, ha="center", va="center", fontsize=9, color=colour)
        names = [shortened(name, 10) for name in classes]
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.grid(False)
        titled(axes, "Held-out rows", "predicted", "true")
