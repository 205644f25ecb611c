"""A picture on the desk: its file, how the page shows it, and the input of the model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import ImageOps

from bilevel.data.drawings import is_drawing
from bilevel.data.pictures import encoded, open_picture
from bilevel.data.preparation import Preparation, PreparedPicture, prepared

# The largest width and height, in pixels, of a picture on the page.
SHOWN = 160
# Texts about the preparation of a picture, by the fields of `PreparedPicture`.
DONE = {
    "inverted": "light and dark were swapped",
    "evened": "the paper was evened out",
    "moved": "it was cropped to its ink",
    "redrawn": "its strokes were redrawn with the width of the training pictures",
}


@dataclass(frozen=True, eq=False)
class DeskPicture:
    """A picture on the desk.

    Attributes:
        name: the name of its file, for messages.
        contents: the file. It is kept, because another model may prepare it in another way.
        shown: a small version as PNG.
        drawn: whether it looks like a drawing.
    """

    name: str
    contents: bytes
    shown: bytes
    drawn: bool
    _prepared: dict[Preparation, PreparedPicture] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, contents: bytes, name: str) -> DeskPicture:
        """From the contents of a file; what cannot be read is an `UnreadablePicture`."""
        picture = open_picture(contents, name)
        # Through the preparation of photographs, which knows how to bring every mode to 8 bits.
        width, height = ImageOps.exif_transpose(picture).size
        share = min(1.0, SHOWN / max(width, height))
        size = Preparation("photograph", 3, max(1, round(height * share)), max(1, round(width * share)))
        return cls(name, contents, encoded(prepared(picture, name, size).image), is_drawing(picture))

    @classmethod
    def seen_by(cls, preparation: Preparation, image: NDArray[np.uint8], name: str) -> DeskPicture:
        """A picture from an input of a model, uint8 H×W×C, without the original."""
        contents = encoded(image)
        return cls(name, contents, contents, preparation.draws, {preparation: PreparedPicture(image)})

    def prepared(self, preparation: Preparation) -> PreparedPicture:
        """The picture as an input of a model. It is computed once for each preparation."""
        if preparation not in self._prepared:
            picture = open_picture(self.contents, self.name)
            self._prepared[preparation] = prepared(picture, self.name, preparation)
        return self._prepared[preparation]
