"""Comparisons of the training data with the validation data."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bilevel import trees
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.tuning.batches import Batch, shown_by

# Data with fewer different examples than this repeat themselves, so val may have examples of train by chance.
DIFFERENT = 0.9
# A smaller part of val may be duplicates in the data.
SHARED = 0.1


def compare_data(train: Any, val: Any, seed: int) -> None:
    """Raise an error if train and val are the same data, or have other columns."""
    _refuse_same_data(train, val, seed)
    _refuse_other_columns(train, val)


def warn_of_shared_examples(train: Batch, val: Batch) -> None:
    """Warn if a tenth or more of the validation examples are training examples too."""
    learned, tested = _rows(train), _rows(val)
    distinct = set(learned)
    shared = sum(row in distinct for row in tested)
    if shared >= max(2, SHARED * len(tested)) and len(distinct) >= DIFFERENT * len(learned):
        warnings.warn(
            f"{shared:,} of {len(tested):,} examples of val are in train too. Hyperparameters are tuned for a small "
            "loss on val, so these examples reward overfitting. Leave them out of train or val.",
            BilevelWarning,
            stacklevel=4,
        )


def _rows(batch: Batch) -> list[bytes]:
    """The inputs and targets of every example as bytes."""
    parts = [x for x in trees.tensors((batch.inputs, batch.targets)) if x.ndim and len(x) == batch.count]
    arrays = [np.ascontiguousarray(_plain(x)).reshape(batch.count, -1).view(np.uint8) for x in parts]
    return [row.tobytes() for row in np.concatenate(arrays, axis=1)]


def _plain(x: Tensor) -> np.ndarray:
    x = x.detach().cpu()
    return x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy()


def _refuse_same_data(train: Any, val: Any, seed: int) -> None:
    """Raise an error if train and val are one object, equal pairs, or loaders that show the same examples."""
    loaders = [DataLoader(one) if isinstance(one, Dataset) else one for one in (train, val)]
    same = train is val
    if all(isinstance(one, DataLoader) for one in loaders):
        same = loaders[0].dataset is loaders[1].dataset and shown_by(loaders[0], seed) == shown_by(loaders[1], seed)
    elif all(isinstance(one, (tuple, list)) for one in loaders):
        same = len(train) == len(val) and all(_equal(a, b) for a, b in zip(train, val, strict=True))
    if same:
        raise BilevelError(
            "train and val are the same data. Hyperparameters are tuned for a small loss on val after training on "
            "train; on the same examples they would be tuned to overfit. Hold some examples out for val: "
            "task = bilevel.holdout((inputs, targets), 0.3), then train=task.train, val=task.val."
        )


def _refuse_other_columns(train: Any, val: Any) -> None:
    """Raise an error if train and val have DataFrames whose columns differ: a model knows columns by position only."""
    for one, other in zip(trees.leaves(train), trees.leaves(val), strict=False):
        names, others = (list(getattr(table, "columns", ())) for table in (one, other))
        if names and others and names != others:
            first = next(pair for pair in itertools.zip_longest(names, others) if pair[0] != pair[1])
            raise BilevelError(
                f"The columns of train and val are not the same: where train has {first[0]!r}, val has {first[1]!r}. A "
                "model knows columns by their position only. Pass val[train.columns], or arrays without names."
            )


def _equal(one: Any, other: Any) -> bool:
    """Whether two arrays or tensors are one object or have the same entries; other things are compared as objects."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        dense = one.layout is other.layout is torch.strided
        return one is other or (dense and one.device == other.device and torch.equal(one, other))
    if hasattr(one, "__array__") and hasattr(other, "__array__"):
        return one is other or np.array_equal(np.asarray(one), np.asarray(other))
    return one is other
