"""How a picture becomes an input of a model, the same in training and in use; a model's card records it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bilevel.data import drawings
from bilevel.data.pictures import ColourMode, UnreadablePicture, convert, open_picture, to_array, to_shape
from bilevel.errors import BilevelError

Kind = Literal["drawing", "gray-drawing", "photograph"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LARGEST_SIDE = 4096


# A drawing with fewer pixels per side is not cleaned, because ink and paper cannot be distinguished well enough.
SMALLEST_CLEANED = 16


@dataclass(frozen=True)
class PreparedPicture:
    """A picture as an input of a model, uint8 H×W×C, and which conversions were made."""

    image: NDArray[np.uint8]
    converted: str = ""
    inverted: bool = False
    evened: bool = False
    moved: bool = False
    redrawn: bool = False
    blank: bool = False


@dataclass(frozen=True)
class Preparation:
    """How pictures of any size and kind are converted to one size and kind.

    - `photograph`: the largest centred part with the right proportions, scaled.
    - `drawing`: light ink on black, each pixel one or the other, at the nearest pixels, as Omniglot's drawings are.
    - `gray-drawing`: light ink on black in shades of gray.

    With `clean`, the paper of a drawing is evened out, ink that is off-centre, small or large is cropped and scaled to
    the usual size, and (not in shades of gray) strokes of an unusual width are redrawn. A drawing that is clean already
    stays as it is.

    Args:
        kind: see above.
        channels: 1 or 3.
        height: the height of the result, in pixels.
        width: the width of the result, in pixels.
        clean: see above; photographs are not cleaned.
        invert: whether to swap light and dark; None finds the polarity of drawings and leaves photographs.

    >>> prepare = Preparation("drawing", 1, 28, 28)
    >>> made = prepare(Image.new("L", (90, 60), 255))
    >>> made.image.shape, made.blank
    ((28, 28, 1), True)
    """

    kind: Kind = "photograph"
    channels: int = 3
    height: int = 84
    width: int = 84
    clean: bool = True
    invert: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BilevelError(f"Pictures cannot be prepared as {self.kind!r:.60}; write one of {', '.join(KINDS)}.")
        if self.channels not in (1, 3):
            raise BilevelError(
                f"The model takes pictures with {self.channels!r:.60} channels; gray (1) and colour (3) can be read."
            )
        if not isinstance(self.clean, bool) or not isinstance(self.invert, (bool, type(None))):
            raise BilevelError(f"clean={self.clean!r:.60} and invert={self.invert!r:.60} must be true or false.")
        for side in (self.height, self.width):
            if isinstance(side, bool) or not isinstance(side, int) or not 1 <= side <= LARGEST_SIDE:
                raise BilevelError(f"A side of {side!r:.60} pixels is not a picture size; write 1…{LARGEST_SIDE}.")

    @property
    def mode(self) -> ColourMode:
        return "L" if self.channels == 1 else "RGB"

    @property
    def draws(self) -> bool:
        """Whether the pictures are drawings."""
        return self.kind != "photograph"

    def __call__(self, picture: Image.Image) -> PreparedPicture:
        """The picture as an input of the model. A picture that cannot be converted raises a ValueError or OSError."""
        made, converted = convert(picture, "L" if self.draws else self.mode)
        if not self.draws:
            image = to_shape(made, self.height, self.width)
            blank = bool(image.min() == image.max())
            return PreparedPicture(255 - image if self.invert else image, converted, bool(self.invert), blank=blank)
        clean = self.clean and min(made.size) >= SMALLEST_CLEANED
        drawing = drawings.cleaned(to_array(made)[:, :, 0], self.invert, clean)
        drawing = drawings.framed(drawing) if clean else drawings.whole(drawing)
        side = min(self.height, self.width)
        if self.kind == "drawing":
            drawing = drawings.inked(drawing, pen=clean)
            small = drawings.nearest((drawing.ink * 255).astype(np.uint8), side)
        else:
            small = np.rint(drawings.resized(drawing.ink, side) * 255).astype(np.uint8)
        image = np.zeros((self.height, self.width, self.channels), np.uint8)
        top, left = (self.height - side) // 2, (self.width - side) // 2
        image[top : top + side, left : left + side] = small[:, :, None]
        done = {name: getattr(drawing, name) for name in ("inverted", "evened", "moved", "redrawn", "blank")}
        return PreparedPicture(image, converted, **done)

    def plain(self) -> dict[str, Any]:
        """The settings as JSON types."""
        return asdict(self)

    @classmethod
    def of(cls, values: Any) -> Preparation:
        """From the values in a card. Unknown settings are an error, because they would be ignored."""
        if not isinstance(values, Mapping):
            raise BilevelError(f"The card prepares pictures by {values!r:.60}; it must be an object of settings.")
        known = {f.name for f in fields(cls)}
        unknown = [key for key in values if key not in known]
        if unknown:
            raise BilevelError(
                f"The card has settings for preparing pictures that this version does not know: {', '.join(unknown)}."
            )
        return cls(**values)


def prepare(contents: bytes, name: str, preparation: Preparation) -> PreparedPicture:
    """The picture in a file's contents, prepared; `name` is what an error calls it."""
    return prepared(open_picture(contents, name), name, preparation)


def prepared(picture: Image.Image, name: str, preparation: Preparation) -> PreparedPicture:
    """The same for a picture that is decoded already."""
    try:
        return preparation(picture)
    except (OSError, ValueError) as error:
        raise UnreadablePicture(
            f"The image {name} cannot be converted to {preparation.mode}: {error}. Save it as an 8-bit PNG."
        ) from error
