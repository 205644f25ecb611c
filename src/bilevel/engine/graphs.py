"""Autograd's graphs: their nodes, and the variables that they lead back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def reached(outputs: Sequence[Any], variables: Sequence[Tensor]) -> set[int]:
    """The indices of those variables that the autograd graph of `outputs` leads back to; nothing is computed."""
    index = {id(variable): i for i, variable in enumerate(variables)}
    found = {index[id(out)] for out in outputs if id(out) in index}
    for node in graph_nodes(outputs):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in index:
            found.add(index[id(variable)])
    return found


def graph_nodes(outputs: Sequence[Any]) -> Iterator[Any]:
    """The nodes of the autograd graph of `outputs`, each once; those of leaves have a `variable`."""
    stack = [out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)
