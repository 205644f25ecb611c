"""Which characters Glyphs draws: the scripts in matplotlib's fonts, and what remains without look-alikes."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bilevel.data import _outlines, _skeletons

# In the order of preference. Bold faces are for scripts that no serif face has: their skeletons are slightly different.
FACES = (
    "DejaVuSans",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "DejaVuSansMono",
    "DejaVuSans-Bold",
    "STIXGeneral",
    "STIXGeneralItalic",
    "DejaVuSerif-Bold",
)
# Script: its part in the split by script, and its characters. A character that looks like an earlier one is left out,
# so small scripts come before large ones. Latin, Lisu (Latin capitals, turned) and Fraktur stay in one part.
SCRIPTS: dict[str, tuple[str, tuple[tuple[int, int], ...]]] = {
    "coptic": ("train", ((0x3E2, 0x3EF),)),
    "greek": ("train", ((0x391, 0x3E1), (0x3F0, 0x3FF))),
    "hebrew": ("test", ((0x5D0, 0x5EA),)),
    "old italic": ("val", ((0x10300, 0x1031E),)),
    "ogham": ("train", ((0x1681, 0x169A),)),
    "nko": ("test", ((0x7CA, 0x7EA),)),
    "lao": ("val", ((0xE81, 0xEAE), (0xEC0, 0xEC4))),
    "tifinagh": ("test", ((0x2D30, 0x2D67),)),
    "armenian": ("val", ((0x531, 0x587),)),
    "georgian mkhedruli": ("test", ((0x10D0, 0x10FA),)),
    "georgian asomtavruli": ("test", ((0x10A0, 0x10C5),)),
    "georgian nuskhuri": ("test", ((0x2D00, 0x2D25),)),
    "lisu": ("train", ((0xA4D0, 0xA4F7),)),
    "latin": (
        "train",
        ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x2AF), (0x1D00, 0x1D2B), (0x2C60, 0x2C7F), (0xA720, 0xA7FF)),
    ),
    "cyrillic": ("train", ((0x400, 0x52F), (0xA640, 0xA697))),
    "fraktur": ("train", ((0x1D504, 0x1D537),)),
    "arabic": ("test", ((0x620, 0x64A), (0x66E, 0x6D3))),
    "canadian syllabics": ("train", ((0x1401, 0x1676),)),
}
BOX = 52  # side of the square that a skeleton is scaled to before it is compared
NEAR = 39  # two skeletons look alike when every pixel of each is within √39 = 0.12 boxes of the other
SPUR = 8  # pixels; shorter branches of a skeleton are pruned
LEAST = 20  # pixels of a skeleton; below are dots


@dataclass
class PenPath:
    """The path of a pen in a unit box around 0 (x right, y down): its points, and the pairs that are joined."""

    points: NDArray[np.float64]
    pairs: NDArray[np.int64]


@dataclass
class Character:
    """One class: a character of a script, and its shapes in typefaces in which it looks like no other character."""

    script: str
    code: int
    shapes: list[PenPath]

    @property
    def title(self) -> str:
        return f"{self.script}/U+{self.code:04X} {unicodedata.name(chr(self.code))}"


def characters() -> list[Character]:
    """All characters, without blanks and look-alikes, in the order of SCRIPTS and of their codes."""
    found: list[Character] = []
    others: list[tuple[str, int]] = []
    for script, (_, ranges) in SCRIPTS.items():
        for code in (code for first, last in ranges for code in range(first, last + 1)):
            if not _is_letter(code):
                continue
            faces = [face for face in FACES if code in _outlines.font(face)[1]]
            if faces:
                found.append(Character(script, code, []))
                others.append((faces[0], code))
    shapes = _shapes(others)
    kept: list[Character] = []
    rasters = [None if shape is None else _raster(shape) for shape in shapes]
    drawn = [number for number, raster in enumerate(rasters) if raster is not None]
    alike = _alike([rasters[n] for n in drawn], [rasters[n] for n in drawn])  # type: ignore[misc]
    accepted: list[int] = []
    for row, number in enumerate(drawn):
        if not alike[row, accepted].any():
            accepted.append(row)
            found[number].shapes.append(shapes[number])  # type: ignore[arg-type]
            kept.append(found[number])
    _add_faces(kept, [rasters[drawn[row]] for row in accepted])  # type: ignore[misc]
    return kept


def _add_faces(kept: list[Character], first: list[NDArray[np.int64]]) -> None:
    """Give every character its shapes in further typefaces, unless they look like another character."""
    wanted = [
        (face, number)
        for number, character in enumerate(kept)
        for face in [face for face in FACES if character.code in _outlines.font(face)[1]][1:]
    ]
    shapes = _shapes([(face, kept[number].code) for face, number in wanted])
    good = [(shape, number) for shape, (_, number) in zip(shapes, wanted, strict=True) if shape is not None]
    alike = _alike([_raster(shape) for shape, _ in good], first)
    for row, (shape, number) in enumerate(good):
        alike[row, number] = False
        if not alike[row].any():
            kept[number].shapes.append(shape)


def _is_letter(code: int) -> bool:
    """Whether it is a letter without an accent: an accent is hardly visible in 28 pixels."""
    apart = unicodedata.decomposition(chr(code))
    return unicodedata.category(chr(code)) in ("Lu", "Ll", "Lo") and (not apart or apart.startswith("<font>"))


def _shapes(wanted: list[tuple[str, int]]) -> list[PenPath | None]:
    bitmaps = [_outlines.bitmap(face, code) for face, code in wanted]
    drawn = [number for number, bitmap in enumerate(bitmaps) if bitmap is not None]
    shapes: list[PenPath | None] = [None] * len(wanted)
    thinned = _skeletons.thin(np.stack([bitmap for bitmap in bitmaps if bitmap is not None]))
    for number, skeleton in zip(drawn, thinned, strict=True):
        pixels, pairs = _skeletons.links(skeleton)
        keep = _skeletons.prune(len(pixels), pairs, SPUR)
        place = np.cumsum(keep) - 1
        pairs = place[pairs[keep[pairs].all(axis=1)]]
        points = pixels[keep][:, ::-1].astype(np.float64)
        low, high = points.min(0), points.max(0)
        if len(points) >= LEAST and (high - low).max() >= LEAST:
            shapes[number] = PenPath((points - (low + high) / 2) / (high - low).max(), pairs)
    return shapes


def _raster(shape: PenPath) -> NDArray[np.int64]:
    """The pixels of a skeleton on the 64×64 lattice on which skeletons are compared."""
    return np.rint(shape.points * BOX + 32).astype(np.int64)


def _alike(ones: list[NDArray[np.int64]], others: list[NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Which of `ones` look like which of `others`, in whole numbers, so that all machines give the same result."""

    def within(points: list[NDArray[np.int64]], regions: NDArray[np.bool_]) -> NDArray[np.bool_]:
        flat = np.concatenate(points) @ np.array([64, 1])
        starts = np.cumsum([0, *(len(part) for part in points[:-1])])
        return np.stack([np.minimum.reduceat(region.take(flat), starts) for region in regions])

    return within(others, _surroundings(ones)) & within(ones, _surroundings(others)).T


def _surroundings(rasters: list[NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Everything within √NEAR pixels of each raster."""
    reach, side = int(NEAR**0.5), 64
    wide = np.zeros((len(rasters), side + 2 * reach, side + 2 * reach), bool)
    for region, raster in zip(wide, rasters, strict=True):
        region[raster[:, 0] + reach, raster[:, 1] + reach] = True
    near = np.zeros((len(rasters), side + 2 * reach, side), bool)
    regions = np.zeros((len(rasters), side, side), bool)
    # A disc is made of rows, which are the wider the nearer they are to its middle: widen by one pixel after another.
    widths = {row: int((NEAR - row * row) ** 0.5) for row in range(-reach, reach + 1)}
    for width in range(reach + 1):
        near |= wide[:, :, reach - width : reach - width + side] | wide[:, :, reach + width : reach + width + side]
        for row in (row for row, most in widths.items() if most == width):
            regions |= near[:, reach + row : reach + row + side]
    return regions
