"""Several sets of images in one tensor, each with its own statistics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sets:
    """Consecutive sets of images, `sizes` of them, in tensors (image, pixel, channel).

    Every function handles all sets in one call.

    >>> sets, x = Sets((1, 2)), torch.arange(6.0).view(3, 1, 2)
    >>> (sets.sums(x) / sets.counts(x)).tolist()
    [[0.0, 1.0], [3.0, 4.0]]
    """

    sizes: tuple[int, ...]

    def sums(self, x: Tensor) -> Tensor:
        """The sum of every channel in every set: sets × channels."""
        return _selection(self.sizes, x.dtype, x.device) @ x.sum(1)

    def counts(self, x: Tensor) -> Tensor:
        """The number of values in each of the sums: sets × 1."""
        return x.new_tensor(self.sizes)[:, None] * x.shape[1]

    def spread(self, values: Tensor) -> Tensor:
        """The value of every channel in the set of every image: (image, 1, channel)."""
        return values[_members(self.sizes, values.device)][:, None]


@lru_cache(maxsize=256)
def _members(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)


@lru_cache(maxsize=256)
def _selection(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """sets × images: 1 where an image is in a set."""
    return torch.nn.functional.one_hot(_members(sizes, device), len(sizes)).to(dtype).t().contiguous()
