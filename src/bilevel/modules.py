"""A torch `nn.Module` as pure functions, so that its parameters can be either level of a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def functional(module: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Any]]:
    """`(parameters, apply)` with `apply(parameters, *args)` equal to `module(*args)` at those parameters.

    The module is never changed: the returned parameters are copies, and buffers (batch norm's running averages)
    are copied for every call, so what a forward pass writes to them is dropped.

    >>> layer = torch.nn.Linear(2, 1)
    >>> w, apply = functional(layer)
    >>> sorted(w)
    ['bias', 'weight']
    >>> x = torch.ones(3, 2)
    >>> bool((apply(w, x) == layer(x)).all())
    True
    """
    parameters = {name: value.detach().clone() for name, value in module.named_parameters()}

    def apply(values: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        return torch.func.functional_call(module, {**values, **buffers}, args, kwargs)

    return parameters, apply
