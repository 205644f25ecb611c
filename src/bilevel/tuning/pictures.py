"""Pictures of a tuning: the validation loss, and every hyperparameter before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bilevel import plotting, trees
from bilevel.plotting import titled
from bilevel.tuning.space import Space
from bilevel.tuning.transforms import LogTransform

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEFORE, AFTER = plotting.GREY, plotting.BLUE
# More values than this are drawn as a histogram.
LARGEST_BAR_CHART = 40


def draw(
    figure: Figure | None, history: dict[str, Any], space: Space, before: dict[str, Any], after: dict[str, Any]
) -> Figure:
    """The validation loss over hyperiterations, and a panel for every hyperparameter."""
    count = 1 + len(space.declared)
    columns = min(count, 3)
    rows = -(-count // columns)
    with plotting.style():
        figure = figure or plotting.new_figure(4.4 * columns, 3.4 * rows)
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel in panels[count:]:
            panel.set_axis_off()
        titled(panels[0], "validation loss", "hyperiteration").plot(history["value"], color=AFTER)
        for panel, one in zip(panels[1:], space.declared, strict=False):
            old, new, path = before[one.name], after[one.name], history["values"].get(one.name)
            logarithmic = isinstance(space.transforms[one.name], LogTransform)
            few = sum(map(np.size, trees.leaves(new))) <= LARGEST_BAR_CHART and one.per in ("run", "layer", "loss")
            if isinstance(new, float):
                titled(panel, one.name, "hyperiteration").plot([old, new] if path is None else path, color=AFTER)
            elif one.per == "step":
                _schedule(titled(panel, one.name, "step"), old, new)
            elif few:
                _bars(titled(panel, one.name, "" if one.per == "run" else one.per), old, new)
            else:
                _histogram(titled(panel, one.name, "tuned value", "count"), new, logarithmic)
                continue
            panel.set_yscale("log" if logarithmic else "linear")
    return figure


def _schedule(panel: Axes, before: Any, after: Any) -> None:
    steps = np.arange(1, len(after) + 1)
    panel.plot(steps, before, color=BEFORE, linestyle="--", label="start")
    panel.plot(steps, after, color=AFTER, label="tuned")
    panel.legend()


def _bars(panel: Axes, before: Any, after: Any) -> None:
    names = list(after) if isinstance(after, dict) else [str(i) for i in range(after.size)]
    heights, starts = (list(x.values()) if isinstance(x, dict) else np.ravel(x) for x in (after, before))
    positions, crowded = np.arange(len(names)), len(names) > 4
    panel.bar(positions, heights, color=AFTER, label="tuned")
    panel.scatter(positions, starts, color=BEFORE, marker="_", s=150, label="start", zorder=3)
    panel.set_xticks(positions, names, rotation=45 if crowded else 0, ha="right" if crowded else "center")
    panel.legend()


def _histogram(panel: Axes, after: Any, logarithmic: bool) -> None:
    entries = np.concatenate([np.ravel(leaf) for leaf in trees.leaves(after)])
    logarithmic = logarithmic and entries.min() < entries.max()
    bins: Any = np.geomspace(entries.min(), entries.max(), 41) if logarithmic else 40
    panel.hist(entries, bins=bins, color=AFTER)
    panel.set_xscale("log" if logarithmic else "linear")
