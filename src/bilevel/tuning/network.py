"""The user's module as pure functions for training and for evaluation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from bilevel.errors import BilevelError
from bilevel.tuning.batches import Batch


class Network:
    """`train(w, inputs)` and `evaluate(w, inputs)` of a module at parameters w; the module itself is never changed.

    Training is in train mode: dropout drops, batch norm takes the statistics of its batch. Evaluation is in eval mode,
    except that batch norm again takes the statistics of the data it is given: the running averages are no function of
    w. A batch norm that was put into eval mode inside a model in train mode is taken as frozen, and stays so.
    Parameters that do not require grad are constants.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise BilevelError(f"model is {type(model).__name__}; pass a torch.nn.Module.")
        self.model = model
        _refuse_unfinished(model)
        self.w = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        if not self.w:
            raise BilevelError(
                f"The model, {type(model).__name__}, has no parameters that require grad, so there is nothing to "
                "train. Call requires_grad_() on those to be trained."
            )
        kinds = {(p.dtype, p.device) for p in self.w.values()}
        if len(kinds) > 1 or not next(iter(self.w.values())).is_floating_point():
            raise BilevelError(
                f"The model's parameters are of several kinds: {sorted(map(str, kinds))}. Pass a model with one "
                "floating dtype on one device."
            )
        self.norms = [
            name
            for name, module in model.named_modules()
            if isinstance(module, _NormBase) and not (model.training and not module.training)
        ]
        frozen = [
            name for name, module in model.named_modules() if isinstance(module, _NormBase) and name not in self.norms
        ]
        self._training = _copy(model).train()
        for name in frozen:
            self._training.get_submodule(name).eval()
        self._evaluation = self._in_eval_mode()

    @property
    def like(self) -> Tensor:
        """A tensor of the model's dtype, on its device."""
        return next(iter(self.w.values()))

    def train(self, w: dict[str, Tensor], inputs: Any) -> Any:
        return _call(self._training, w, inputs)

    def evaluate(self, w: dict[str, Tensor], inputs: Any) -> Any:
        return _call(self._evaluation, w, inputs)

    def trained(self, w: dict[str, Tensor], batches: list[Batch]) -> nn.Module:
        """A copy of the module with parameters w, in eval mode, its running averages taken anew from the batches."""
        model = self._in_eval_mode()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in w:
                    parameter.copy_(w[name])
            norms: list[Any] = [model.get_submodule(name) for name in self.norms]
            kept = [norm.momentum for norm in norms]
            for norm in norms:
                norm.reset_running_stats()
                # None is the plain average of all batches.
                norm.momentum = None
            for batch in batches if norms else []:
                model(batch.inputs)
            for norm, momentum in zip(norms, kept, strict=True):
                norm.momentum = momentum
        return model.eval()

    def _in_eval_mode(self) -> nn.Module:
        model = _copy(self.model).eval()
        for name in self.norms:
            model.get_submodule(name).train()
        return model


def _call(module: nn.Module, w: dict[str, Tensor], inputs: Any) -> Any:
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    # Fused attention can be differentiated once; hypergradients differentiate training steps, which is twice.
    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.functional_call(module, {**w, **buffers}, (inputs,))


def _refuse_unfinished(model: nn.Module) -> None:
    """Parameters without numbers cannot be trained."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise BilevelError(
                f"The model's {name!r} has no shape yet: {type(model).__name__} has lazy layers. Call the model once "
                "on a batch before tuning it."
            )
        if value.is_meta:
            raise BilevelError(
                f"The model's {name!r} is on the meta device, which keeps shapes but no numbers. Call "
                "model.to_empty(device='cpu') and initialise it, or build the model on a real device."
            )


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise BilevelError(
            f"The model, {type(model).__name__}, cannot be copied ({error}), and tuning works on copies. Old "
            "torch.nn.utils.weight_norm is one cause: write torch.nn.utils.parametrizations.weight_norm. Others are "
            "open files, locks, and tensors with a graph kept as attributes."
        ) from error
