"""Tensors in the place of arrays, as scikit-learn takes them with `config_context(array_api_dispatch=True)`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn import get_config


def as_numpy(data: Any) -> Any:
    """A tensor as an array; anything else as it is. A tensor that requires a gradient is refused by torch."""
    return data.cpu().numpy() if isinstance(data, torch.Tensor) else data


def like(found: Any, X: Any) -> Any:
    """An array as a tensor on the device of X and in its precision, if X is a tensor and scikit-learn dispatches.

    Without dispatch the result is an array, as from scikit-learn's own estimators. Arrays of text stay arrays.
    """
    if not isinstance(X, torch.Tensor) or not get_config()["array_api_dispatch"]:
        return found
    found = np.asarray(found)
    if found.dtype.kind not in "fiub":
        return found
    precision = X.dtype if found.dtype.kind == "f" and X.is_floating_point() else None
    return torch.as_tensor(found, dtype=precision, device=X.device)
