"""What has been checked is remembered on the problem, so that the calls of a loop are checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def remember(memory: dict[Any, dict[str, Any]], key: Any, found: dict[str, Any]) -> None:
    """A bounded memory: a source of ever new samplers must not fill it."""
    if len(memory) > 100:
        # What is kept under a word is no verdict on a call: compiled code, say.
        for old in [old for old in memory if not isinstance(old, str)]:
            del memory[old]
    memory[key] = found


def kind_of(value: Any) -> Any:
    """What two dynamics, tasks or trees must share for one check to serve both: shapes and code, not numbers in
    tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, (int, float, str, type, type(None))):
        return value
    if is_dataclass(value):
        return type(value), tuple(kind_of(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, (list, tuple)):
        return tuple(kind_of(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, kind_of(item)) for key, item in value.items())
    code = getattr(value, "__code__", None)
    if code is None:
        return type(value)
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if not _is_empty(cell)]
    return code, tuple(_closed_over(cell) for cell in cells), kind_of(getattr(value, "__defaults__", None))


def _closed_over(value: Any) -> Any:
    """A function's closure by its plain values; anything larger by its type, so that this does not wander off."""
    if isinstance(value, Tensor):
        return type(value), value.requires_grad
    return value if isinstance(value, (int, float, str, type, type(None))) else type(value)


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
