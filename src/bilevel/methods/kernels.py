"""Functions of tensors, traced through autograd and compiled: the machinery behind every `compiled=` option."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bilevel import trees
from bilevel.dynamics import Dynamics
from bilevel.errors import BilevelError
from bilevel.methods.process import Process
from bilevel.methods.watch import form_of
from bilevel.trees import Tree


@dataclass(frozen=True)
class Kernel:
    """A compiled function of tensors; those that it `captured` are read anew at every call."""

    run: Callable[[list[Tensor]], Sequence[Tensor]]
    captured: Sequence[Tensor] = ()
    forms: Sequence[Any] = ()

    def __call__(self, *args: Tensor) -> list[Tensor]:
        # Compiled code is for one memory layout, in which numbers stand as they are.
        with torch.no_grad():
            return list(self.run([_plain(x) for x in (*args, *self.captured)]))

    def current(self) -> bool:
        """Whether the captured tensors still have the shapes and types that were compiled."""
        return all(form_of(x) == form for x, form in zip(self.captured, self.forms, strict=True))


class Code(Protocol):
    """Something compiled, which knows whether it is still what would be compiled now."""

    def current(self) -> bool: ...


Built = TypeVar("Built", bound=Code)
# Torch traces and compiles one function at a time.
_LOCK = threading.RLock()


def build_once(process: Process, key: Hashable, inputs: Sequence[Tensor], build: Callable[[], Built]) -> Built:
    """What `build()` makes for a problem, `key` and the kinds of `inputs`, made at the first call and again when it is
    no longer current."""
    # On the problem, because compiled code reaches the objectives and must die with them.
    cache = process.problem.checked.setdefault("kernels", {})
    full = _full(process, key, inputs)
    found = cache.get(full)
    if found is None or not found[1].current():
        with _LOCK:
            found = cache.get(full)
            if found is None or not found[1].current():
                # The source is kept beside its code, so that its identity cannot be taken over by another object.
                found = cache[full] = (process.source, build())
    return found[1]


def forget(process: Process, key: Hashable, inputs: Sequence[Tensor]) -> None:
    """Drop what `build_once` remembers."""
    process.problem.checked.get("kernels", {}).pop(_full(process, key, inputs), None)


def _full(process: Process, key: Hashable, inputs: Sequence[Tensor]) -> Any:
    whole = structure((process.lam, process.task))
    return key, whole, process.constants(), surroundings(), *map(form_of, inputs)


def structure(tree: Tree) -> tuple[Hashable, Hashable]:
    """A tree without its leaves; the order of a dict's keys, which functions may go by, is a part of it."""
    return trees.flatten(tree)[1], key_orders(tree)


def key_orders(tree: Tree) -> Hashable:
    """The keys of all dicts in a tree, in their order.

    >>> key_orders([{"b": 1, "a": 2}])
    ((('b', None), ('a', None)),)
    """
    if isinstance(tree, Tensor):
        return None
    if isinstance(tree, dict):
        return tuple([(key, key_orders(value)) for key, value in tree.items()])
    if isinstance(tree, (list, tuple)):
        return tuple([key_orders(item) for item in tree])
    return tuple([key_orders(getattr(tree, f.name)) for f in fields(tree)]) if is_dataclass(tree) else None


def surroundings() -> Hashable:
    """What torch takes from its surroundings and compiled code does not."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.get_default_dtype(), *autocast


def identity(source: Any) -> Hashable:
    """Two dynamics may share compiled code only if every number that was baked in is the same."""
    if isinstance(source, Dynamics):
        values = [getattr(source, f.name) for f in fields(source)]
        flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
        if all(isinstance(x, (int, float)) for x in flat):
            return type(source), tuple(values)
    return id(source)


def compile_function(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], instead: str) -> Kernel:
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


class _Refusals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what would be baked in while a function is traced.

    Tensors that are inputs have no numbers then, but those that are captured do.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses import FakeTensor

        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], FakeTensor):
            raise TypeError("a number was taken out of a tensor that the function closes over")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise BilevelError(
                f"An objective draws random numbers ({func}), and compiled code would draw others, whatever the seed. "
                "Draw them once and pass them with the batch, or leave out `compiled`."
            )
        return func(*args, **(kwargs or {}))


def _compile(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Kernel:
    # Imported here because it takes as long as importing torch does.
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # Tracing tells inputs apart by identity, so every one of them must be a tensor of its own.
    samples = [_sample(x) for x in inputs]

    def guarded(*flat: Tensor) -> list[Tensor]:
        with _Refusals():  # type: ignore[no-untyped-call]
            return function(*flat)

    # Fake tensors have no numbers, so a function that looks at some and bakes them in is refused.
    traced: Any = make_fx(guarded, tracing_mode="fake", _allow_non_fake_inputs=True)(*samples)
    captured = _lift_constants(traced)
    samples += [_sample(x) for x in captured]
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

    return Kernel(compiled, captured, [form_of(x) for x in captured])


def _plain(x: Tensor) -> Tensor:
    """The tensor itself wherever it can be used: asking is much cheaper than resolving."""
    usable = x.is_contiguous() and not x.is_neg() and not x.is_conj()
    return x if usable else x.resolve_conj().resolve_neg().contiguous()


def _sample(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


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
