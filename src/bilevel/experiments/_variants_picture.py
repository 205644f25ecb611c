"""The picture of the variants: final accuracies as bars beside the paper's, and how they got there."""

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

COLOURS = (BLUE, GREY, ORANGE, GREEN, PURPLE, RED, SKY)


def draw(path: Path, numbers: Mapping[str, Mapping[str, Any]], printed: Mapping[str, float]) -> None:
    """A row for every data set."""
    with picture(path, width=11.5, height=4.4 * len(numbers)) as figure:
        grid = figure.subplots(len(numbers), 2, squeeze=False)
        for (bars, curves), (dataset, rows) in zip(grid, numbers.items(), strict=True):
            _bars(bars, dataset, rows, printed if dataset == "miniimagenet" else {})
            _curves(curves, dataset, rows)


def _bars(axes: Axes, dataset: str, rows: Mapping[str, Any], printed: Mapping[str, float]) -> None:
    titled(axes, f"{dataset}: meta-test", "accuracy in per cent", "")
    places = list(range(len(rows)))[::-1]
    for place, (variant, found), colour in zip(places, rows.items(), COLOURS, strict=False):
        value = 100 * found["accuracy"]
        axes.barh(place, value, 0.62, color=colour, xerr=100 * found["interval"], ecolor=BLACK, capsize=3)
        end = value + 100 * found["interval"]
        axes.annotate(f"{value:.1f}", (end, place), (5, 0), textcoords="offset points", va="center", fontsize=9.5)
        if variant in printed:
            axes.plot(printed[variant], place, marker="D", color=BLACK, markersize=6, linestyle="none", zorder=5)
    if printed:
        axes.plot([], [], marker="D", color=BLACK, linestyle="none", label="the paper's")
        axes.legend(loc="lower right")
    axes.set_yticks(places, list(rows))
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.16 * max([100 * found["accuracy"] for found in rows.values()] + list(printed.values())))


def _curves(axes: Axes, dataset: str, rows: Mapping[str, Any]) -> None:
    titled(axes, f"{dataset}: while learning", "share of the training", "meta-validation accuracy in per cent")
    for (variant, found), colour in zip(rows.items(), COLOURS, strict=False):
        last = max(point[0] for point in found["curve"]) or 1
        axes.plot(
            [point[0] / last for point in found["curve"]],
            [100 * point[1] for point in found["curve"]],
            color=colour,
            marker="o",
            markersize=4,
            label=variant,
        )
    legend_below(axes, columns=3)
