"""The picture of `strategies`: accuracy against the seconds of training, a line for each learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilevel.plotting import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, legend_below, picture, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
            at, scores = [point[1] for point in curve], [100 * point[2] for point in curve]
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(at, scores, color=colour, linestyle=line, marker=marker, markersize=4)
            ends.append((scores[-1], at[-1], row, colour))
        else:
            level = 100 * row["curve"][-1][2]
            axes.plot([first, last], [level, level], color=colour, linestyle=line, linewidth=1)
            ends.append((level, last, row, colour))
    _label(axes, ends, last)
    _name_strategies(axes, list(seen))


def _label(axes: Axes, ends: list[tuple[float, float, Mapping[str, Any], str]], last: float) -> None:
    """The names at the right, from bottom to top in the order of the lines' ends, without touching each other."""
    low, high = axes.get_ylim()
    apart = LABEL_HEIGHT * (high - low)
    ends = sorted(ends, key=lambda end: end[0])
    places: list[float] = []
    for level, *_ in ends:
        places.append(max(level, places[-1] + apart) if places else level)
    over = max(0.0, places[-1] - high)  # the highest names may not leave the axes
    for i in reversed(range(len(places))):
        ceiling = places[i + 1] - apart if i + 1 < len(places) else high
        places[i] = min(places[i], ceiling) if over else places[i]
    for place, (level, at, row, colour) in zip(places, ends, strict=True):
        axes.annotate(
            f"{row['learner']} {100 * row['accuracy']:.1f}",
            (at, level),
            (last * 1.5, place),
            color=colour,
            fontsize=9,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6},
            annotation_clip=False,
        )
    axes.set_ylim(low, high)
    left = axes.get_xlim()[0]
    axes.set_xlim(left, last * (last / left) ** 0.45 * 1.5)  # room for the names


def _name_strategies(axes: Axes, strategies: Sequence[str]) -> None:
    for strategy in strategies:
        axes.plot([], [], color=COLOURS.get(strategy, SKY), linewidth=4, label=strategy)
    legend_below(axes, columns=3)
