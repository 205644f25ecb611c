"""The picture of `strategies`: accuracy against the seconds of training, a line for each learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bilevel.plotting import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Axes, legend_below, picture, titled

# A colour for each strategy, and for learners of one strategy another dash and marker, so that no line needs colours.
COLOURS = {
    "representation": BLUE,
    "initialisation": ORANGE,
    "optimisation": GREEN,
    "metric": RED,
    "memorisation": PURPLE,
    "baseline": GREY,
}
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Between the names of two lines, as a share of the height of the axes.
LABEL_HEIGHT = 0.042
# The accuracies that are marked, in per cent. The axis is logistic: it shows the differences between good learners.
TICKS = (2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5)


def draw(path: Path, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A panel for each problem."""
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    most = max(map(len, found.values()))
    with picture(path, width=7.6 * columns, height=rows * max(4.6, 0.21 * most + 1.2)) as figure:
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, (problem, learners) in zip(panels, found.items(), strict=False):
            _panel(axes, problem, learners)
        for axes in panels[len(found) :]:
            axes.set_visible(False)


def _panel(axes: Axes, problem: str, learners: Sequence[Mapping[str, Any]]) -> None:
    titled(axes, problem, "seconds of training, one thread", "meta-validation accuracy in per cent")
    axes.text(1, 1.04, "meta-test", transform=axes.transAxes, ha="right", fontsize=9)
    axes.set_xscale("log")
    axes.set_yscale("logit")
    axes.set_yticks([tick / 100 for tick in TICKS], [f"{tick:g}" for tick in TICKS])
    axes.set_yticks([], minor=True)
    trained = [row for row in learners if row["trains"]]
    first = min((row["curve"][1][1] for row in trained), default=0.1)
    last = max((row["seconds"] for row in trained), default=1.0)
    seen: dict[str, int] = {}
    ends = []
    for row in learners:
        colour = COLOURS.get(row["strategy"], SKY)
        number = seen[row["strategy"]] = seen.get(row["strategy"], -1) + 1
        line = LINES[number % len(LINES)]
        if row["trains"]:
            curve = [point for point in row["curve"] if point[1] > 0]  # before training there is no place on the axis
            at, scores = [point[1] for point in curve], [_on_axis(point[2]) for point in curve]
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(at, scores, color=colour, linestyle=line, marker=marker, markersize=4)
            ends.append((scores[-1], at[-1], row, colour))
        else:
            level = _on_axis(row["curve"][-1][2])
            axes.plot([first, last], [level, level], color=colour, linestyle=line, linewidth=1)
            ends.append((level, last, row, colour))
    _label(axes, ends, last)
    _name_strategies(axes, list(seen))


def _on_axis(accuracy: float) -> float:
    """The accuracy, at a distance from 0 and 1, which are at infinity."""
    return min(max(accuracy, 0.01), 0.998)


def _label(axes: Axes, ends: list[tuple[float, float, Mapping[str, Any], str]], last: float) -> None:
    """The names at the right, from bottom to top in the order of the lines' ends, without touching each other."""
    left = axes.get_xlim()[0]
    axes.set_xlim(left, last * (last / left) ** 0.45 * 1.5)  # room for the names
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends, key=lambda end: end[0])
    places: list[float] = []
    for level, at, *_ in ends:
        height = float(to_axes.transform((at, level))[1])
        places.append(max(height, places[-1] + LABEL_HEIGHT) if places else height)
    if places[-1] > 1:  # the highest names may not leave the axes
        for i in reversed(range(len(places))):
            places[i] = min(places[i], places[i + 1] - LABEL_HEIGHT if i + 1 < len(places) else 1)
    beside = float(to_axes.transform((last * 1.5, 0.5))[0])
    for place, (level, at, row, colour) in zip(places, ends, strict=True):
        axes.annotate(
            f"{row['learner']} {100 * row['accuracy']:.1f}",
            (at, level),
            (beside, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def _name_strategies(axes: Axes, strategies: Sequence[str]) -> None:
    for strategy in strategies:
        axes.plot([], [], color=COLOURS.get(strategy, SKY), linewidth=4, label=strategy)
    legend_below(axes, columns=3)
