"""Whether a Python function is still the function that was compiled: what it reads besides its arguments."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

# Values that cannot change while they stay the same object; two of one kind that are written alike are as good.
_FIXED = frozenset({int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device})
# A tensor can change, but compiled code reads its numbers anew.
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_LIBRARIES = frozenset({"torch", "math", "operator", "_operator"})
# Those of Python's own functions that read nothing but their arguments.
_PURE = (
    *(abs, all, any, bool, dict, divmod, enumerate, filter, float, int, isinstance, len, list, map, max, min, pow),
    *(range, reversed, round, set, slice, sorted, str, sum, tuple, zip),
)
_PURE_IDS = frozenset(map(id, _PURE))
# What brings in names that are not looked up as globals or in a closure.
_OPAQUE = frozenset({"IMPORT_NAME", "LOAD_BUILD_CLASS"})
# What takes numbers out of a tensor without torch's noticing, so that tracing cannot refuse it.
_UNSEEN = frozenset({"tolist", "numpy"})
_ABSENT = object()


class Watch:
    """The names that functions read and what they stood for.

    `unchanged()` costs less than a microsecond a name. It is an answer where `complete` is true: everything that was
    read is a number, a string, a tensor, a library's or a function that reads only such. Where anything else is read
    (`self`, a dict, a module of the user's), its numbers are watched too, but nobody can tell whether these are all.

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
        self._places: list[tuple[Callable[[], Any], Any]] = []
        self._tensors: list[tuple[Tensor, Any]] = []
        self._seen: dict[int, Any] = {}
        self._objects: list[Any] = []
        self._attributes: set[str] = set()
        for function in functions:
            self._visit(function)
        for value in self._objects:
            self._visit_attributes(value)

    def unchanged(self) -> bool:
        return all(_is_same(read(), value) for read, value in self._places) and all(
            form_of(tensor) == form for tensor, form in self._tensors
        )

    def _visit(self, value: Any) -> None:
        if type(value) in _FIXED or _is_of_library(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if type(value) is tuple:
            for item in value:
                self._visit(item)
        elif type(value) in _TENSORS and not vars(value):
            self._tensors.append((value, form_of(value)))
        elif isinstance(value, FunctionType) and not vars(value):
            self._visit_function(value)
        else:
            self.complete = False
            self._objects.append(value)
            # A method, or a function with attributes.
            for part in (getattr(value, "__func__", None), getattr(value, "__self__", None)):
                self._visit(part)
            if isinstance(value, FunctionType):
                self._visit_function(value)

    def _visit_function(self, function: FunctionType) -> None:
        steps = list(_steps(function.__code__))
        self.complete &= not any(step.opname in _OPAQUE for step in steps)
        self._attributes.update(step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD"))
        self.complete &= not self._attributes & _UNSEEN
        self._places.append((lambda: function.__code__, function.__code__))
        for read in _reads(function, steps):
            found = read()
            self._places.append((read, found))
            if found is not _ABSENT:
                self._visit(found)

    def _visit_attributes(self, value: Any) -> None:
        """The numbers in an object whose names occur in the functions; others may change as they like."""
        own, kind = getattr(value, "__dict__", {}), type(value)
        for name in self._attributes:
            read = partial(_attribute, own, kind, name)
            found = read()
            if type(found) in _FIXED:
                self._places.append((read, found))


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """What compiled code takes for granted of a tensor."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def is_plain(tree: Any) -> bool:
    """Whether a tree holds nothing but tensors and numbers in Python's own containers, which have no attributes."""
    if type(tree) in (list, tuple):
        return all(map(is_plain, tree))
    return all(map(is_plain, tree.values())) if type(tree) is dict else type(tree) in _FIXED | _TENSORS


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and type(now) in _FIXED and repr(now) == repr(before))


def _reads(function: FunctionType, steps: list[dis.Instruction]) -> Iterator[Callable[[], Any]]:
    """What a call of the function may look up, each as a way to look it up again."""
    yield lambda: function.__defaults__
    if function.__kwdefaults__:
        # A dict, which counts as something that may change.
        yield lambda: function.__kwdefaults__
    for cell in function.__closure__ or ():
        yield lambda cell=cell: _contents(cell)  # type: ignore[misc]
    names = function.__globals__
    for name in {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}:
        yield lambda name=name: _look_up(names, name)  # type: ignore[misc]


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions of a function and of those defined in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _steps(constant)


def _look_up(names: dict[str, Any], name: str) -> Any:
    found = names.get(name, _ABSENT)
    return getattr(builtins, name, _ABSENT) if found is _ABSENT else found


def _attribute(own: Any, kind: type, name: str) -> Any:
    return own.get(name, getattr(kind, name, _ABSENT))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _is_of_library(value: Any) -> bool:
    """Modules, functions and classes of torch and the standard library's arithmetic; their constants stay."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        # What it calls itself may be copied from what it wraps, so it must be what the library has under that name.
        module = value.__module__ or ""
        found = getattr(sys.modules.get(module), value.__name__, None)
        return id(value) in _PURE_IDS or (module.partition(".")[0] in _LIBRARIES and found is value)
    return False
