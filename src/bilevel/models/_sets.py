"""Several sets of images in one tensor, each with statistics of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sets:
    """Consecutive sets of images, `sizes` of them, in tensors (row, image, column, channel).

    Every function takes all sets at once, so that their number does not cost calls.

    >>> Sets((1, 2)).means(torch.arange(6.0).view(1, 3, 1, 2)).tolist()
    [[0.0, 1.0], [3.0, 4.0]]
    """

    sizes: tuple[int, ...]

    def means(self, x: Tensor) -> Tensor:
        """The mean of every channel in every set: sets × channels."""
        # Rows are added up first: summing along the longest contiguous stretches is fastest.
        by_image = x.flatten(1).sum(0).view(x.shape[1:]).sum(1)
        return _shares(self.sizes, x.dtype, x.device) @ by_image / (x.shape[0] * x.shape[2])

    def total(self, means: Tensor, x: Tensor) -> Tensor:
        """The sum over everything, of which there are the means of every set."""
        return means.new_tensor(self.sizes) @ means * (x.shape[0] * x.shape[2])

    def spread(self, values: Tensor, columns: int) -> Tensor:
        """A value of every set and channel, laid out to meet a row of all images: (image, column, channel)."""
        by_image = values[_members(self.sizes, values.device)]
        return by_image[:, None].expand(-1, columns, -1).contiguous()


@lru_cache(maxsize=256)
def _members(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)


@lru_cache(maxsize=256)
def _shares(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """sets × images: 1/size where an image is in a set."""
    members = torch.nn.functional.one_hot(_members(sizes, device), len(sizes)).to(dtype)
    return (members / members.sum(0)).t().contiguous()
