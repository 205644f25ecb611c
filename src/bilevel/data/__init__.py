"""Images with labels: one file per data set, found by walking this folder. No module here imports torch."""

from __future__ import annotations

from bilevel.data.base import ImageDataset, Source, find, load

__all__ = ["ImageDataset", "Source", "find", "load"]
