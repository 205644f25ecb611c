"""Whether a Python function is still the function that was compiled: what it reads besides its arguments."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

# Values that cannot change while they stay the same object. A tensor can, but compiled code reads it anew.
_FIXED = (int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device, Tensor)
_LIBRARIES = frozenset({"torch", "math", "operator", "builtins"})
_ABSENT = object()

# Where a value was read: a namespace with a name in it, or a function's attribute.
_Place = tuple[Callable[[], Any], Any]


class Watch:
    """The names that functions read and what they stood for.

    `unchanged()` costs less than a microsecond a name. It is an answer where `complete` is true: everything that was
    read is a number, a string, a tensor, a library's or a function that reads only such. Where an object with
    attributes of its own is read (`self`, a dict, a module's constant), nobody can tell whether it has changed.

    >>> scale = 2.0
    >>> watch = Watch(lambda x: scale * x)
    >>> watch.complete, watch.unchanged()
    (True, True)
    >>> scale = 3.0
    >>> watch.unchanged()
    False
    """

    def __init__(self, *functions: Any) -> None:
        self.complete = True
        self._places: list[_Place] = []
        self._seen: set[int] = set()
        for function in functions:
            self._visit(function)

    def unchanged(self) -> bool:
        return all(read() is value for read, value in self._places)

    def _visit(self, value: Any) -> None:
        if isinstance(value, _FIXED) or _is_of_library(value) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if not isinstance(value, FunctionType):
            self.complete = False
            return
        # What is imported in the function itself may be anything.
        self.complete &= "IMPORT_NAME" not in {step.opname for step in dis.get_instructions(value)}
        for read in _reads(value):
            found = read()
            self._places.append((read, found))
            if isinstance(found, tuple):
                for item in found:
                    self._visit(item)
            elif found is not _ABSENT and not isinstance(found, CodeType):
                self._visit(found)


def is_plain(tree: Any) -> bool:
    """Whether a tree holds nothing but tensors and numbers in Python's own containers, which have no attributes."""
    if type(tree) in (list, tuple):
        return all(map(is_plain, tree))
    return all(map(is_plain, tree.values())) if type(tree) is dict else isinstance(tree, _FIXED)


def _reads(function: FunctionType) -> Iterator[Callable[[], Any]]:
    """What a call of the function may look up, each as a way to look it up again."""
    yield lambda: function.__code__
    yield lambda: function.__defaults__
    if function.__kwdefaults__:
        # A dict, which counts as something that may change.
        yield lambda: function.__kwdefaults__
    for cell in function.__closure__ or ():
        yield lambda cell=cell: _contents(cell)  # type: ignore[misc]
    names = function.__globals__
    for name in _names(function.__code__):
        yield lambda name=name: names.get(name, _ABSENT)  # type: ignore[misc]


def _names(code: CodeType) -> set[str]:
    """Global names and attributes, which bytecode does not tell apart, of a function and those defined in it."""
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inside)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _is_of_library(value: Any) -> bool:
    """Modules, functions and classes of torch and the standard library's arithmetic; their constants stay."""
    if isinstance(value, ModuleType):
        name = value.__name__
    elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        name = value.__module__ or "builtins"
    else:
        return False
    return name.partition(".")[0] in _LIBRARIES
