"""From the arguments of `tune` to the bilevel problem that it solves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bilevel.errors import BilevelError, BilevelWarning
from bilevel.tuning.batches import Batch, ReplayedLoader, refuse_same_data, training_data, whole_batch
from bilevel.tuning.losses import ModelLoss, model_losses
from bilevel.tuning.network import Network
from bilevel.tuning.roles.base import Hyperparameter
from bilevel.tuning.setup import Setup
from bilevel.tuning.space import Space, declared_in
from bilevel.tuning.training_problem import TrainingProblem


def prepare(
    model: nn.Module,
    loss: Callable[..., Tensor] | Mapping[str, Callable[..., Tensor]],
    hyperparameters: Hyperparameter | Sequence[Hyperparameter],
    train: Any,
    val: Any,
    *,
    val_loss: Callable[..., Tensor] | None = None,
    steps: int = 100,
    dynamics: Any = None,
    lr: float | None = None,
    momentum: float | None = None,
    seed: int = 0,
    check_derivatives: bool = True,
) -> TrainingProblem:
    """The bilevel problem that `tune` solves. The arguments are those of `tune`.

    >>> import torch
    >>> import bilevel as bl
    >>> from bilevel.tuning import WeightDecay, prepare
    >>> _ = torch.manual_seed(0)
    >>> x, model = torch.randn(20, 3), torch.nn.Linear(3, 1)
    >>> data = bl.holdout((x, x.sum(1, keepdim=True)))
    >>> job = prepare(model, torch.nn.functional.mse_loss, WeightDecay(0.1), data.train, data.val, steps=5)
    >>> result = bl.hypergradient(job.problem, job.space.lam, job.task, dynamics=job.dynamics, steps=job.steps)
    >>> float(result.grad["weight_decay"]) != 0
    True
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise BilevelError(f"steps={steps!r} is not a number of training steps. Pass an int ≥ 1.")
    declared, network = declared_in(hyperparameters), Network(model)
    data = training_data(train, seed, network.like, steps)
    validation = whole_batch(val, seed, network.like, "val")
    refuse_same_data(train, val, seed)
    per_example = any(one.per_example for one in declared)
    losses = model_losses(loss, per_example)
    validation_loss = _validation_loss(losses, loss, val_loss)
    mixers = [one.name for one in declared if type(one).mix is not Hyperparameter.mix]
    if len(losses) > 1 and len(mixers) != 1:
        raise BilevelError(
            f"loss names {len(losses)} losses and {len(mixers)} hyperparameters to mix them. Declare one LossWeights()."
        )
    plain = [one.name for one in declared if type(one) is Hyperparameter]
    takes_hp = validation_loss.takes_hp or any(one.takes_hp for one in losses.values())
    if plain and not takes_hp and (not callable(dynamics) or isinstance(dynamics, type)):
        raise BilevelError(
            f"Hyperparameter {plain[0]!r} is not used: neither the loss nor the dynamics takes it. Write the loss "
            f"with a third argument, loss(output, target, hp), and use hp[{plain[0]!r}] in it."
        )
    if per_example:
        _warn_of_unseen_examples(data, steps)
    space = Space.of(declared, Setup(network.w, steps, data.count, tuple(losses)))
    fixed = {name: x for name, x in (("lr", lr), ("momentum", momentum)) if x is not None}
    given = "sgd" if dynamics is None else dynamics
    return TrainingProblem(
        network, losses, validation_loss, space, data, validation, steps, seed, given, fixed, check_derivatives
    )


def _validation_loss(losses: dict[str, ModelLoss], loss: Any, val_loss: Any) -> ModelLoss:
    if val_loss is not None:
        return ModelLoss(val_loss, "val_loss")
    takes_hp = any(one.takes_hp for one in losses.values())
    if takes_hp or len(losses) > 1:
        raise BilevelError(
            f"loss {'takes hyperparameters' if takes_hp else f'names {len(losses)} losses'}, and val_loss is not "
            "given. Hyperparameters could make such a validation loss small without a better model. Pass val_loss=…, "
            "for example torch.nn.functional.cross_entropy."
        )
    return ModelLoss(next(iter(loss.values())) if isinstance(loss, Mapping) else loss, "loss")


def _warn_of_unseen_examples(data: Batch | ReplayedLoader, steps: int) -> None:
    seen = steps * data(1).count if isinstance(data, ReplayedLoader) else data.count
    if seen < data.count:
        warnings.warn(
            f"{steps} steps show the model {seen:,} of {data.count:,} examples. The weights of the others will not "
            "change. Take more steps or larger batches.",
            BilevelWarning,
            stacklevel=4,
        )
