"""Pictures of a tuning: the validation loss, and each hyperparameter in the form people would look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bilevel import trees
from bilevel.tuning.space import Space

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BEFORE, AFTER = "#6E6E6E", "#0072B2"
BARS = 40


def draw(
    figure: Figure | None, history: dict[str, Any], space: Space, before: dict[str, Any], after: dict[str, Any]
) -> Figure:
    """The validation loss over hyperiterations, and a panel for every hyperparameter."""
    if figure is None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as NewFigure

        count = 1 + len(space.declared)
        columns = min(count, 3)
        lines = -(-count // columns)
        figure = NewFigure(figsize=(4.4 * columns, 3.4 * lines), layout="constrained")
        FigureCanvasAgg(figure)
    count = 1 + len(space.declared)
    columns = min(count, 3)
    panels = figure.subplots(-(-count // columns), columns, squeeze=False).ravel()
    for panel in panels[count:]:
        panel.set_axis_off()
    _validation(panels[0], history)
    for panel, one in zip(panels[1:], space.declared, strict=False):
        logarithmic = space.kinds[one.name].word == "log"
        panel.set_title(one.name, loc="left")
        _hyperparameter(
            panel, one.axis(), before[one.name], after[one.name], history["values"].get(one.name), logarithmic
        )
    for panel in panels[:count]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#E4E4E4", linewidth=0.8)
        panel.set_axisbelow(True)
    return figure


def _validation(panel: Axes, history: dict[str, Any]) -> None:
    panel.plot(history["value"], color=AFTER)
    panel.set_title("validation loss", loc="left")
    panel.set_xlabel("hyperiteration")


def _hyperparameter(panel: Axes, axis: str | None, before: Any, after: Any, path: Any, logarithmic: bool) -> None:
    if isinstance(after, np.ndarray) and axis is None and after.size <= BARS:
        # A few numbers without names are counted.
        before, after = ({str(i): float(x) for i, x in enumerate(np.ravel(part))} for part in (before, after))
    if isinstance(after, float):
        panel.plot([before, after] if path is None else path, color=AFTER)
        panel.set_xlabel("hyperiteration")
    elif axis == "step":
        steps = np.arange(1, len(after) + 1)
        panel.plot(steps, before, color=BEFORE, linestyle="--", label="start")
        panel.plot(steps, after, color=AFTER, label="tuned")
        panel.set_xlabel("step")
        panel.legend(frameon=False)
    elif isinstance(after, dict) and all(isinstance(x, float) for x in after.values()) and len(after) <= BARS:
        places = np.arange(len(after))
        panel.bar(places, list(after.values()), color=AFTER, label="tuned")
        panel.scatter(places, list(before.values()), color=BEFORE, marker="_", s=150, label="start", zorder=3)
        panel.set_xticks(
            places, list(after), rotation=45 if len(after) > 4 else 0, ha="right" if len(after) > 4 else "center"
        )
        panel.set_xlabel(axis or "")
        panel.legend(frameon=False)
    else:
        return _histogram(panel, after, logarithmic)
    if logarithmic:
        panel.set_yscale("log")
    return None


def _histogram(panel: Axes, after: Any, logarithmic: bool) -> None:
    entries = np.concatenate([np.ravel(leaf) for leaf in trees.leaves(after)])
    if logarithmic and entries.min() < entries.max():
        edges: Any = np.geomspace(entries.min(), entries.max(), 41)
        panel.set_xscale("log")
    else:
        edges = 40
    panel.hist(entries, bins=edges, color=AFTER)
    panel.set_xlabel("tuned value")
    panel.set_ylabel("how many")
