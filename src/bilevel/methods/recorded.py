"""What the graph of a recorded step holds: how much memory, and whether compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.methods.process import Process, graph_nodes
from bilevel.trees import Tree


def counted(step: Callable[[], Any], given: list[Tensor]) -> tuple[Any, int]:
    """The result of a step, and how many bytes its graph keeps alive besides the tensors `given`; `Unrolled`
    holds T of these."""
    sizes: dict[Any, int] = {}

    def count(tensor: Tensor) -> Tensor:
        # Sparse tensors have no storage of their own; those that a step saves are mostly the data.
        if tensor.layout == torch.strided:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            after = step()
    except (BilevelError, RuntimeError):
        # Such hooks and torch.func exclude each other. A step that fails without them too says so here.
        after = step()
        for node in graph_nodes(trees.tensors(after)):
            for name in dir(node):
                if name.startswith("_saved_") and isinstance(saved := getattr(node, name), Tensor):
                    sizes[id(node), name] = saved.numel() * saved.element_size()
    for tensor in given:
        if tensor.layout == torch.strided:
            sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return after, sum(sizes.values())


def run_uncompiled(process: Process, outputs: Tree) -> None:
    """If code that `torch.compile` has compiled computed the outputs, let the problem run uncompiled from now on.

    torch cannot differentiate such code twice: it raises an error, or with some backends takes its second derivative
    for zero.
    """
    if any(node.name() == "CompiledFunctionBackward" for node in graph_nodes(trees.tensors(outputs))):
        process.problem.checked["compiled"] = {}
        process.bound = process.bind(process.variables)
