"""Functions of tensors, traced through autograd and compiled, for `bilevel.compile`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class Kernel:
    """A compiled function of tensors. The tensors `captured` from closures are read again at every call."""

    run: Callable[[list[Tensor]], Sequence[Tensor]]
    captured: Sequence[Tensor] = ()
    forms: Sequence[Any] = ()

    def __call__(self, *args: Tensor) -> list[Tensor]:
        if any(form_of(x) != form for x, form in zip(self.captured, self.forms, strict=True)):
            raise BilevelError(
                "A tensor that the compiled functions read from a closure has another shape, dtype or device now. Call "
                "bilevel.compile(...) again."
            )
        # Compiled code expects one memory layout, without lazy conjugation or negation.
        with torch.no_grad():
            return list(self.run([_plain(x) for x in (*args, *self.captured)]))


# Torch traces and compiles one function at a time.
_LOCK = threading.RLock()


def structure(tree: Tree) -> tuple[Hashable, Hashable]:
    """A tree without its leaves. It includes the order of a dict's keys, because a function may depend on it."""
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


def ambient_state() -> Hashable:
    """The settings of torch that its operations depend on and compiled code ignores: default dtype, autocast."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.get_default_dtype(), *autocast


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that compiled code relies on."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def compile_function(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Kernel:
    """`function`, which may call autograd, as compiled code for inputs of these shapes.

    What may change from call to call must be an input; Python numbers become constants. Tensors that the function
    reads from closures are read again at every call.
    """
    try:
        with _LOCK:
            return _compile(function, inputs)
    except BilevelError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise BilevelError(
            f"The steps could not be compiled: {type(error).__name__}: {first}. In compiled code t is a tensor, so "
            "schedules must be arithmetic in t (no `if t < 10`, no indexing with t), the numbers in tensors are not "
            "known (no .item(), .tolist() or .numpy()), and a C++ compiler must be installed. hypergradient(...) runs "
            "the same method without compiling."
        ) from error


class _Refusals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse operations that would turn a changing number into a constant while a function is traced.

    During tracing the inputs have no numbers, but captured tensors do.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # While a function is traced, its inputs are instances of FakeTensor.
        if func is torch.ops.aten._local_scalar_dense.default and type(args[0]) in (Tensor, torch.nn.Parameter):
            raise TypeError("a number was taken out of a tensor that the function closes over")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise BilevelError(
                f"An objective draws random numbers ({func}), and compiled code would draw others for the same seed. "
                "Draw them once and pass them with the batch, or do not compile."
            )
        return func(*args, **(kwargs or {}))


def _compile(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Kernel:
    # Imported here because it takes as long as importing torch does.
    from torch.fx.experimental.proxy_tensor import make_fx

    # Tracing identifies inputs by identity, so each must be a separate tensor.
    samples = [_sample(x) for x in inputs]

    def guarded(*flat: Tensor) -> list[Tensor]:
        with _Refusals():  # type: ignore[no-untyped-call]
            return function(*flat)

    # Fake tensors have no numbers, so a function whose code depends on numbers fails here.
    traced: Any = make_fx(guarded, tracing_mode="fake", _allow_non_fake_inputs=True)(*samples)
    captured = _lift_constants(traced)
    samples += [_sample(x) for x in captured]
    try:
        run = _call_inductor(traced, samples)
    except ImportError:
        # These parts of torch are private; another version may not have them.
        public: Any = torch.compile(traced, fullgraph=True)
        run = lambda args: public(*args)  # noqa: E731
    with torch.no_grad():
        run(list(samples))
    return Kernel(run, captured, [form_of(x) for x in captured])


def _call_inductor(traced: Any, samples: list[Tensor]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Compiled code without the guards and wrappers of `torch.compile`, which would cost time at every call."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    table = {**select_decomp_table(), torch.ops.aten.bmm.default: _broadcast_product}
    # The derivatives are traced already; what remains is to remove updates in place.
    pure = make_fx(torch.func.functionalize(traced), table, tracing_mode="fake")(*samples)
    pure.graph.eliminate_dead_code()
    mode = FakeTensorMode()
    # On a CPU, small matrix products are called from C++ too.
    cpu = all(x.device.type == "cpu" for x in samples)
    with torch.no_grad(), tracing(TracingContext(mode)), config.patch(cpp_wrapper=cpu):
        compiled: Any = compile_fx_inner(pure, [mode.from_tensor(x) for x in samples], cpp_wrapper=cpu)
    return lambda args: compiled(list(args))


def _plain(x: Tensor) -> Tensor:
    """The tensor, contiguous and without lazy conjugation or negation. Testing is cheaper than resolving."""
    usable = x.is_contiguous() and not x.is_neg() and not x.is_conj()
    return x if usable else x.resolve_conj().resolve_neg().contiguous()


def _sample(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _lift_constants(traced: Any) -> list[Tensor]:
    """Turn the tensors that a traced function captures into inputs; small ones would become constants."""
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
    """A batch of products with the same matrix, which `vmap` makes of a matrix product, as a single product."""
    if len(one) > 1 and one.stride(0) == 0:
        count, inner, columns = other.shape
        joined = one[0] @ other.permute(1, 0, 2).reshape(inner, count * columns)
        return joined.reshape(-1, count, columns).permute(1, 0, 2)
    if len(other) > 1 and other.stride(0) == 0:
        return (one.reshape(-1, one.shape[2]) @ other[0]).reshape(*one.shape[:2], -1)
    return NotImplemented
