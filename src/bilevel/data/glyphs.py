"""Glyphs: characters of the world's scripts, drawn by twenty simulated people; needs no download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from bilevel.data import places
from bilevel.data.base import Source, Splits
from bilevel.data.cache import DecodedImages, Workspace
from bilevel.data.preparation import Kind
from bilevel.data.splits import split_classes
from bilevel.errors import BilevelError


@dataclass(frozen=True)
class Glyphs(Source):
    """Drawings 28×28 with ink = 255: real characters from the fonts inside matplotlib, 20 drawers each.

    Characters are thinned to the path of a pen, which each drawer follows in their own way: typeface, slant,
    proportions, elastic bending, stroke ends, width of the pen. Characters that look alike are one class.

    Args:
        split: "script" puts whole scripts into train, val and test, so that a test episode shows scripts never seen
            before; "character" divides the characters of every script.
        seed: the seed of the split by character.
        drawing_seed: the seed of the drawings.
    """

    split: Literal["script", "character"] = "script"
    seed: int = 0
    drawing_seed: int = 0

    name: ClassVar[str] = "glyphs"
    pictures: ClassVar[Kind] = "gray-drawing"
    version: ClassVar[int] = 1
    needs_files: ClassVar[bool] = False
    after: ClassVar[tuple[str, ...]] = ("seed", "split")
    drawers: ClassVar[int] = 20

    def files(self, root: Path) -> list[Path]:
        if self.split not in ("script", "character"):
            raise BilevelError(f"split={self.split!r} is unknown; pass 'script' or 'character'.")
        if not 0 <= self.drawing_seed < 2**64:
            raise BilevelError(f"drawing_seed={self.drawing_seed} must be a whole number from 0 to 2⁶⁴ − 1.")
        return []

    def decode(self, root: Path, work: Workspace) -> DecodedImages:
        # Imported here, because looking at the fonts imports matplotlib.
        from bilevel.data import _pens, _scripts

        chosen = _scripts.characters()
        hands = _pens.drawers(self.drawing_seed, self.drawers)
        images = np.empty((len(chosen) * self.drawers, _pens.SIDE, _pens.SIDE, 1), np.uint8)
        for number, character in enumerate(chosen):
            rows = slice(number * self.drawers, (number + 1) * self.drawers)
            # Every character has its own random numbers, so that its drawings do not depend on other characters.
            random = _pens.RandomNumbers(self.drawing_seed, 1 + character.code)
            images[rows, :, :, 0] = _pens.draw(character.shapes, hands, random)
            work.report(number + 1, len(chosen))
        labels = np.repeat(np.arange(len(chosen)), self.drawers)
        parts = {script: part for script, (part, _) in _scripts.SCRIPTS.items()}
        meta = {"classes": [character.title for character in chosen], "parts": [parts[c.script] for c in chosen]}
        return DecodedImages(images, labels, meta)

    def splits(self, meta: Mapping[str, Any]) -> Splits:
        if self.split == "character":
            return split_classes(len(meta["classes"]), self.seed)
        return {
            part: [number for number, where in enumerate(meta["parts"]) if where == part]
            for part in ("train", "val", "test")
        }

    def fetch(self, root: Path, progress: bool | None = None) -> list[Path]:
        raise BilevelError(f"Glyphs is drawn, not downloaded; load('glyphs') needs nothing in {places.describe(root)}.")
