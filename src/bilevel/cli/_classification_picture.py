"""The picture of `bilevel classify`: the labelled pictures by class, and the new ones with what was said about them."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bilevel.cli._classification import Classification
from bilevel.experiments._plotting import BLACK, GREEN, RED, picture
from bilevel.models.batch_norm import MEANING
from bilevel.training.files import write_bytes

# More would not be readable on one page, and what is left out is said.
COLUMNS, CLASSES, SHOTS, QUERIES = 8, 20, 8, 64
CELL, CAPTION, TITLE = 1.15, 0.42, 0.55  # inches


def draw(result: Classification, path: Path) -> None:
    """Write the picture; the pictures in it are shown as the model sees them."""
    classes = list(result.classes)[:CLASSES]
    queries = min(len(result.truth), QUERIES)
    rows = -(-queries // COLUMNS)
    heights = [TITLE, *[CELL] * len(classes), TITLE, *[CELL + CAPTION] * rows]
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        # Class names in a script that matplotlib's font lacks are drawn as boxes; the table has them.
        warnings.filterwarnings("ignore", "Glyph")
        file = Path(scratch) / "picture.png"
        with picture(file, width=1.7 + CELL * COLUMNS, height=sum(heights)) as figure:
            grid = figure.add_gridspec(len(heights), COLUMNS + 1, height_ratios=heights)
            learner = result.classifier.learner
            _title(
                figure.add_subplot(grid[0, :]),
                f"Labelled pictures, as the model sees them{_some(len(classes), len(result.classes), 'classes')}",
                f"{result.model.name}, T = {result.classifier.steps}. Batch norm: {learner.batch_norm}, "
                f"{MEANING[learner.batch_norm]}.",
            )
            _support(figure, grid, result, classes)
            score = result.accuracy()
            right = f": {score['right']} of {score['of']} right" if score else ""
            _title(
                figure.add_subplot(grid[len(classes) + 1, :]),
                f"Predictions{right}{_some(queries, len(result.truth), 'pictures')}",
                "",
            )
            for index in range(queries):
                axes = figure.add_subplot(grid[len(classes) + 2 + index // COLUMNS, 1 + index % COLUMNS])
                _query(axes, result, index)
        write_bytes(path, file.read_bytes())


def _support(figure: Any, grid: Any, result: Classification, classes: list[str]) -> None:
    first = 0
    for row, name in enumerate(classes, start=1):
        count = len(result.classes[name])
        label = figure.add_subplot(grid[row, 0])
        label.set_axis_off()
        text = _plain(name, 18) + (f"\n({SHOTS} of {count})" if count > SHOTS else "")
        label.text(1, 0.5, text, ha="right", va="center", fontsize=10)
        for column in range(min(count, SHOTS)):
            _image(figure.add_subplot(grid[row, 1 + column]), result.support.images[first + column])
        first += count


def _query(axes: Any, result: Classification, index: int) -> None:
    _image(axes, result.query.images[index])
    (name, p), true = result.ranked(index)[0], result.truth[index]
    wrong = true is not None and true != name
    # The mark says it too, for who cannot tell the colours apart.
    mark = "" if true is None else "✗ " if wrong else "✓ "
    axes.set_title(
        f"{mark}{_plain(name, 14)}\n{p:.0%}", fontsize=9, color=BLACK if true is None else RED if wrong else GREEN
    )


def _image(axes: Any, image: NDArray[Any]) -> None:
    axes.imshow(image[:, :, 0] if image.shape[2] == 1 else image, cmap="gray", vmin=0, vmax=255)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)


def _title(axes: Any, title: str, below: str) -> None:
    axes.set_axis_off()
    axes.text(0, 0.75 if below else 0.3, title, ha="left", va="center", fontsize=12)
    axes.text(0, 0.15, below, ha="left", va="center", fontsize=9)


def _some(shown: int, there: int, what: str) -> str:
    return f" ({shown} of {there} {what})" if shown < there else ""


def _plain(text: str, width: int) -> str:
    """Short, and with dollars that do not begin a formula."""
    short = text if len(text) <= width else text[: width - 1] + "…"
    return short.replace("$", r"\$")
