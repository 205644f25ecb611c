"""The training of a model as a bilevel problem, from the arguments of `tune`."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bilevel import trees
from bilevel.dynamics.base import Dynamics
from bilevel.engine.diagnosis import explain_divergence
from bilevel.engine.method import Method
from bilevel.engine.process import Process
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.methods import auto
from bilevel.methods.spectral import Spectral
from bilevel.problem import Problem, Task
from bilevel.trees import Tree
from bilevel.tuning.algorithms import algorithm
from bilevel.tuning.batches import (
    Batch,
    RepeatedBatch,
    ReplayedLoader,
    training_data,
    whole_batch,
)
from bilevel.tuning.losses import ModelLoss, model_losses
from bilevel.tuning.network import Network
from bilevel.tuning.randomness import derived_seed, draws_random_numbers, seeded
from bilevel.tuning.roles.base import Hyperparameter
from bilevel.tuning.roles.example_weight import ExampleWeight
from bilevel.tuning.setup import Setup
from bilevel.tuning.space import Space, declared_in
from bilevel.tuning.train_and_val import compare_data, warn_of_shared_examples

Weights = dict[str, Tensor]
Lam = dict[str, Tree]

# Errors of the user's functions. They are ignored here: the engine reports them, with the shapes, when it calls the
# functions for the first time.
_USER_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)


@dataclass(frozen=True, eq=False)
class TrainingProblem:
    """min over λ of val_loss(w_T), where w_T is the result of T training steps.

    Its attributes are the arguments of `solve`, `hypergradient`, `certify` and `check_problem`.

    Attributes:
        network: the model as pure functions of its parameters.
        losses: the training losses by name.
        val_loss: the validation loss.
        space: λ before tuning (`space.lam`), its values in natural units (`space.values(lam)`), its constraint.
        data: the training data.
        val: the validation data.
        steps: T.
        seed: the seed of all random numbers.
        given_dynamics: the dynamics as it was passed.
        fixed: `lr` and `momentum` if they were passed.
        check_derivatives: the argument of `Problem`.
    """

    network: Network
    losses: dict[str, ModelLoss]
    val_loss: ModelLoss
    space: Space
    data: Batch | ReplayedLoader
    val: Batch
    steps: int
    seed: int
    given_dynamics: Any
    fixed: Mapping[str, Any]
    check_derivatives: bool = True

    def __post_init__(self) -> None:
        self.random, self.random_outer  # noqa: B018 - computed before the engine calls the losses

    @cached_property
    def problem(self) -> Problem:
        """The training loss, the validation loss and the start."""
        return Problem(self.inner, self.outer, self.init, check_derivatives=self.check_derivatives)

    @cached_property
    def task(self) -> Task:
        """The training data, as a function of t or as one batch, and the validation data."""
        return Task(self.training(self.seed), self.val)

    def training(self, seed: int) -> Any:
        """The training data with the order of examples, the dropout masks and the noise of this seed."""
        if isinstance(self.data, ReplayedLoader):
            return self.data if seed == self.seed else ReplayedLoader(self.data.loader, seed, self._like, self.steps)
        return RepeatedBatch(self.data, seed) if self.random else self.data

    # The functions of the problem.

    def inner(self, w: Weights, lam: Lam, batch: Batch) -> Tensor:
        """The training loss on a batch. Its random numbers are a function of the batch's seed and t."""
        if not self.random:
            return self._penalised_loss(w, lam, batch, None)
        t, device = batch.t or 0, self._like.device
        noise = torch.Generator(device).manual_seed(derived_seed(batch.seed, "augmentation", t))
        with seeded(batch.seed, "step", t, device):
            return self._penalised_loss(w, lam, batch, noise)

    def outer(self, w: Weights, lam: Lam, batch: Batch) -> Tensor:
        """The validation loss. Its random numbers are the same at every call, so that f_T is a function of λ."""
        with seeded(batch.seed, "validation", 0, self._like.device) if self.random_outer else contextlib.nullcontext():
            return self._validation_loss(w, lam, batch)

    def init(self, lam: Lam) -> Weights:
        """The start: the model's parameters, unless a hyperparameter changes them."""
        w = self.network.w
        for role, value in self.space.roles(lam):
            w = role.initial(value, w, self.space.setup)
        return w

    def dynamics(self, lam: Lam) -> Dynamics:
        """Φ at λ."""
        settings: dict[str, Any] = {}
        roles = self.space.roles(lam)
        for role, value in roles:
            added = role.settings(value, self.space.setup)
            duplicates = sorted(set(added) & set(settings))
            if duplicates:
                raise BilevelError(
                    f"Two hyperparameters set the dynamics' {duplicates[0]!r}, {role.name!r} among them. Keep one."
                )
            settings.update(added)
        values = {role.name: value for role, value in roles}
        return algorithm(self.given_dynamics, values, settings, self.fixed)

    def data_loss(self, w: Weights, lam: Lam, batch: Batch, noise: torch.Generator | None = None) -> Tensor:
        """The training loss on a batch without penalties."""
        roles, inputs, targets = self.space.roles(lam), batch.inputs, batch.targets
        for role, value in roles:
            inputs = role.inputs(value, inputs, noise)
        output = self.network.train(w, inputs)
        for role, value in roles:
            targets = role.targets(value, targets, output)
        values = {role.name: value for role, value in roles}
        parts = [loss(output, batch, targets, values) for loss in self.losses.values()]
        mixtures = [role.mix(value, parts) for role, value in roles]
        loss = next((mixture for mixture in mixtures if mixture is not None), parts[0])
        for role, value in roles:
            loss = role.weigh_batch(value, loss, batch)
        return loss.mean()

    def _penalised_loss(self, w: Weights, lam: Lam, batch: Batch, noise: torch.Generator | None) -> Tensor:
        loss = self.data_loss(w, lam, batch, noise)
        for role, value in self.space.roles(lam):
            penalty = role.penalty(value, w, self.space.setup)
            loss = loss if penalty is None else loss + penalty
        return loss

    def _validation_loss(self, w: Weights, lam: Lam, batch: Batch) -> Tensor:
        values = self.space.values(lam) if self.val_loss.takes_hp else {}
        return self.val_loss(self.network.evaluate(w, batch.inputs), batch, batch.targets, values)

    @cached_property
    def random(self) -> bool:
        """Whether the training loss draws random numbers (dropout, augmentation)."""
        batch = self.data(1) if isinstance(self.data, ReplayedLoader) else self.data
        declared = any(role.random for role in self.space.declared)
        return declared or self._draws(lambda lam: self._penalised_loss(self.network.w, lam, batch, None))

    @cached_property
    def random_outer(self) -> bool:
        """Whether the validation loss draws random numbers (noise inside the model)."""
        return self._draws(lambda lam: self._validation_loss(self.network.w, lam, self.val))

    def _draws(self, loss: Callable[[Lam], Tensor]) -> bool:
        lam = trees.detach(self.space.lam)
        try:
            with torch.no_grad():
                return draws_random_numbers(lambda: loss(lam), self._like.device)
        except BilevelError:
            raise
        except _USER_ERRORS:
            return False

    @property
    def _like(self) -> Tensor:
        return self.network.like

    # The other parts of `tune`.

    def run(self, lam: Lam) -> tuple[Weights, float]:
        """The trained parameters w_T and the validation loss f_T(λ)."""
        process = self._process(lam)
        state = process.run()
        with torch.no_grad():
            value = float(process.bound.outer(state))
        if not math.isfinite(value):
            explain_divergence(process)
        return state[0], value

    def choose(self, method: Any) -> tuple[Method, str]:
        """The method and the reason for it. "auto" is resolved once: all methods that it chooses from are exact."""
        if method != "auto":
            if not isinstance(method, Method):
                raise BilevelError(
                    f"method={method!r} is not a method. Pass an instance such as Reverse() or Forward(), or 'auto'."
                )
            return method, f"{method}, as asked."
        process = self._process(self.space.lam)
        chosen, reason = auto.choose(process)
        if isinstance(chosen, Spectral):
            try:
                # Computing the closed form may show that the loss is not quadratic.
                chosen(process)
            except BilevelError:
                return auto.choose(process, closed_form=False)
        return chosen, reason

    def weights(self, lam: Lam, w: Weights, inputs: Any, targets: Any) -> Tensor:
        """The weights that the declared `ExampleWeight` gives to any examples, with the trained model's losses."""
        scorers = [(role, value) for role, value in self.space.roles(lam) if isinstance(role, ExampleWeight)]
        if not scorers:
            raise BilevelError(
                "The tuned hyperparameters give no weights to new examples. Declare ExampleWeight(scorer). "
                "ExampleWeights() has weights for the training examples only."
            )
        batch = whole_batch((inputs, targets), self.seed, self._like, "new")
        values, weights = self.space.values(lam), self._like.new_ones(batch.count)
        with torch.no_grad():
            losses = self.losses[next(iter(self.losses))](
                self.network.evaluate(w, batch.inputs), batch, batch.targets, values
            )
            for role, value in scorers:
                weights = weights * role.weights(value, batch, losses)
        return weights

    def _process(self, lam: Lam) -> Process:
        return Process(self.problem, lam, self.task, self.dynamics, self.steps)

    def trained(self, w: Weights) -> nn.Module:
        """A copy of the model with parameters w, in eval mode. Its running averages are those of one epoch."""
        data = self.data
        batches = [data] if isinstance(data, Batch) else [data(t) for t in range(1, data.per_epoch + 1)]
        with seeded(self.seed, "running averages", 0, self._like.device):
            return self.network.trained(w, batches)


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
    compare_data(train, val, seed)
    if isinstance(data, Batch):
        warn_of_shared_examples(data, validation)
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
