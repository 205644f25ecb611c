"""The graph of a recorded step: how much memory it takes, and whether it contains compiled code."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bilevel import trees
from bilevel.engine.graphs import graph_nodes
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.trees import Tree


def counted(step: Callable[[], Any], given: list[Tensor]) -> tuple[Any, int]:
    """The result of a step, and how many bytes its graph keeps alive besides the tensors `given`; `Unrolled`
    holds T of these."""
    sizes: dict[Any, int] = {}

    def count(tensor: Tensor) -> Tensor:
        # Sparse tensors have no storage of their own; those that a step saves are usually the data.
        if tensor.layout == torch.strided:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            after = step()
    except (BilevelError, RuntimeError):
        # Such hooks cannot be used together with torch.func. If the step fails without hooks too, it raises here.
        after = step()
        for node in graph_nodes(trees.tensors(after)):
            for name in dir(node):
                if name.startswith("_saved_") and isinstance(saved := getattr(node, name), Tensor):
                    sizes[id(node), name] = saved.numel() * saved.element_size()
    for tensor in given:
        if tensor.layout == torch.strided:
            sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return after, sum(sizes.values())


def allocated(call: Callable[[], Any]) -> int:
    """The largest number of bytes that the tensors created by a call take at one time."""
    with _Allocations() as seen:
        call()
    return seen.peak


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations create, in forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in trees.tensors(result):
            if tensor.layout == torch.strided and (storage := tensor.untyped_storage())._cdata not in self.known:
                key, size = storage._cdata, storage.nbytes()
                self.known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def run_uncompiled(process: Process, outputs: Tree) -> None:
    """If code that `torch.compile` has compiled computed the outputs, let the problem run uncompiled from now on.

    torch cannot differentiate such code twice: it raises an error, or with some backends returns zero as its second
    derivative.
    """
    if any(node.name() == "CompiledFunctionBackward" for node in graph_nodes(trees.tensors(outputs))):
        process.memory.runs_uncompiled = True
        process.bound = process.bind(process.variables)
