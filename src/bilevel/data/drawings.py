"""Drawings as in the training data: light ink on even black paper, in the middle of the frame."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bilevel.data._skeletons import thin

Gray = NDArray[np.float64]
# Less contrast than this, of 1, is the noise of blank paper.
FAINT = 0.06
# Longest side, in pixels, at which a page is cleaned, and at which its paper is estimated.
PAGE, PAPER = 640, 96
# Half the longest side, in pixels, at which ink and paper are compared: the window around a pixel is half of the page.
SURROUNDINGS = 16
# The most that a drawing has: mean range of the colour channels, share of ink, share of pixels between ink and paper.
COLOURED, INKED, SHADES = 0.15, 0.4, 0.3
# Side of the window that ink must be narrower than and shadows wider than, as a share of the page.
WINDOW = 0.3
# Pixels per side of the frame on which strokes are measured and drawn: Omniglot's.
FRAME = 105
# Longer side of the ink's box, as a share of the frame: outside this range, or with the box's centre further than
# OFFSET from the middle, the ink is moved to the middle and brought to EXTENT. EXTENT is the median of Omniglot's
# drawings, and the bounds hold for about 99 % of them.
SMALLEST, EXTENT, LARGEST, OFFSET = 0.3, 0.64, 0.95, 0.2
# Width of strokes as a share of the frame: outside this range they are redrawn with a pen of the width PEN. What is
# wider than WIDEST is a filled shape and stays.
THINNEST, PEN, THICKEST, WIDEST = 0.034, 0.051, 0.075, 0.2


@dataclass(frozen=True)
class Drawing:
    """The ink of a page, from 0 to 1, and which corrections were made."""

    ink: Gray
    inverted: bool = False
    evened: bool = False
    moved: bool = False
    redrawn: bool = False
    blank: bool = False


def cleaned(page: NDArray[np.uint8], invert: bool | None, clean: bool) -> Drawing:
    """The ink of a gray page, 0…1 on a paper of 0.

    Args:
        page: H×W.
        invert: whether the ink is darker than the paper; None: decide by the pixels.
        clean: whether to even out the paper; if not, the paper is assumed to have one shade.
    """
    values = _reduced(page).astype(np.float64) / 255
    dark = ink_is_dark(values) if invert is None else invert
    values = 1 - values if dark else values
    paper = _paper(values)
    # Shadows reach the border of a page. A filled shape does not, although an opening treats it as paper too.
    uneven = bool(np.ptp(_border(paper)) > FAINT)
    # A shadow reduces the light of paper and ink by the same factor. On a dark background only ink has light.
    if clean and uneven:
        ink = (values - paper) / np.maximum(1 - paper, FAINT) if dark else values - paper
    else:
        ink = values - np.median(_border(values))
    strongest = float(np.percentile(ink, 99.5))
    strongest = strongest if strongest >= FAINT else float(ink.max())
    if strongest < FAINT:
        return Drawing(np.zeros_like(values), inverted=dark, blank=True)
    return Drawing(np.clip(ink / strongest, 0, 1), inverted=dark, evened=clean and uneven)


def ink_is_dark(values: Gray) -> bool:
    """Whether most pixels that differ from the median around them are darker. There is less ink than paper."""
    small = _small(values, 2 * SURROUNDINGS)
    padded = np.pad(small, SURROUNDINGS // 2, mode="reflect" if min(small.shape) > SURROUNDINGS // 2 else "edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (SURROUNDINGS + 1, SURROUNDINGS + 1))
    paper = np.median(windows.reshape(*windows.shape[:2], -1), axis=-1)
    return float(((small - paper) ** 3).sum()) < 0


def is_drawing(picture: Image.Image) -> bool:
    """Whether a picture looks like a drawing: hardly any colour, little ink on much paper, few shades between them."""
    small = picture.convert("RGB")
    small.thumbnail((2 * PAPER, 2 * PAPER))
    colours = np.asarray(small, dtype=np.float64) / 255
    coloured = float(np.mean(np.ptp(colours, axis=2)))
    ink = cleaned(np.asarray(small.convert("L")), None, clean=True).ink
    return (
        coloured < COLOURED and float(np.mean(ink > 0.5)) < INKED and float(np.mean((ink > 0.2) & (ink < 0.8))) < SHADES
    )


def framed(drawing: Drawing) -> Drawing:
    """The ink in a square frame, moved to the middle and scaled to the usual size unless it is within the bounds."""
    ink = drawing.ink
    if drawing.blank:
        return replace(drawing, ink=np.zeros((FRAME, FRAME)))
    top, bottom, left, right = _box(ink)
    side, extent = max(ink.shape), max(bottom - top, right - left)
    away = max(abs(top + bottom - ink.shape[0]), abs(left + right - ink.shape[1])) / 2
    if SMALLEST <= extent / side <= LARGEST and away <= OFFSET * side:
        return replace(drawing, ink=_window(ink, ink.shape[0] / 2, ink.shape[1] / 2, side))
    return replace(drawing, ink=_window(ink, (top + bottom) / 2, (left + right) / 2, extent / EXTENT), moved=True)


def whole(drawing: Drawing) -> Drawing:
    """The page as it is, with paper added at its shorter sides to make it a square."""
    height, width = drawing.ink.shape
    return replace(drawing, ink=_window(drawing.ink, height / 2, width / 2, max(height, width)))


def inked(drawing: Drawing, pen: bool = True) -> Drawing:
    """Ink or no ink, 1 or 0; with `pen`, strokes of an unusual width are redrawn, on a frame of FRAME pixels."""
    ink = drawing.ink
    if drawing.blank:
        return drawing
    mask = ink > _threshold(ink)
    width = _stroke_width(mask) if pen else PEN
    if THINNEST <= width <= THICKEST or width > WIDEST:
        return replace(drawing, ink=mask.astype(np.float64))
    large = resized(ink, FRAME)
    lines = thin(np.pad(large > _threshold(large), 1)[None])[0, 1:-1, 1:-1]
    return replace(drawing, ink=_drawn(lines, PEN * FRAME).astype(np.float64), redrawn=True)


def nearest(bitmap: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """A square bitmap at another size: the pixel that holds the centre of each target pixel."""
    places = ((2 * np.arange(size) + 1) * len(bitmap)) // (2 * size)
    return bitmap[np.ix_(places, places)]


def _reduced(page: NDArray[np.uint8]) -> NDArray[np.uint8]:
    longest = max(page.shape)
    if longest <= PAGE:
        return page
    size = tuple(max(1, round(side * PAGE / longest)) for side in page.shape[::-1])
    return np.asarray(Image.fromarray(page).resize(size, Image.Resampling.BOX))


def _border(values: Gray) -> Gray:
    return np.concatenate([values[0], values[-1], values[:, 0], values[:, -1]])


def _small(values: Gray, longest: int = PAPER) -> Gray:
    factor = min(1.0, longest / max(values.shape))
    size = tuple(max(1, round(side * factor)) for side in values.shape[::-1])
    picture = Image.fromarray(values.astype(np.float32))
    return np.asarray(picture.resize(size, Image.Resampling.BOX), dtype=np.float64)


def _paper(values: Gray) -> Gray:
    """The shade of the paper at every pixel, where the ink is lighter: an opening with a window wider than strokes."""
    paper = Image.fromarray(_opening(_small(values)).astype(np.float32))
    return np.asarray(paper.resize(values.shape[::-1], Image.Resampling.BILINEAR), dtype=np.float64)


def _opening(values: Gray) -> Gray:
    """The maximum over a window of the minima over windows, which removes what is lighter and narrower than it."""
    size = 2 * (round(WINDOW * max(values.shape)) // 2) + 1
    return _largest(-_largest(-values, size), size)


def _largest(values: Gray, size: int) -> Gray:
    """The maximum over a square window around every pixel."""
    for axis in (0, 1):
        widths = [(size // 2, size // 2) if a == axis else (0, 0) for a in (0, 1)]
        padded = np.pad(values, widths, mode="edge")
        values = np.lib.stride_tricks.sliding_window_view(padded, size, axis=axis).max(-1)
    return values


def _threshold(ink: Gray) -> float:
    """The threshold between ink and paper for which the variance between the two is largest (Otsu, 1979)."""
    counts, edges = np.histogram(ink, 256, (0, 1))
    middles = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)
    above = below[-1] - below
    sums = np.cumsum(counts * middles)
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (sums / below - (sums[-1] - sums) / above) ** 2
    # The middle of all equally good thresholds: for a picture in black and white this is 1/2.
    between = np.nan_to_num(between)
    best = np.flatnonzero(between >= between.max() * (1 - 1e-12))
    return float(edges[1 + best].mean()) if between.max() > 0 else 0.5


def _box(ink: Gray) -> tuple[int, int, int, int]:
    """Rows and columns between which the ink lies, first and one past the last."""
    mask = ink > _threshold(ink)
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _window(ink: Gray, row: float, column: float, side: float) -> Gray:
    """The square of that side around a point, with paper where it leaves the page; large ones are reduced to FRAME."""
    size = round(side)
    if ink.shape == (size, size) and abs(row - size / 2) < 1 and abs(column - size / 2) < 1:
        return ink
    top, left = row - side / 2, column - side / 2
    margin = int(max(0, -top, -left, top + side - ink.shape[0], left + side - ink.shape[1])) + 1
    box = (left + margin, top + margin, left + margin + side, top + margin + side)
    return resized(np.pad(ink, margin), min(size, FRAME), box)


def resized(ink: Gray, size: int, box: tuple[float, float, float, float] | None = None) -> Gray:
    """A square frame of another size, or a square part of it: left, top, right and bottom of the box."""
    if box is None and ink.shape == (size, size):
        return ink
    picture = Image.fromarray(ink.astype(np.float32))
    return np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC, box), dtype=np.float64).clip(0, 1)


def _stroke_width(mask: NDArray[np.bool_]) -> float:
    """Area over length of the strokes, as a share of the frame."""
    length = int(thin(np.pad(mask, 1)[None]).sum())
    return float(mask.sum()) / max(1, length) / len(mask)


def _drawn(lines: NDArray[np.bool_], width: float) -> NDArray[np.bool_]:
    """Every pixel within width/2 of a line."""
    reach = int(width / 2)
    drawn = np.zeros_like(lines)
    padded = np.pad(lines, reach)
    side = len(lines)
    for down in range(-reach, reach + 1):
        for across in range(-reach, reach + 1):
            if down**2 + across**2 <= (width / 2) ** 2:
                drawn |= padded[reach + down : reach + down + side, reach + across : reach + across + side]
    return drawn
