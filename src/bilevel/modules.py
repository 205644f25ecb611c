"""A torch `nn.Module` as pure functions, so that its parameters can be either level of a problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.errors import BilevelError


def functional(module: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Any]]:
    """`(parameters, apply)` with `apply(parameters, *args)` equal to `module(*args)` at those parameters.

    Parameters with `requires_grad=False` (a frozen backbone) are constants: `apply` uses their values, and they are not
    among the returned parameters.

    The module is never changed: the returned parameters are copies, and buffers (batch norm's running averages) are
    copied for every call, so changes that a forward pass makes to them are dropped.

    >>> layer = torch.nn.Linear(2, 1)
    >>> w, apply = functional(layer)
    >>> sorted(w)
    ['bias', 'weight']
    >>> x = torch.ones(3, 2)
    >>> bool((apply(w, x) == layer(x)).all())
    True
    >>> _ = layer.weight.requires_grad_(False)
    >>> sorted(functional(layer)[0])
    ['bias']
    """
    refuse_hooks(module)
    copies = {name: (value.requires_grad, value.detach().clone()) for name, value in module.named_parameters()}
    parameters = {name: value for name, (trained, value) in copies.items() if trained}
    frozen = {name: value for name, (trained, value) in copies.items() if not trained}
    if frozen and not parameters:
        raise BilevelError(
            f"functional(module) has no parameters to return: every parameter of {type(module).__name__} has "
            "requires_grad=False. Call requires_grad_() on those to be learned, or call the module itself."
        )

    return parameters, functools.partial(_apply, module, frozen)


def refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks on the gradients of parameters, because gradients are taken with respect to copies."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise BilevelError(
                f"The parameter {name!r} has a hook, which would never be called: gradients are taken with respect to "
                "copies of the parameters. Remove it, and change the gradient in the dynamics, or freeze a parameter "
                "with requires_grad_(False)."
            )


def _apply(module: nn.Module, frozen: dict[str, Tensor], values: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    return torch.func.functional_call(module, {**frozen, **values, **buffers}, args, kwargs)
