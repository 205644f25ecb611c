"""Refuse tensors that require grad and that a function reads from a closure: their gradient would be lost silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bilevel import trees
from bilevel.dynamics import Dynamics
from bilevel.engine.graphs import graph_nodes
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.trees import Tree


def refuse_closures(
    process: Process, name: str, call: Callable[[], Tree], known: Iterable[Any] = (), outputs: Tree = None
) -> None:
    """Refuse a part of the problem whose graph leads to a leaf that is neither a variable of the process nor `known`.

    Args:
        name: what to call the part in the message: "init", "inner", "dynamics", "outer" or "encode".
        call: computes the part. It is called again if there is something to refuse: leaves that it creates itself (the
            inputs of a network that is differentiated in them) are different tensors in each call.
        outputs: the result of an earlier call.
    """
    known = {id(leaf) for leaf in (*process.variables, *process.data(), *known)}
    outputs = call() if outputs is None else outputs
    found = [leaf for leaf in _leaves(outputs) if id(leaf) not in known]
    if not found:
        return
    again = {id(leaf) for leaf in _leaves(call())}
    names = {id(leaf): path for path, given in _named(process) for leaf in _leaves([given])}
    for leaf in found:
        if id(leaf) in again and id(leaf) in names:
            _refuse_lam(name, names[id(leaf)])
        # A module's parameters require grad by default; as a start they are constants.
        if id(leaf) in again and not (name == "init" and isinstance(leaf, Parameter)):
            raise BilevelError(
                f"{name} depends on a tensor of shape {list(leaf.shape)} that requires grad and is no part of λ: it "
                "was read from a closure, and its gradient would be lost. If it is to be learned, or is a variable of "
                "an enclosing problem, make it a leaf of λ and read it from the argument; if it is a constant, write "
                ".detach(), or module.requires_grad_(False) for the parameters of a module."
            )


def refuse_views_of_lam(process: Process) -> None:
    """Refuse settings that share their memory with λ: the user meant λ."""
    if not isinstance(process.source, Dynamics):
        return
    for setting in trees.tensors(list(vars(process.source).values())):
        first, end = _memory(setting)
        for path, leaf in _named(process):
            begins, ends = _memory(leaf)
            if first < ends and begins < end:
                _refuse_lam("dynamics", path, ".detach().clone()")


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor's numbers and the one after the last."""
    if not tensor.numel() or tensor.layout != torch.strided:
        return 0, 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def _refuse_lam(name: str, path: str, constant: str = ".detach()") -> None:
    example = {
        "dynamics": 'dynamics=lambda lam: GradientDescent(lam["lr"].exp())',
        "encode": "encode=lambda lam, task: …",
        "init": "init=lambda lam: …",
    }
    raise BilevelError(
        f"{name} reads λ{path} from a closure and not from its argument, so its gradient would be lost there. Write a "
        f"function of λ that uses its argument: {example.get(name, f'{name}=lambda w, lam, batch: …')}; or {constant} "
        "what is to be a constant."
    )


def _named(process: Process) -> list[tuple[str, Tensor]]:
    """The leaves of the λ that the user passed."""
    return list(zip(trees.paths(process.lam), trees.leaves(process.lam), strict=True))


def _leaves(outputs: Tree) -> list[Tensor]:
    """The leaves of autograd's graph of the outputs."""
    tensors = trees.tensors(outputs)
    found = [node.variable for node in graph_nodes(tensors) if hasattr(node, "variable")]
    return found + [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
