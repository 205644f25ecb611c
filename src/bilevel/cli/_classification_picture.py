"""The picture of `bilevel classify`: the labelled pictures by class, and the new pictures with their predictions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from bilevel.cli._classification import Classification
from bilevel.cli._user_pictures import Pictures
from bilevel.models.batch_norm import MEANING
from bilevel.plotting import BLACK, GREEN, RED, picture, shortened, show_image

# The most columns, classes, pictures per class and queries that are drawn. Titles say how many are left out.
COLUMNS, CLASSES, SHOTS, QUERIES = 8, 20, 8, 64
CELL, CAPTION, TITLE = 1.15, 0.62, 0.55  # inches
LARGE, SMALL, GAP = 224, 96, 6  # pixels


def draw(result: Classification, path: Path) -> None:
    """Write the picture. It shows the pictures as the model sees them."""
    classes = list(result.classes)[:CLASSES]
    queries = worst_first(result)[:QUERIES]
    rows = -(-len(queries) // COLUMNS)
    heights = [TITLE, *[CELL] * len(classes), TITLE, *[CELL + CAPTION] * rows]
    with warnings.catch_warnings():
        # matplotlib warns about letters that its font lacks, and draws boxes. The table shows these class names.
        warnings.filterwarnings("ignore", "Glyph")
        with picture(path, width=1.7 + CELL * COLUMNS, height=sum(heights)) as figure:
            grid = figure.add_gridspec(len(heights), COLUMNS + 1, height_ratios=heights)
            learner = result.classifier.learner
            some = _some(len(classes), len(result.classes), "classes")
            beside = ": the original, small, and" if result.preparation.draws else ","
            _title(
                figure.add_subplot(grid[0, :]),
                f"Labelled pictures{beside} as the model sees them{some}",
                f"{result.model.name}{result.steps}."
                + (f" Batch norm: {learner.batch_norm}, {MEANING[learner.batch_norm]}." * learner.has_batch_norm),
            )
            _support(figure, grid, result, classes)
            score = result.accuracy()
            right = f": {score['right']} of {score['of']} right" if score else ""
            _title(
                figure.add_subplot(grid[len(classes) + 1, :]),
                f"Predictions{right}{_some(len(queries), len(result.truth), 'pictures')}",
                f"{'Mistakes first, then the' if score else 'The'} least certain first.",
            )
            for place, index in enumerate(queries):
                axes = figure.add_subplot(grid[len(classes) + 2 + place // COLUMNS, 1 + place % COLUMNS])
                _query(axes, result, index)


def worst_first(result: Classification) -> list[int]:
    """The queries, first those with a wrong prediction, then the others; the least certain first in each group."""

    def rank(index: int) -> tuple[bool, float]:
        return not _wrong(result, index), result.ranked(index)[0][1]

    return sorted(range(len(result.truth)), key=rank)


def _wrong(result: Classification, index: int) -> bool:
    return result.truth[index] not in (None, result.predictions[index])


def _support(figure: Any, grid: Any, result: Classification, classes: list[str]) -> None:
    first = 0
    for row, name in enumerate(classes, start=1):
        count = len(result.classes[name])
        label = figure.add_subplot(grid[row, 0])
        label.set_axis_off()
        text = shortened(name, 18) + (f"\n({SHOTS} of {count})" if count > SHOTS else "")
        label.text(1, 0.5, text, ha="right", va="center", fontsize=10)
        for column in range(min(count, SHOTS)):
            show_image(figure.add_subplot(grid[row, 1 + column]), _both(result, result.support, first + column))
        first += count


def _query(axes: Any, result: Classification, index: int) -> None:
    show_image(axes, _both(result, result.query, index))
    (_, p), name, true = result.ranked(index)[0], result.predictions[index], result.truth[index]
    wrong = _wrong(result, index)
    # The mark has the same meaning as the colour, for readers who cannot distinguish the colours.
    mark = "" if true is None else "✗ " if wrong else "✓ "
    lines = [f"{mark}{shortened(name, 14)}", f"not {shortened(str(true), 12)}" if wrong else "", f"{p:.0%}"]
    color = BLACK if true is None else RED if wrong else GREEN
    axes.set_title("\n".join(line for line in lines if line), fontsize=9, color=color)
    axes.text(
        0.5,
        -0.03,
        shortened(result.query.names[index], 24),
        fontsize=6,
        ha="center",
        va="top",
        transform=axes.transAxes,
    )


def _both(result: Classification, pictures: Pictures, index: int) -> NDArray[np.uint8]:
    """A picture as the model sees it. For drawings, with the small original to its left."""
    seen, original = pictures.images[index], pictures.shown[index]
    if not result.preparation.draws:
        return seen
    large = np.asarray(Image.fromarray(seen[:, :, 0]).resize((LARGE, LARGE), Image.Resampling.NEAREST))
    small = np.asarray(ImageOps.contain(Image.fromarray(original[:, :, 0]), (SMALL, SMALL)))
    shown = np.full((LARGE, LARGE + SMALL + GAP), 255, np.uint8)
    shown[:, SMALL + GAP :] = large
    shown[: len(small), : small.shape[1]] = small
    return shown[:, :, None]


def _title(axes: Any, title: str, below: str) -> None:
    axes.set_axis_off()
    axes.text(0, 0.75 if below else 0.3, title, ha="left", va="center", fontsize=12)
    axes.text(0, 0.15, below, ha="left", va="center", fontsize=9)


def _some(shown: int, total: int, what: str) -> str:
    return f" ({shown} of {total} {what})" if shown < total else ""
