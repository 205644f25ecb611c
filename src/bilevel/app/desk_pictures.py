"""A picture that lies on the desk: its file as it came, how it is shown, and what the model makes of it."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from bilevel.data.drawings import is_drawing
from bilevel.data.pictures import open_picture
from bilevel.data.preparation import Preparation, PreparedPicture, prepared

# Pixels per side of what the page shows of a picture.
SHOWN = 160
# What was done to a picture on its way to the model, by the fields of `PreparedPicture`.
DONE = {
    "inverted": "light and dark were swapped",
    "evened": "the paper was evened out",
    "moved": "it was cropped to its ink",
    "redrawn": "its strokes were drawn anew with the pen of the training",
}


@dataclass(frozen=True, eq=False)
class DeskPicture:
    """A picture on the desk.

    Attributes:
        name: of its file, for messages.
        contents: the file, because another model may prepare it in another way.
        shown: a small PNG of it.
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
        return cls(name, contents, png(prepared(picture, name, size).image), is_drawing(picture))

    @classmethod
    def seen_by(cls, preparation: Preparation, image: NDArray[np.uint8], name: str) -> DeskPicture:
        """A picture of which only what the model saw was kept, uint8 H×W×C."""
        contents = png(image)
        return cls(name, contents, contents, preparation.draws, {preparation: PreparedPicture(image)})

    def prepared(self, preparation: Preparation) -> PreparedPicture:
        """The picture as a model takes it; computed once for each way of preparing."""
        if preparation not in self._prepared:
            picture = open_picture(self.contents, self.name)
            self._prepared[preparation] = prepared(picture, self.name, preparation)
        return self._prepared[preparation]


def png(image: NDArray[np.uint8]) -> bytes:
    """An image H×W×C as a PNG file."""
    written = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(written, "PNG")
    return written.getvalue()


def data_url(content: bytes) -> str:
    """A PNG file as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
