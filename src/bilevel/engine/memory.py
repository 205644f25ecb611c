"""The memory of checks: what the checks of a problem found, so that the calls of a loop are checked once."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import Module

from bilevel.dynamics import Dynamics
from bilevel.problem import Problem

Value = TypeVar("Value")
# The number of entries is bounded, because a loop may pass new samplers or shapes in every call.
CAPACITY = 100
# Functions in the closures of functions are followed to this depth, and lists up to this length.
DEPTH = 4


class Recent(dict[Hashable, Value]):
    """A dict that keeps the newest `CAPACITY` entries.

    >>> recent = Recent()
    >>> for number in range(1000):
    ...     recent[number] = number
    >>> len(recent), min(recent)
    (100, 900)
    """

    def __setitem__(self, key: Hashable, value: Value) -> None:
        super().__setitem__(key, value)
        for oldest in list(self)[: max(len(self) - CAPACITY, 0)]:
            self.pop(oldest, None)


@dataclass
class CheckResults:
    """What the checks found about the calls of one kind.

    Attributes:
        graph_bytes: the bytes that the graph of one recorded step keeps in memory.
        uses_inner: whether the steps call the inner objective.
        prepared: what the method's own `prepare` returned.
    """

    graph_bytes: int = 0
    uses_inner: bool = True
    prepared: Any = None


@dataclass
class Memory:
    """The checks that one problem has passed. A loop owns a memory, or uses the one that `memory_of` keeps.

    Attributes:
        check_results: by the kind of the call: the method, the shapes, the code of the dynamics.
        samplers: samplers that gave the same batch twice, as weak references by identity.
        derivatives: kinds of calls whose derivatives agreed with differences.
        replaces_operations: the problem uses operations that torch cannot differentiate twice.
        takes_gradients: an objective takes gradients in w itself, so it must be given a w that requires grad.
        runs_uncompiled: the problem's functions were compiled by `torch.compile`, and must run eagerly.
        reason: why `"auto"` last chose its method.
        related: memories of problems that are made from this one: with tensors of the task as part of λ, by their
            places in the task; and with another outer objective.
    """

    check_results: Recent[CheckResults] = field(default_factory=Recent)
    samplers: Recent[weakref.ref[Any]] = field(default_factory=Recent)
    derivatives: Recent[bool] = field(default_factory=Recent)
    replaces_operations: bool = False
    takes_gradients: bool = False
    runs_uncompiled: bool = False
    reason: str | None = None
    related: Recent[Memory] = field(default_factory=Recent)


_MEMORIES: dict[int, Memory] = {}


# The memories of problems whose functions are all declared structures, by the code that they declare.
_DECLARED: Recent[Memory] = Recent()


def memory_of(problem: Problem) -> Memory:
    """The memory of a problem, for callers that own none. It lives as long as the problem.

    Problems whose objectives declare the same code share one: their functions differ in numbers only, and no
    remembered check depends on those.
    """
    declared = declared_code(problem.inner), declared_code(problem.outer), getattr(problem.init, "__code__", None)
    if None not in declared and problem.encode is None:
        if declared not in _DECLARED:
            _DECLARED[declared] = Memory()
        return _DECLARED[declared]
    key = id(problem)
    if key not in _MEMORIES:
        _MEMORIES[key] = Memory()
        weakref.finalize(problem, _MEMORIES.pop, key, None)
    return _MEMORIES[key]


def declared_code(function: Any) -> Hashable:
    """The code that a structure of this package runs, without its numbers; None for any other function.

    A structure declares it with a method `code`, which returns None if it holds a function that the user wrote.
    """
    if not type(function).__module__.startswith("bilevel."):  # TorchScript and modules may have a `code` of their own
        return None
    declare = getattr(function, "code", None)
    return declare() if declare is not None else None


def kind_of(value: Any) -> Any:
    """What the checks of a dynamics, task or tree depend on: shapes and code, not the numbers in tensors."""
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
    return _kind_of_code(value, DEPTH)


def _kind_of_code(value: Any, depth: int) -> Any:
    """The code of a function and the kinds of what it reads: closures, defaults, the attributes of an object."""
    if isinstance(value, partial):
        return _kind_of_code(value.func, depth), _kinds((*value.args, *value.keywords.items()), depth)
    code = getattr(value, "__code__", None)
    if code is None:
        return _kind_of_object(value, depth) if callable(value) else type(value)
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if not _is_empty(cell)]
    read = _kinds((*cells, *(getattr(value, "__defaults__", None) or ())), depth)
    return (code, read, _kind_of_object(value.__self__, depth)) if hasattr(value, "__self__") else (code, read)


def _kind_of_object(value: Any, depth: int) -> Any:
    """A sampler or a schedule may be an object. Its numbers are left out: it may count its calls."""
    if isinstance(value, (type, Module)):  # the weights of a module may be many
        return type(value)
    attributes = getattr(value, "__dict__", {}).values()
    return type(value), _kinds([type(x) if type(x) in (int, float) else x for x in attributes], depth)


def _kinds(values: Iterable[Any], depth: int) -> tuple[Any, ...]:
    """Plain values themselves, functions by their code to a limited depth, and anything else by its type."""
    return tuple([_kind_in_closure(value, depth - 1) for value in values])


def _kind_in_closure(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.requires_grad
    if isinstance(value, (int, float, str, type, type(None))):
        return value
    if depth > 0 and isinstance(value, (list, tuple)) and len(value) <= DEPTH:
        return type(value), _kinds(value, depth)
    if depth > 0 and is_dataclass(value):
        # The settings of a dynamics may be functions, and there may be functions of λ around it: it is no level.
        return type(value), _kinds(
            [getattr(value, f.name, None) for f in fields(value)], depth + isinstance(value, Dynamics)
        )
    return _kind_of_code(value, depth) if depth > 0 and callable(value) else type(value)


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
