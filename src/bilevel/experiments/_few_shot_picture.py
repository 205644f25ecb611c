"""The picture of Table 3: our accuracies beside the paper's, and how the trainings got there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilevel.experiments._plotting import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    legend_below,
    picture,
    titled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY, BLACK)


def draw(path: Path, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    """Dots for the rows on the left; curves on the right, where trainings have left any."""
    curves = {name: row["curve"] for name, row in numbers.items() if len(row.get("curve", [])) > 1}
    with picture(path, width=12 if curves else 7, height=max(3.2, 0.55 * len(numbers) + 1.4)) as figure:
        panels = figure.subplots(1, 2 if curves else 1, squeeze=False)[0]
        _rows(panels[0], numbers)
        if curves:
            _curves(panels[1], curves)


def _rows(axes: Axes, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    titled(axes, "Meta-test accuracy in per cent", "", "")
    places = list(range(len(numbers)))[::-1]
    for place, row in zip(places, numbers.values(), strict=True):
        axes.errorbar(row["paper"], place + 0.16, xerr=row["paper interval"], fmt="D", color=GREY, capsize=3)
        if row["trained"]:
            axes.errorbar(
                100 * row["accuracy"], place - 0.16, xerr=100 * row["interval"], fmt="o", color=BLUE, capsize=3
            )
        else:
            axes.annotate("not trained yet", (row["paper"], place - 0.16), (9, 0), textcoords="offset points",
                          va="center", fontsize=9, color=GREY)  # fmt: skip
    axes.errorbar([], [], fmt="D", color=GREY, label="the paper")
    axes.errorbar([], [], fmt="o", color=BLUE, label="ours")
    axes.set_yticks(places, list(numbers))
    axes.set_ylim(-0.6, len(numbers) - 0.4)
    legend_below(axes)


def _curves(axes: Axes, curves: Mapping[str, Any]) -> None:
    titled(axes, "While learning", "hyperiterations of the last stage", "meta-validation accuracy in per cent")
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        at = [point[0] for point in points]
        axes.plot(at, [100 * point[1] for point in points], color=colour, marker="o", markersize=3, label=name)
        low, high = ([100 * (point[1] + sign * point[2]) for point in points] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    legend_below(axes)
