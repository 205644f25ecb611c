"""Functions of tensors, traced through autograd and compiled: the machinery behind every `compiled=` option."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bilevel.dynamics import Dynamics
from bilevel.errors import BilevelError
from bilevel.methods.process import Process
from bilevel.problem import Problem

Kernel: TypeAlias = Callable[..., list[Tensor]]
Built = TypeVar("Built")

# Compiled code belongs to a problem and dies with it.
_BUILT: WeakKeyDictionary[Problem, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()


def build_once(process: Process, key: Hashable, inputs: Sequence[Tensor], build: Callable[[], Built]) -> Built:
    """What `build()` makes for a problem, a dynamics, `key` and the shapes of `inputs`, made at the first call."""
    cache = _BUILT.setdefault(process.problem, {})
    shapes = tuple((x.shape, x.dtype, x.device) for x in inputs)
    full = (key, _identity(process.source), shapes, process.constants())
    if full not in cache:
        # The source is kept beside its code, so that its identity cannot be taken over by another object.
        cache[full] = (process.source, build())
    return cache[full][1]


def compile_function(function: Kernel, inputs: Sequence[Tensor], instead: str) -> Kernel:
    """`function`, which may call autograd, as compiled code for inputs of these shapes.

    Whatever may change from call to call must be an input; Python numbers are baked in.
    """
    # Tracing tells inputs apart by identity, so every one of them must be a tensor of its own.
    samples: list[Any] = [x.detach().clone(memory_format=torch.contiguous_format) for x in inputs]
    # Imported here because it takes as long as importing torch does.
    from torch import _inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        # The graph is traced already; inductor compiles it without the guards that torch.compile would check each time.
        compiled: Any = _inductor.compile(make_fx(function)(*samples), samples)
        with torch.no_grad():
            compiled(*samples)
    except BilevelError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise BilevelError(
            f"The steps could not be compiled: {type(error).__name__}: {first}. In compiled code t is a tensor, so "
            "schedules must be arithmetic in t (no `if t < 10`, no indexing with t), and a C++ compiler must be "
            f"installed. Use {instead}."
        ) from error
    # Compiled code is for one memory layout.
    return lambda *args: compiled(*(x.contiguous() for x in args))


def _identity(source: Any) -> Any:
    """Two dynamics may share compiled code only if every number that was baked in is the same."""
    if isinstance(source, Dynamics):
        values = [getattr(source, f.name) for f in fields(source)]
        flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
        if all(isinstance(x, (int, float)) for x in flat):
            return type(source), tuple(values)
    return id(source)
