"""Tensors in place of arrays, as scikit-learn accepts them with `config_context(array_api_dispatch=True)`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from sklearn import get_config


def on_cpu() -> AbstractContextManager[Any]:
    """A context in which torch makes its tensors on the CPU, whatever its default device is.

    `with torch.device(…)` takes about a microsecond of every call of torch, so it is left out where it changes nothing.
    """
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu


def as_numpy(data: Any) -> Any:
    """A tensor as an array; anything else unchanged. Torch refuses a tensor that requires a gradient."""
    if not isinstance(data, torch.Tensor):
        return data
    # numpy has no bfloat16.
    return (data.float() if data.dtype == torch.bfloat16 else data).cpu().numpy()


def like(array: Any, X: Any) -> Any:
    """`array` as a tensor with the device and dtype of X, if X is a tensor and array API dispatch is on.

    Otherwise `array` itself, as scikit-learn's own estimators do. Arrays of text stay arrays.
    """
    if not isinstance(X, torch.Tensor) or not get_config()["array_api_dispatch"]:
        return array
    array = np.asarray(array)
    if array.dtype.kind not in "fiub":
        return array
    dtype = X.dtype if array.dtype.kind == "f" and X.is_floating_point() else None
    return torch.as_tensor(array, dtype=dtype, device=X.device)
