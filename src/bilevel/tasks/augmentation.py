"""Random augmentation of training images: flips, shifts, zooms, changes of colour."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel.errors import BilevelError

# Every kind of augmentation, with a description.
KINDS = {
    "flip": "half of the images are mirrored",
    "crop": "images are shifted by up to a tenth of their side; their edges are repeated",
    "zoom": "a part of the image, from 60 to 100 per cent of its side, is enlarged to the whole",
    "colour": "brightness, contrast and saturation vary by up to 40 per cent",
}
SHIFT, SMALLEST, COLOUR = 0.1, 0.6, 0.4


@dataclass(frozen=True)
class ImageAugmentation:
    """Kinds of augmentation, drawn independently for every image; `ImageAugmentation.of("flip,crop")` parses a list.

    >>> images = torch.arange(2 * 4 * 4, dtype=torch.uint8).view(2, 4, 4, 1)
    >>> one, same = (ImageAugmentation.of("flip,crop")(images, seed=0, number=7) for _ in range(2))
    >>> bool((one == same).all()), list(one.shape)
    (True, [2, 1, 4, 4])
    """

    kinds: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> ImageAugmentation:
        kinds = tuple(part.strip() for part in text.split(",") if part.strip())
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise BilevelError(
                f"augment={text!r}: {', '.join(unknown)} is unknown; pass some of {', '.join(KINDS)}, separated by "
                "commas."
            )
        return cls(kinds)

    def __call__(self, images: Tensor, seed: int, number: int) -> Tensor:
        """The images, uint8 N×H×W×C, as floats N×C×H×W in [0, 1], augmented by the random draw of (seed, number)."""
        if self.kinds:
            # The draw depends on the two numbers only, not on earlier draws.
            draws = torch.rand(len(images), 7, generator=torch.Generator().manual_seed(_mixed(seed, number)))
            images = self._moved(images, draws[:, :4])
        else:
            draws = torch.empty(len(images), 7)
        images = images.permute(0, 3, 1, 2)
        if "colour" not in self.kinds:
            return images.to(torch.float32).div_(255)
        # The operations on colours are faster if the pixels of a channel are contiguous.
        return self._coloured(images.contiguous().to(torch.float32).div_(255), draws[:, 4:])

    def _moved(self, images: Tensor, draws: Tensor) -> Tensor:
        """Flips, shifts and zooms as one look-up: every pixel is copied from another position of its image."""
        height, width = images.shape[1:3]
        size = 1 - (1 - SMALLEST) * draws[:, 0] if "zoom" in self.kinds else torch.ones(len(images))
        rows, columns = (
            _places(side, size, draws[:, k], "crop" in self.kinds) for side, k in ((height, 1), (width, 2))
        )
        if "flip" in self.kinds:
            columns = torch.where(draws[:, 3:] < 0.5, columns, columns.flip(1))
        which = torch.arange(len(images))[:, None, None]
        # `index_select` copies whole pixels, and is several times faster than indexing with three tensors.
        pixels = (which * height + rows[:, :, None]) * width + columns[:, None, :]
        return images.flatten(0, 2).index_select(0, pixels.flatten()).view(images.shape)

    @staticmethod
    def _coloured(images: Tensor, draws: Tensor) -> Tensor:
        brightness, contrast, saturation = (1 + COLOUR * (2 * draws - 1)).T[:, :, None, None, None]
        if images.shape[1] > 1:
            grey = images.mean(1, keepdim=True)
            images = images.sub_(grey).mul_(saturation).add_(grey)
        mean = images.mean((1, 2, 3), keepdim=True)
        return images.sub_(mean).mul_(contrast).add_(mean).mul_(brightness).clamp_(0, 1)


NONE = ImageAugmentation()


def _places(side: int, size: Tensor, draw: Tensor, shift: bool) -> Tensor:
    """The source row (or column) of every row of every image: a part of relative length `size`, shifted if asked."""
    inside = (torch.arange(side) + 0.5) * size[:, None]
    begin = draw * (1 - size) * side
    if shift:
        begin = begin + (2 * draw - 1) * SHIFT * side * size
    return (inside + begin[:, None]).floor().long().clamp_(0, side - 1)


def _mixed(seed: int, number: int) -> int:
    """One 63-bit number from two; neighbouring inputs give unrelated outputs (the finaliser of MurmurHash3)."""
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + number) & mask
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = ((x ^ (x >> 33)) * factor) & mask
    return (x ^ (x >> 33)) >> 1
