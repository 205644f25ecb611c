"""The user's loss: the number of its arguments, and one number per example if needed."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bilevel.errors import BilevelError
from bilevel.tuning.batches import Batch


class ModelLoss:
    """The user's loss with one signature, `loss(output, batch, targets, hp)`, whatever form it was passed in.

    Args:
        loss: `loss(output, targets)` or `loss(output, targets, hp)`; a function or a module.
        name: its name in messages.
        per_example: whether one number per example is needed. Losses with a `reduction` are called with "none".
    """

    def __init__(self, loss: Any, name: str, per_example: bool = False) -> None:
        if not callable(loss) or inspect.isclass(loss):
            raise BilevelError(
                f"{name}={loss!r} is not a loss. Pass a function loss(output, target), or a module such as "
                "torch.nn.CrossEntropyLoss()."
            )
        self.name, self.per_example = name, per_example
        parameters = _parameters(loss.forward if isinstance(loss, nn.Module) else loss)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.takes_hp = sum(p.kind in positional and p.default is p.empty for p in parameters.values()) >= 3
        self._given, self._loss = loss, _without_reduction(loss) if per_example else loss
        self._reduction, self._class_weights, self._ignored_label = _reduction(loss)
        self._compared = False

    def __call__(self, output: Any, batch: Batch, targets: Any, hp: Mapping[str, Any]) -> Tensor:
        value = self._plain(output, targets, hp)
        if not isinstance(value, Tensor):
            raise BilevelError(
                f"{self.name} returned {type(value).__name__}. It must return a tensor, without .item() or float()."
            )
        count, first = len(batch.index), not self._compared
        if first:
            self._compared = True
            self._refuse_all_pairs(output, targets, hp)
        if self.per_example:
            if value.ndim == 0 or len(value) != count:
                raise BilevelError(
                    f"{self.name} returned shape {list(value.shape)} for {count} examples, but example weights need "
                    "one number per example. Let it return them without .mean() or .sum() (reduction='none')."
                )
            entries = value.reshape(count, -1)
            # If all weights are 1, the mean over the examples must equal the loss that the user passed.
            if self._reduction == "sum":
                entries = entries.sum(1) * count
            else:
                entries = entries.sum(1) if self._reduction == "batchmean" else entries.mean(1)
                entries = entries * self._mean_correction(batch.targets)
            if first and targets is batch.targets and not self.takes_hp:
                self._refuse_other_mean(entries, self._given(output, targets))
            return entries
        if targets is not batch.targets:
            value = value * self._mean_correction(batch.targets)
        if value.ndim == 1 and len(value) == count:
            return value.mean()
        if value.ndim != 0:
            raise BilevelError(
                f"{self.name} returned a tensor of shape {list(value.shape)}, but a loss is one number, or one per "
                "example. Add .mean() or .sum()."
            )
        return value

    def _plain(self, output: Any, targets: Any, hp: Mapping[str, Any]) -> Any:
        """What the user's loss returns."""
        return self._loss(output, targets, hp) if self.takes_hp else self._loss(output, targets)

    def _refuse_all_pairs(self, output: Any, targets: Any, hp: Mapping[str, Any]) -> None:
        """Refuse a loss that compares every output with every target, as outputs (n, 1) − targets (n) do in torch.

        Such a loss does not change if every target is moved to the next place.
        """
        if not (isinstance(output, Tensor) and isinstance(targets, Tensor)) or output.shape == targets.shape:
            return
        if output.numel() < 2 or [n for n in output.shape if n > 1] != [n for n in targets.shape if n > 1]:
            return
        # The outputs before training may all be equal. Those of a loss of probabilities must stay between 0 and 1.
        factors = torch.linspace(0.5, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
        given, output = targets.detach(), output.detach() * factors if output.any() else factors
        moved, all_pairs = given.roll(1, 0), False
        # Single precision rounds sums of other orders differently, but a loss may need the precision of its arguments.
        for dtype, tolerance in ((torch.float64, 1e-10), (output.dtype, 8 * torch.finfo(output.dtype).eps)):
            with torch.no_grad(), contextlib.suppress(Exception):
                one, other, constant = (
                    float(self._plain(output.to(dtype), y.to(dtype) if y.is_floating_point() else y, hp).mean())
                    for y in (given, moved, given[:1].expand_as(given))
                )
                # A loss may also ignore its targets.
                same = abs(one - other) <= tolerance * abs(one)
                all_pairs = same and one != constant and not torch.equal(given, moved)
                break
        if all_pairs:
            raise BilevelError(
                f"{self.name} compares every output with every target: it does not change if the targets change "
                f"places. The outputs have shape {list(output.shape)} and the targets {list(targets.shape)}. Pass "
                f"targets of the shape of the outputs, as in y.reshape{tuple(output.shape)}."
            )

    def _refuse_other_mean(self, entries: Tensor, given: Tensor) -> None:
        """Refuse a loss whose own reduction is not the mean of the examples' losses, nor one that is known here."""
        one, other = float(entries.detach().mean()), float(given.detach().mean())
        if abs(one - other) > 1e-3 * abs(other):
            raise BilevelError(
                f"{self.name} is {other:.6g}, but with reduction='none' its mean is {one:.6g}. Example weights "
                "multiply the losses of single examples, so that training would minimise another loss. Pass a loss "
                "whose value is the mean over the examples."
            )

    def _mean_correction(self, labels: Any) -> Any:
        """The number of labels divided by their total weight.

        With class weights or an ignored label, torch's mean is a weighted one. With reduction="none", or with
        probabilities as targets, torch divides by the number of labels instead.
        """
        integers = isinstance(labels, Tensor) and not labels.is_floating_point()
        if self._ignored_label is None or self._reduction != "mean" or not integers:
            return 1.0
        weights = labels != self._ignored_label
        if self._class_weights is not None:
            weights = self._class_weights.to(labels.device)[labels.long().where(weights, 0)] * weights
        return labels.numel() / weights.sum()


def model_losses(loss: Any, per_example: bool) -> dict[str, ModelLoss]:
    """The training losses by name."""
    if not isinstance(loss, Mapping):
        return {"loss": ModelLoss(loss, "loss", per_example)}
    if not loss:
        raise BilevelError("loss={} names no loss. Pass a function, or a dict with at least one.")
    return {str(name): ModelLoss(one, f"loss[{name!r}]", per_example) for name, one in loss.items()}


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; none if Python cannot read them, as for some built-in functions."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _without_reduction(loss: Any) -> Callable[..., Any]:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        loss = copy.deepcopy(loss)
        loss.reduction = "none"
        return loss
    return functools.partial(loss, reduction="none") if "reduction" in _parameters(loss) else loss


def _reduction(loss: Any) -> tuple[str, Tensor | None, int | None]:
    """The reduction of a torch loss, its class weights, and the label that it ignores (None if it ignores none)."""
    settings = {name: p.default for name, p in _parameters(loss).items() if name == "reduction"}
    while isinstance(loss, functools.partial):
        settings = {**loss.keywords, **settings}
        loss = loss.func
    if isinstance(loss, nn.Module):
        settings = {
            name: getattr(loss, name) for name in ("reduction", "weight", "ignore_index") if hasattr(loss, name)
        }
    of_labels = loss in (F.cross_entropy, F.nll_loss) or isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))
    ignored = settings.get("ignore_index", -100) if of_labels else None
    return str(settings.get("reduction", "mean")), settings.get("weight"), ignored
