"""Characters of the fonts inside matplotlib as bitmaps, from their outlines.

The outlines are filled here, by counting windings, and not by a font rasteriser: those differ from version to version,
and Glyphs should not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import ft2font
from numpy.typing import NDArray

GRID = 64
MARGIN = 4
# An enumeration since matplotlib 3.10, a number of the module before.
_flags: Any = getattr(ft2font, "LoadFlags", None)
NO_HINTING: Any = _flags.NO_HINTING if _flags is not None else vars(ft2font)["LOAD_NO_HINTING"]
CURVE = np.linspace(0.0, 1.0, 7)[1:, None]


@cache
def font(name: str) -> tuple[Any, frozenset[int]]:
    """An open font of matplotlib's, and the characters it really has (others would come out as boxes)."""
    opened = ft2font.FT2Font(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"))
    opened.set_size(100, 72)
    return opened, frozenset(code for code, glyph in opened.get_charmap().items() if glyph != 0)


def contours(name: str, code: int) -> list[NDArray[np.float64]]:
    """The outline of a character as closed polygons, without hints; an empty list for blanks."""
    opened, _ = font(name)
    opened.load_char(code, flags=NO_HINTING)
    vertices, codes = opened.get_path()
    polygons: list[NDArray[np.float64]] = []
    points: list[NDArray[np.float64]] = []
    at = 0
    while at < len(codes):
        kind = int(codes[at])
        if kind == 1:  # move
            polygons += [np.vstack(points)] if len(points) > 2 else []
            points = [vertices[at : at + 1]]
        elif kind == 2:  # line
            points.append(vertices[at : at + 1])
        elif kind == 3:  # quadratic curve
            start, control, end = points[-1][-1], vertices[at], vertices[at + 1]
            points.append((1 - CURVE) ** 2 * start + 2 * CURVE * (1 - CURVE) * control + CURVE**2 * end)
            at += 1
        elif kind == 4:  # cubic curve
            start, one, two, end = points[-1][-1], vertices[at], vertices[at + 1], vertices[at + 2]
            back = 1 - CURVE
            points.append(back**3 * start + 3 * CURVE * back**2 * one + 3 * CURVE**2 * back * two + CURVE**3 * end)
            at += 2
        at += 1
    polygons += [np.vstack(points)] if len(points) > 2 else []
    return polygons


def bitmap(name: str, code: int) -> NDArray[np.bool_] | None:
    """The character filled on a GRID×GRID lattice, its larger side spanning all but a margin; None for a blank."""
    polygons = contours(name, code)
    if not polygons:
        return None
    everything = np.vstack(polygons)
    low, high = everything.min(0), everything.max(0)
    extent = float((high - low).max())
    if extent <= 0:
        return None
    scale = (GRID - 2 * MARGIN) / extent
    winding = np.zeros((GRID, GRID + 1), np.int32)
    for polygon in polygons:
        placed = (polygon - (low + high) / 2) * scale + GRID / 2
        _wind(winding, placed)
    filled = np.cumsum(winding, axis=1)[:, :GRID] != 0
    return filled[::-1] if filled.any() else None


def _wind(winding: NDArray[np.int32], polygon: NDArray[np.float64]) -> None:
    """Mark, for every edge and every row of pixel centres it crosses, the first pixel to the right of the crossing."""
    following = np.roll(polygon, -1, axis=0)
    (x0, y0), (x1, y1) = polygon.T, following.T
    rows = np.arange(GRID) + 0.5
    up = (y0[:, None] <= rows) & (rows < y1[:, None])
    down = (y1[:, None] <= rows) & (rows < y0[:, None])
    edge, row = np.nonzero(up | down)
    x = x0[edge] + (rows[row] - y0[edge]) * (x1[edge] - x0[edge]) / (y1[edge] - y0[edge])
    column = np.clip(np.ceil(x - 0.5), 0, GRID).astype(np.int64)
    np.add.at(winding, (row, column), np.where(up[edge, row], 1, -1).astype(np.int32))
