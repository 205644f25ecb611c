"""The user's loss: how many arguments it takes, and one number per example where that is needed."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from bilevel.errors import BilevelError
from bilevel.tuning.batches import Batch


class Criterion:
    """A loss as `criterion(output, targets, hp)`, whatever form it was passed in.

    Args:
        loss: `loss(output, targets)` or `loss(output, targets, hp)`; a function or a module.
        name: what it is called in messages.
        per_example: whether one number per example is wanted. Losses of torch with a `reduction` are asked for it.
    """

    def __init__(self, loss: Any, name: str, per_example: bool = False) -> None:
        if not callable(loss) or inspect.isclass(loss):
            raise BilevelError(
                f"{name}={loss!r} is not a loss. Pass a function loss(output, target), or a module such as "
                "torch.nn.CrossEntropyLoss()."
            )
        self.name, self.per_example = name, per_example
        self.takes_hp = _required(loss) >= 3
        self._loss = _unreduced(loss) if per_example else loss
        self._reduction, self._average = _reduction(loss), _average(loss)

    def __call__(self, output: Any, batch: Batch, targets: Any, hp: Mapping[str, Any]) -> Tensor:
        value = self._loss(output, targets, hp) if self.takes_hp else self._loss(output, targets)
        if not isinstance(value, Tensor):
            raise BilevelError(
                f"{self.name} returned {type(value).__name__}; it must return a tensor, without .item() or float()."
            )
        count = len(batch.index)
        if self.per_example:
            if value.ndim == 0 or len(value) != count:
                raise BilevelError(
                    f"{self.name} returned shape {list(value.shape)} for {count} examples, but example weights need "
                    "one number per example. Let it return them without .mean() or .sum() (reduction='none')."
                )
            entries = value.reshape(count, -1)
            # The mean over the examples is to be the loss as it was passed, when all weights are 1.
            if self._reduction == "sum":
                return entries.sum(1) * count
            return (entries.sum(1) if self._reduction == "batchmean" else entries.mean(1)) * self._share(batch.targets)
        if targets is not batch.targets:
            value = value * self._share(batch.targets)
        if value.ndim == 1 and len(value) == count:
            return value.mean()
        if value.ndim != 0:
            raise BilevelError(
                f"{self.name} returned a tensor of shape {list(value.shape)}; a loss is one number, or one per "
                "example. Add .mean() or .sum()."
            )
        return value

    def _share(self, labels: Any) -> Any:
        """How many labels there are over how many count. Where a class has a weight or is ignored, torch's mean is over
        what counts; asked for one number per example, or given probabilities for labels, torch forgets it."""
        if self._average is None or self._reduction != "mean":
            return 1.0
        weight, ignored = self._average
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return 1.0
        kept = labels != ignored
        each = kept if weight is None else weight.to(labels.device)[labels.long().where(kept, 0)] * kept
        return labels.numel() / each.sum()


def criteria(loss: Any, per_example: bool) -> dict[str, Criterion]:
    """The training losses by name."""
    if isinstance(loss, Mapping):
        if not loss:
            raise BilevelError("loss={} names no loss. Pass a function, or a dict with at least one.")
        return {str(name): Criterion(one, f"loss[{name!r}]", per_example) for name, one in loss.items()}
    return {"loss": Criterion(loss, "loss", per_example)}


def _required(loss: Callable[..., Any]) -> int:
    """How many positional arguments the loss asks for."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def _unreduced(loss: Any) -> Callable[..., Any]:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        loss = copy.deepcopy(loss)
        loss.reduction = "none"
        return loss
    try:
        known = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        known = False
    return functools.partial(loss, reduction="none") if known else loss


def _settings(loss: Any) -> tuple[Any, dict[str, Any]]:
    """A loss of torch and what it was told, for a module as for a function with some arguments filled in."""
    told: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        told = {**loss.keywords, **told}
        loss = loss.func
    if isinstance(loss, nn.Module):
        names = ("reduction", "weight", "ignore_index")
        return loss, {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    return loss, told


def _reduction(loss: Any) -> str:
    return str(_settings(loss)[1].get("reduction", "mean"))


def _average(loss: Any) -> tuple[Tensor | None, int] | None:
    """The weights of classes and the label to ignore, of a loss that knows them."""
    kind, told = _settings(loss)
    if kind not in (F.cross_entropy, F.nll_loss) and not isinstance(kind, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return None
    return told.get("weight"), told.get("ignore_index", -100)
