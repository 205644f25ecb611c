"""The style of every picture that the package draws, and how a picture is saved.

The colours are Okabe and Ito's palette, which colour-blind readers can tell apart. Figures are matplotlib's own objects
with an Agg canvas: pyplot is not used, so nothing stays open, no window system is needed, and a figure is freed with
its last reference. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilevel import extras
from bilevel.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
else:
    Axes = Any  # a name for annotations in modules that draw

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
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)  # for curves, in this order

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
    "svg.hashsalt": "bilevel",
}

# Fonts with more scripts than matplotlib's own, on the usual systems.
OTHER_SCRIPTS = ("Noto Sans CJK JP", "Noto Sans", "Microsoft YaHei", "Hiragino Sans", "Arial Unicode MS")


def style() -> AbstractContextManager[None]:
    """The package's style, for everything that is drawn inside the block."""
    extras.require("matplotlib", extra="report", purpose="Drawing a picture")
    import matplotlib
    from matplotlib import font_manager

    # matplotlib looks for a character in one font after the other.
    installed = [name for name in OTHER_SCRIPTS if name in set(font_manager.get_font_names())]
    return matplotlib.rc_context({**STYLE, "font.family": ["DejaVu Sans", *installed]})


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@contextmanager
def picture(path: Path, width: float = 11, height: float = 4.6) -> Iterator[Figure]:
    """A figure in the package's style. It is saved when the block ends without an error."""
    with style():
        figure = new_figure(width, height)
        yield figure
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write the figure atomically, as PNG or SVG by the suffix. Equal figures give equal bytes."""
    kind = path.suffix.removeprefix(".").lower()
    content = io.BytesIO()
    with warnings.catch_warnings():
        # A script that no installed font has is drawn as boxes; the user can do nothing about it here.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        # A very long name may leave no room for the layout; the picture is then drawn without it.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    write_bytes(path, content.getvalue())


def titled(axes: Axes, title: str, x: str = "", y: str = "") -> Axes:
    """The axes, with a title at the left and names at both axes."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return axes


def dots(axes: Axes, x: Any, y: Any, colour: Any, label: str | None = None, size: float = 6, **more: Any) -> None:
    """Points without a line; `marker` and other options of matplotlib's `plot` may follow."""
    axes.plot(x, y, **{"linestyle": "none", "marker": "o", "markersize": size, "color": colour, "label": label, **more})


def legend_below(axes: Axes, columns: int = 2) -> None:
    """A legend under the axes, for pictures whose curves leave no corner free."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=columns, columnspacing=1.4)


def show_image(axes: Axes, image: NDArray[Any], most: float = 255, **more: Any) -> None:
    """An image H×W×C of values from 0 to `most`, without ticks; one channel is shown in grey, pixel by pixel."""
    if image.shape[2] == 1:
        axes.imshow(image[:, :, 0], cmap="gray", vmin=0, vmax=most, interpolation="nearest", **more)
    else:
        axes.imshow(image, **more)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)


def class_name(title: str) -> str:
    """A readable name of a data set's class.

    >>> class_name("hebrew/U+05D0 HEBREW LETTER ALEF"), class_name("Tengwar/character07")
    ('hebrew alef', 'Tengwar character07')
    """
    name = title.partition("/U+")[2].partition(" ")[2].lower() or title
    return name.replace(" letter ", " ").replace("/", " ")


def shortened(text: str, width: int = 22) -> str:
    """Text of at most `width` characters, in which a dollar does not begin a formula.

    >>> shortened("price in $ per square metre", 12)
    'price in \\\\$ …'
    """
    short = text if len(text) <= width else text[: width - 1] + "…"
    return short.replace("$", r"\$")
