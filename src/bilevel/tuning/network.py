"""The user's module as pure functions for training and for evaluation."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from bilevel.errors import BilevelError
from bilevel.modules import functional, refuse_hooks
from bilevel.tuning.batches import Batch


class Network:
    """`train(w, inputs)` and `evaluate(w, inputs)` of a module at parameters w. The module itself is never changed.

    Training is in train mode: dropout is on, and batch norm uses the statistics of its batch. Evaluation is in eval
    mode, except that batch norm uses the statistics of the data that it is given, because running averages are not a
    function of w. A batch norm in eval mode inside a model in train mode counts as frozen and stays in eval mode.
    Parameters that do not require grad are constants.
    """

    def __init__(self, model: nn.Module) -> None:
        _check(model)
        self.model = model
        modes = {name: module.training for name, module in model.named_modules() if isinstance(module, _NormBase)}
        # The batch norms that are not frozen.
        self.norms = [name for name, training in modes.items() if training or not model.training]
        training = _copy(model).train()
        for name in modes.keys() - set(self.norms):
            training.get_submodule(name).eval()
        self.w, self.train = functional(training)
        _, self.evaluate = functional(self._in_eval_mode())

    @property
    def like(self) -> Tensor:
        """A tensor of the model's dtype, on its device."""
        return next(iter(self.w.values()))

    def trained(self, w: dict[str, Tensor], batches: list[Batch]) -> nn.Module:
        """A copy of the module with parameters w, in eval mode. Its running averages are computed from the batches."""
        model = self._in_eval_mode()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in w:
                    parameter.copy_(w[name])
            norms = [model.get_submodule(name) for name in self.norms]
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.reset_running_stats()  # type: ignore[operator]
                # None means the average over all batches.
                norm.momentum = None  # type: ignore[assignment]
            for batch in batches if norms else []:
                model(batch.inputs)
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return model.eval()

    def _in_eval_mode(self) -> nn.Module:
        model = _copy(self.model).eval()
        for name in self.norms:
            model.get_submodule(name).train()
        return model


def _check(model: nn.Module) -> None:
    """Refuse a model without trainable parameters, with several dtypes or devices, or with parameters that have hooks
    or no data."""
    if not isinstance(model, nn.Module):
        raise BilevelError(f"model is {type(model).__name__}. Pass a torch.nn.Module.")
    kind = type(model).__name__
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise BilevelError(
                f"The model's {name!r} has no shape yet: {kind} has lazy layers. Call the model once on a batch before "
                "tuning it."
            )
        if value.is_meta:
            raise BilevelError(
                f"The model's {name!r} is on the meta device, which has shapes but no numbers. Call "
                "model.to_empty(device='cpu') and initialise it, or build the model on a real device."
            )
    # The copies that are trained have no hooks any more.
    refuse_hooks(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise BilevelError(
            f"The model, {kind}, has no parameters that require grad, so there is nothing to train. Call "
            "requires_grad_() on those to be trained."
        )
    kinds = {(parameter.dtype, parameter.device) for parameter in trained}
    if len(kinds) > 1 or not trained[0].is_floating_point():
        raise BilevelError(
            f"The model's parameters have several dtypes or devices, or no floating dtype: {sorted(map(str, kinds))}. "
            "Pass a model with one floating dtype on one device."
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
