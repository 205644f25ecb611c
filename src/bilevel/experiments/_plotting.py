"""One look for all pictures: colours that colour-blind readers can tell apart, fonts that survive a README's width."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
    "#6E6E6E",
)

# Any, because matplotlib types the keys differently from release to release.
STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
}


@contextmanager
def picture(path: Path, width: float = 11, height: float = 4.6) -> Iterator[Figure]:
    """A figure that is saved as a PNG when the block ends.

    Drawn through Agg and matplotlib's objects, never through pyplot, whose global state and window systems a library
    has no business with.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=150, metadata={"Software": None})


def legend_below(axes: Axes, columns: int = 2) -> None:
    """A legend under the axes, for pictures whose curves leave no corner free."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=columns, columnspacing=1.4)


def titled(axes: Axes, title: str, x: str, y: str) -> Axes:
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return axes
