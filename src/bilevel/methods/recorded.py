"""How much memory the graph of a recorded step takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.methods.process import graph_nodes


def counted(step: Callable[[], Any], given: list[Tensor]) -> tuple[Any, int]:
    """The result of a recorded step, and how many bytes its graph keeps alive besides the tensors `given`; `Unrolled`
    holds T of these."""
    sizes: dict[Any, int] = {}

    def count(tensor: Tensor) -> Tensor:
        # Sparse tensors have no storage of their own; those that a step saves are mostly the data.
        if tensor.layout == torch.strided:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad():
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
