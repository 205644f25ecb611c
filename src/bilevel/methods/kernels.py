"""Functions of tensors, traced through autograd and compiled: the machinery behind every `compiled=` option."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import Dynamics
from bilevel.errors import BilevelError
from bilevel.methods.process import Process
from bilevel.problem import Problem

Kernel: TypeAlias = Callable[..., list[Tensor]]
Built = TypeVar("Built")

# Compiled code belongs to a problem and dies with it.
_BUILT: WeakKeyDictionary[Problem, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()


def build_once(process: Process, key: Hashable, inputs: Sequence[Tensor], build: Callable[[], Built]) -> Built:
    """What `build()` makes for a problem, `key` and the shapes of `inputs`, made at the first call."""
    cache = _BUILT.setdefault(process.problem, {})
    full = _full(process, key, inputs)
    if full not in cache:
        # The source is kept beside its code, so that its identity cannot be taken over by another object.
        cache[full] = (process.source, build())
    return cache[full][1]


def forget(process: Process, key: Hashable, inputs: Sequence[Tensor]) -> None:
    """Drop what `build_once` remembers."""
    _BUILT.get(process.problem, {}).pop(_full(process, key, inputs), None)


def _full(process: Process, key: Hashable, inputs: Sequence[Tensor]) -> Hashable:
    structure = trees.flatten((process.lam, process.task))[1]
    return key, structure, process.constants(), *((x.shape, x.dtype, x.device) for x in inputs)


def identity(source: Any) -> Hashable:
    """Two dynamics may share compiled code only if every number that was baked in is the same."""
    if isinstance(source, Dynamics):
        values = [getattr(source, f.name) for f in fields(source)]
        flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
        if all(isinstance(x, (int, float)) for x in flat):
            return type(source), tuple(values)
    return id(source)


def compile_function(function: Kernel, inputs: Sequence[Tensor], instead: str) -> Kernel:
    """`function`, which may call autograd, as compiled code for inputs of these shapes.

    Whatever may change from call to call must be an input; Python numbers are baked in. Tensors that the function gets
    at by other ways are read anew at every call.
    """
    try:
        return _compile(function, inputs)
    except BilevelError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise BilevelError(
            f"The steps could not be compiled: {type(error).__name__}: {first}. In compiled code t is a tensor, so "
            "schedules must be arithmetic in t (no `if t < 10`, no indexing with t), the numbers in tensors are not "
            "known (no .item(), .tolist() or .numpy()), and a C++ compiler must be installed. Use "
            f"{instead}."
        ) from error


def _compile(function: Kernel, inputs: Sequence[Tensor]) -> Kernel:
    # Imported here because it takes as long as importing torch does.
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # Tracing tells inputs apart by identity, so every one of them must be a tensor of its own.
    samples = [x.detach().clone(memory_format=torch.contiguous_format) for x in inputs]
    # Fake tensors have no numbers, so a function that looks at some and bakes them in is refused.
    traced: Any = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*samples)
    captured = _lift_constants(traced)
    samples += [x.detach().clone(memory_format=torch.contiguous_format) for x in captured]
    table = {**select_decomp_table(), torch.ops.aten.bmm.default: _broadcast_product}
    # What autograd does is recorded now; what is left to take out are updates in place.
    pure = make_fx(torch.func.functionalize(traced), table, tracing_mode="fake")(*samples)
    pure.graph.eliminate_dead_code()
    mode = FakeTensorMode()
    # The compiler is called without torch.compile around it, whose guards and wrappers would cost time at every call;
    # on a CPU the calls of small matrix products come from C++ too.
    cpu = all(x.device.type == "cpu" for x in samples)
    with torch.no_grad(), tracing(TracingContext(mode)), config.patch(cpp_wrapper=cpu):
        compiled: Any = compile_fx_inner(pure, [mode.from_tensor(x) for x in samples], cpp_wrapper=cpu)
        compiled(list(samples))

    def kernel(*args: Tensor) -> list[Tensor]:
        # Compiled code is for one memory layout.
        with torch.no_grad():
            return list(compiled([x.contiguous() for x in (*args, *captured)]))

    return kernel


def _lift_constants(traced: Any) -> list[Tensor]:
    """Turn the tensors that a traced function closes over into further inputs; small ones would be baked in."""
    nodes = list(traced.graph.nodes)
    places = [node for node in nodes if node.op == "get_attr" and isinstance(getattr(traced, node.target), Tensor)]
    last = [node for node in nodes if node.op == "placeholder"][-1]
    captured = []
    for node in places:
        captured.append(getattr(traced, node.target))
        with traced.graph.inserting_after(last):
            last = traced.graph.placeholder(f"captured_{len(captured)}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        traced.graph.erase_node(node)
    traced.recompile()
    return captured


def _broadcast_product(one: Tensor, other: Tensor) -> Tensor:
    """A batch of products with one and the same matrix, which is what `vmap` makes of a matrix product, as a single
    one."""
    if len(one) > 1 and one.stride(0) == 0:
        count, inner, columns = other.shape
        joined = one[0] @ other.permute(1, 0, 2).reshape(inner, count * columns)
        return joined.reshape(-1, count, columns).permute(1, 0, 2)
    if len(other) > 1 and other.stride(0) == 0:
        return (one.reshape(-1, one.shape[2]) @ other[0]).reshape(*one.shape[:2], -1)
    return NotImplemented
