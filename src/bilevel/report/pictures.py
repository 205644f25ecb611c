"""Images as data: addresses, which an HTML page can hold."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor

# A grey drawing of 28×28 is smallest as a PNG; a photograph as PNG would be five times what it is as JPEG.
QUALITY = 85


def uri(content: bytes, kind: str = "png") -> str:
    """A data: address that holds the picture itself."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def picture(image: Tensor) -> str:
    """One image C×H×W in [0, 1], with 1 or 3 channels; of others, the mean of the channels."""
    pixels = (image.detach().clamp(0, 1) * 255).round().byte().cpu().movedim(0, -1).numpy()
    if pixels.shape[2] == 3:
        return uri(_encoded(pixels, "JPEG", quality=QUALITY), "jpeg")
    grey = pixels[..., 0] if pixels.shape[2] == 1 else pixels.mean(2).astype(np.uint8)
    return uri(_encoded(grey, "PNG", optimize=True))


def filters(weight: Tensor) -> list[str]:
    """Every filter of a convolution, out×in×k×k, on one common scale.

    Of one channel: zero is middle grey, black is the most negative weight of the layer and white the most positive. Of
    three channels: the same in red, green and blue. Of others: their mean.
    """
    values = weight.detach().double().cpu().movedim(1, -1)
    if values.shape[3] not in (1, 3):
        values = values.mean(3, keepdim=True)
    bytes_ = (127.5 * (1 + values / max(float(values.abs().max()), 1e-12))).round().byte().numpy()
    return [uri(_encoded(one if one.shape[2] == 3 else one[..., 0], "PNG", optimize=True)) for one in bytes_]


def _encoded(pixels: NDArray[np.uint8], kind: str, **options: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()
