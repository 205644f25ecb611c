"""Images as data: addresses, which an HTML page can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bilevel.data.pictures import data_url, encoded

if TYPE_CHECKING:
    from torch import Tensor

# A grey drawing of 28×28 is smallest as a PNG; a photograph as PNG would be five times what it is as JPEG.
QUALITY = 85


def picture(image: Tensor) -> str:
    """One image C×H×W in [0, 1], with 1 or 3 channels; of others, the mean of the channels."""
    pixels = (image.detach().clamp(0, 1) * 255).round().byte().cpu().movedim(0, -1).numpy()
    if pixels.shape[2] == 3:
        return data_url(encoded(pixels, "JPEG", quality=QUALITY), "jpeg")
    return data_url(encoded(pixels.mean(2, keepdims=True).astype(np.uint8), optimize=True))


def filters(weight: Tensor) -> list[str]:
    """Every filter of a convolution, out×in×k×k, on one common scale.

    Of one channel: zero is middle grey, black is the most negative weight of the layer and white the most positive. Of
    three channels: the same in red, green and blue. Of others: their mean.
    """
    values = weight.detach().double().cpu().movedim(1, -1)
    if values.shape[3] not in (1, 3):
        values = values.mean(3, keepdim=True)
    bytes_ = (127.5 * (1 + values / max(float(values.abs().max()), 1e-12))).round().byte().numpy()
    return [data_url(encoded(one, optimize=True)) for one in bytes_]
