"""A contact sheet: what a data set looks like, on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np
from numpy.typing import NDArray

from bilevel.data.base import ImageDataset
from bilevel.data.splits import shuffled


def contact_sheet(
    data: ImageDataset,
    path: str | Path,
    *,
    columns: int = 12,
    images: int = 3,
    rows: int = 20,
    groups: Sequence[str] | None = None,
    seed: int = 0,
) -> Path:
    """Draw a page of images and save it.

    Class names of the form "script/character" make one row per script; other data sets get rows split by split.

    Args:
        data: what to show.
        path: the picture to write; its suffix says which kind.
        columns: classes in a row.
        images: images of each class, side by side.
        rows: at most so many rows.
        groups: which scripts; by default all, in their order.
        seed: of the choice of classes and images.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    titled = _rows(data, columns, rows, groups, seed)
    ink = _is_ink(data)
    figure = Figure(figsize=(0.30 * columns * images + 1.9, 0.34 * len(titled) + 0.5))
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(titled), 1, squeeze=False)[:, 0]
    for ax, (title, classes) in zip(axes, titled, strict=True):
        strip = _strip(data, classes, images, columns, seed)
        ax.imshow(255 - strip if ink else strip, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        ax.text(-6, strip.shape[0] / 2, title, ha="right", va="center", fontsize=8)
        ax.set_axis_off()
    figure.subplots_adjust(left=1.6 / figure.get_figwidth(), right=0.995, top=0.97, bottom=0.03, hspace=0.06)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    return target


def _rows(
    data: ImageDataset, columns: int, rows: int, groups: Sequence[str] | None, seed: int
) -> list[tuple[str, list[int]]]:
    """What stands before each row, and its classes."""
    if not all("/" in name for name in data.classes):
        parts = {name: chosen for name, chosen in data.splits.items() if chosen}
        found = []
        for name, chosen in parts.items():
            order = [chosen[k] for k in shuffled(len(chosen), seed)][: columns * max(1, rows // len(parts))]
            found += [(name, order[at : at + columns]) for at in range(0, len(order), columns)]
        return found
    part = {label: name for name, chosen in data.splits.items() for label in chosen}
    names: dict[str, list[int]] = {}
    for label, name in enumerate(data.classes):
        names.setdefault(name.partition("/")[0], []).append(label)
    found = []
    for group in groups if groups is not None else list(names):
        members = names[group]
        where = {part.get(label, "") for label in members}
        title = f"{shorten(group.replace('_', ' '), 24, placeholder='…')}, {len(members)}"
        # The part is named only where the whole group is in it.
        title += f"\n{where.pop()}" if len(where) == 1 else ""
        found.append((title, sorted(members[k] for k in shuffled(len(members), seed)[:columns])))
    return found[:rows]


def _is_ink(data: ImageDataset) -> bool:
    """Gray images that are mostly black hold ink = 255, and are easier to look at as ink on paper."""
    return data.shape[2] == 1 and float(np.mean(data.images[:: max(1, len(data) // 200)])) < 64


def _strip(data: ImageDataset, classes: list[int], images: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """The images of some classes in a row, with a gap between classes."""
    height, width, channels = data.shape
    gap = max(2, width // 9)
    blank = 0 if _is_ink(data) else 255
    strip = np.full((height, columns * (images * width + gap) - gap, channels), blank, np.uint8)
    for column, label in enumerate(classes):
        rows = np.flatnonzero(data.labels == label)
        for k, row in enumerate([rows[r] for r in shuffled(len(rows), seed)[:images]]):
            left = column * (images * width + gap) + k * width
            strip[:, left : left + width] = data.images[row]
    return strip[:, :, 0] if channels == 1 else strip
