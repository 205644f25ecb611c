"""Pictures from bytes to uint8 arrays, for every mode of Pillow, and back. An error names an unreadable picture."""

from __future__ import annotations

import base64
import importlib
import io
import struct
import warnings
import zlib
from contextlib import suppress
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from bilevel.errors import BilevelError

ColourMode = Literal["L", "RGB"]
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"),
    *(".avif", ".heic", ".heif"),
)
# Only these decoders are used for files of users; the last two only if Pillow has them.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "AVIF", "HEIF")
MAX_PIXELS = 64_000_000
# The errors that Pillow's decoders raise for a damaged file.
DAMAGE = (
    *(OSError, ValueError, SyntaxError, EOFError, RuntimeError, LookupError, TypeError, ArithmeticError),
    *(AttributeError, struct.error, zlib.error, MemoryError, Warning, Image.DecompressionBombError),
)


class UnreadablePicture(BilevelError):
    """A picture that cannot be decoded or converted."""


def open_picture(contents: bytes, name: str) -> Image.Image:
    """The decoded picture; `name` is what the error calls it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(contents), formats=formats())
            if picture.format == "PNG":
                picture.verify()  # decoding alone does not compare the checksums; the picture cannot be used afterwards
                picture = Image.open(io.BytesIO(contents), formats=("PNG",))
        if picture.width * picture.height > MAX_PIXELS:
            raise ValueError(f"{picture.width}×{picture.height} is larger than {MAX_PIXELS:,} pixels")
        picture.load()
        return picture
    except UnidentifiedImageError:
        reason = _unidentified(contents)
    except DAMAGE as error:
        reason = str(error) or type(error).__name__
    raise UnreadablePicture(
        f"The image {name} cannot be read: {reason}. Replace or remove it ({', '.join(formats())} are read)."
    )


@cache
def formats() -> tuple[str, ...]:
    """The formats that can be read here: AVIF since Pillow 11.3, HEIC with the package pillow-heif."""
    with suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _unidentified(contents: bytes) -> str:
    """Why Pillow has no decoder for the contents; an ISO base media file names its format after "ftyp"."""
    if not contents:
        return "the file is empty"
    brand = contents[8:12] if contents[4:8] == b"ftyp" else b""
    if brand in (b"avif", b"avis") and "AVIF" not in formats():
        return "AVIF needs Pillow 11.3 or later"
    if brand in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1") and "HEIF" not in formats():
        return "HEIC needs the package pillow-heif (pip install pillow-heif)"
    return "it is not a picture of a known format"


def convert(picture: Image.Image, mode: ColourMode) -> tuple[Image.Image, str]:
    """The picture as 8-bit gray or colour, upright, and the kind it was converted from ("" if it was not converted).

    Transparent pixels become white; 16-bit values are divided by 257, so that black stays 0 and white becomes 255.
    """
    turned = ImageOps.exif_transpose(picture)
    was = turned.mode
    done = ""
    if was.startswith("I"):
        turned, done = _eight_bits(turned), "16-bit"
    elif was == "F":
        numbers = np.asarray(turned)
        if not np.isfinite(numbers).all() or numbers.min() < 0 or numbers.max() > 1:
            raise ValueError("its floating-point values are not within [0, 1]")
        turned, done = Image.fromarray(np.rint(numbers * 255).astype(np.uint8)), "floating-point"
    elif was in ("RGBA", "LA", "PA", "RGBa", "La") or (was == "P" and "transparency" in turned.info):
        layer = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        done = "transparent (onto white)"
    elif was == "P":
        done = "palette"
    elif was not in ("1", mode) and mode == "RGB":
        # The conversion of colour to gray is not reported: mode="L" asks for it.
        done = {"L": "grayscale"}.get(was, was)
    return (turned if turned.mode == mode else turned.convert("RGB").convert(mode)), done


def to_array(picture: Image.Image) -> NDArray[np.uint8]:
    """H×W×C."""
    array = np.asarray(picture, dtype=np.uint8)
    return array[:, :, None] if array.ndim == 2 else array


def encoded(image: NDArray[np.uint8], kind: str = "PNG", **options: int) -> bytes:
    """An image H×W×C with one or three channels as the contents of a file; `options` are those of Pillow."""
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    """The contents of a picture file as an address, which an HTML page can hold."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def background(picture: Image.Image) -> tuple[int, ...]:
    """The colour around the subject: the median of the border, channel by channel.

    >>> background(Image.new("RGB", (9, 9), (250, 240, 230)))
    (250, 240, 230)
    """
    pixels = to_array(picture)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return tuple(int(value) for value in np.median(border, axis=0))


def to_shape(picture: Image.Image, height: int, width: int, whole: bool = False) -> NDArray[np.uint8]:
    """H×W×C, with proportions kept: the whole picture with the background added at its sides, or its middle part."""
    if picture.size != (width, height) and not whole:
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    elif picture.size != (width, height):
        fill = background(picture)
        color = fill[0] if len(fill) == 1 else fill
        picture = ImageOps.pad(picture, (width, height), Image.Resampling.BILINEAR, color=color)
    return to_array(picture)


def _eight_bits(picture: Image.Image) -> Image.Image:
    numbers: NDArray[Any] = np.asarray(picture).astype(np.int64)
    if numbers.min() < 0 or numbers.max() > 65535:
        raise ValueError("its integer values are not within 0…65535")
    return Image.fromarray(((numbers + 128) // 257).astype(np.uint8))
