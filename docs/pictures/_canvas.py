"""What the pictures share: colours that everybody can tell apart, boxes, arrows, and files that do not change."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#666666"


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty drawing whose units are inches."""
    figure, axes = plt.subplots(figsize=(width, height))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, text: str, *, size: tuple[float, float], colour: str, filled: bool) -> None:
    """A box around (x, y)."""
    width, height = size
    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=colour if filled else "white",
        edgecolor=colour,
        linewidth=1.4,
    )
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color="white" if filled else "black")


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    colour: str = GREY,
    bend: float = 0,
) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)
    if text:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(x, y + 0.07, text, ha="center", va="bottom", fontsize=8.5, color=GREY)


def save(figure: Figure, path: Path) -> None:
    """As SVG that is the same whenever it is drawn."""
    with matplotlib.rc_context({"svg.hashsalt": "bilevel"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
