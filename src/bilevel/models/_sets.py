"""Several sets of images in one tensor, each with its own statistics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sets:
    """Consecutive sets of images, `sizes` of them, in tensors (row, image, column, channel).

    Every function handles all sets in one call.

    >>> sets, x = Sets((1, 2)), torch.arange(6.0).view(1, 3, 1, 2)
    >>> (sets.sums(x) / sets.counts(x)).tolist()
    [[0.0, 1.0], [3.0, 4.0]]
    """

    sizes: tuple[int, ...]

    def sums(self, x: Tensor) -> Tensor:
        """The sum of every channel in every set: sets × channels."""
        # Rows are added first: this is fastest, because they are the longest contiguous pieces.
        by_image = (x.flatten(1).sum(0).view(x.shape[1:]) if len(x) > 1 else x[0]).sum(1)
        return _selection(self.sizes, x.dtype, x.device) @ by_image

    def counts(self, x: Tensor) -> Tensor:
        """The number of values in each of the sums: sets × 1."""
        return x.new_tensor(self.sizes)[:, None] * (x.shape[0] * x.shape[2])

    def spread(self, values: Tensor, columns: int) -> Tensor:
        """A value of every set and channel, expanded to a row of all images: (image, column, channel)."""
        by_image = values[_members(self.sizes, values.device)]
        return by_image[:, None].expand(-1, columns, -1).contiguous()


@lru_cache(maxsize=256)
def _members(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)


@lru_cache(maxsize=256)
def _selection(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """sets × images: 1 where an image is in a set."""
    return torch.nn.functional.one_hot(_members(sizes, device), len(sizes)).to(dtype).t().contiguous()
