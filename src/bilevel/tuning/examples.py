"""Examples by their positions: of a loader's data set, or of tensors, numpy arrays and DataFrames."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from bilevel import trees
from bilevel.errors import BilevelError


class Examples:
    """`examples[positions]` is the batch that the loader would make of the examples at these positions.

    The tensors behind a `TensorDataset`, or a `Subset` of one, are indexed at once instead of example by example.
    """

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        self.dataset: Any = loader.dataset
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise BilevelError(
                f"The {name} loader reads {type(self.dataset).__name__}, a stream without random access, and training "
                "is replayed step by step. Pass a map-style data set, one with __getitem__ and __len__."
            )
        self._collate: Any = loader.collate_fn
        self.tensors = _tensors_of(self.dataset) if self._collate is default_collate else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, positions: int | list[int]) -> Any:
        if not isinstance(positions, list):
            return self._collate(self.dataset[positions])
        if self.tensors is not None:
            all_positions = len(positions) == len(self) and positions == list(range(len(self)))
            return (
                self.tensors if all_positions else tuple(x[torch.tensor(positions).to(x.device)] for x in self.tensors)
            )
        get_items = getattr(self.dataset, "__getitems__", None)
        return self._collate(get_items(positions) if get_items else [self.dataset[i] for i in positions])


def _tensors_of(dataset: Any) -> tuple[Tensor, ...] | None:
    rows = None
    while type(dataset) is Subset:
        chosen = torch.as_tensor(list(dataset.indices))
        rows = chosen if rows is None else chosen[rows]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    return dataset.tensors if rows is None else tuple(x[rows.to(x.device)] for x in dataset.tensors)


def as_tensors(pair: Any, name: str) -> Any:
    """The pair (inputs, targets) with numpy arrays, DataFrames and Series converted to tensors.

    >>> as_tensors((np.array([[True]]), {"label": np.array([0, 1])}), "train")
    (tensor([[True]]), {'label': tensor([0, 1])})
    """

    def converted(leaf: Any) -> Any:
        if not hasattr(leaf, "__array__") or isinstance(leaf, Tensor):
            return leaf
        # A copy, because pandas gives arrays that must not be written to, and torch cannot read negative strides.
        array = np.array(leaf, order="C")
        if array.dtype.kind not in "biuf":
            text = [str(c) for c in getattr(leaf, "columns", []) if np.asarray(leaf[c]).dtype.kind not in "biuf"]
            where = f" (columns {', '.join(text)})" if text else ""
            raise BilevelError(
                f"The {name} data has a {type(leaf).__name__} of {array.dtype}{where}, and torch takes numbers. Encode "
                "text and categories as numbers first."
            )
        return torch.from_numpy(array)

    return trees.map(converted, pair)


def describe_type(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, (tuple, list)) else kind
