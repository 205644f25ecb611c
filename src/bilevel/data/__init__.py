"""Images with labels: one file per data set, found by walking this folder. Nothing here learns, and nothing imports
torch."""

from __future__ import annotations

from bilevel.data.base import ImageDataset, Source, find, load

__all__ = ["ImageDataset", "Source", "find", "load"]
