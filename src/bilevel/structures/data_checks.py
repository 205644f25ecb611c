"""Checks of data, with results that are kept for as long as the data live and do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bilevel.errors import BilevelError

Found = TypeVar("Found")

# For the memory of a tensor, and each function: which part of it was read, at which version, and what was found. Every
# hypergradient makes new tensors of the same memory.
_KNOWN: Any = WeakIdKeyDictionary()


def remembered(function: Callable[[Tensor], Found], tensor: Tensor) -> Found:
    """function(tensor), computed once for the same numbers, and again after a change in place."""
    try:
        storage, version = tensor.untyped_storage(), tensor._version
    except RuntimeError:  # under torch.vmap there is no memory; under torch.inference_mode changes are not counted
        return function(tensor)
    key = version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
    known = _KNOWN.setdefault(storage, {})
    read, found = known.get(function, (None, None))
    if read != key:
        found = function(tensor)
        known[function] = key, found
    result: Found = found
    return result


def computes_as(structure: Any, kind: type[Found]) -> TypeGuard[Found]:
    """Whether an object is a `kind` and computes what that class does. A subclass may override a method, for a further
    term, and a method of differentiation that is written for `kind` would leave it out."""
    names = [name for name, value in vars(kind).items() if callable(value) and name[0] != "_"]
    unchanged = (getattr(type(structure), name, None) is getattr(kind, name) for name in ("__call__", *names))
    return isinstance(structure, kind) and all(unchanged)


def refuse_asymmetric(matrices: Tensor, name: str) -> None:
    """Refuse matrices that are not symmetric up to rounding: methods may read one half of them only."""
    if not remembered(_symmetric, matrices):
        raise BilevelError(
            f"{name} is not symmetric. Pass its symmetric part, (A + A.mT)/2, which gives the same objective."
        )


def _symmetric(matrices: Tensor) -> bool:
    with torch.no_grad():
        allowed = torch.finfo(matrices.dtype).eps ** 0.5 * _largest(matrices)
        return not bool((_largest(matrices - matrices.mT) > allowed).any())


def _largest(matrices: Tensor) -> Tensor:
    return matrices.abs().amax((-2, -1))
