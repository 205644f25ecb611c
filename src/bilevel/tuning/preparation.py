"""The bilevel problem behind `tune`, for those who want to take it from there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.errors import BilevelError, BilevelWarning
from bilevel.methods import auto
from bilevel.methods.base import Method
from bilevel.methods.diagnosis import explain_divergence
from bilevel.methods.process import Process
from bilevel.methods.spectral import Spectral
from bilevel.problem import Problem, Task
from bilevel.trees import Tree
from bilevel.tuning.assembly import Assembly
from bilevel.tuning.batches import Batch, Replay, SameBatch, training_data, whole
from bilevel.tuning.gap import Gap, find_gap, refuse_other_problem
from bilevel.tuning.losses import Criterion, criteria
from bilevel.tuning.network import Network
from bilevel.tuning.randomness import seeded
from bilevel.tuning.roles.base import Hyperparameter
from bilevel.tuning.setup import Setup
from bilevel.tuning.space import Space, declared_in


@dataclass(frozen=True)
class Prepared:
    """A model's training as a bilevel problem: what `solve`, `hypergradient` and `check_problem` ask for.

    Attributes:
        problem: the training loss, the validation loss and the start.
        task: the training batches as a function of t, or as one batch, and the validation set.
        steps: T.
        space: λ at its start (`space.lam`), its values in natural units (`space.values(lam)`), its constraint.
        network: the model as pure functions of its parameters.
        seed: of everything random.
    """

    problem: Problem
    task: Task
    steps: int
    space: Space
    network: Network
    seed: int
    assembly: Assembly
    data: Batch | Replay
    train: Any

    def dynamics(self, lam: dict[str, Tree]) -> Any:
        """Φ at λ."""
        return self.assembly.dynamics(lam)

    def run(self, lam: dict[str, Tree]) -> tuple[dict[str, Tensor], float]:
        """The trained parameters w_T and the validation loss f_T(λ)."""
        process = self._process(lam)
        state = process.run()
        with torch.no_grad():
            value = float(process.bound.outer(state))
        if not math.isfinite(value):
            explain_divergence(process)
        return state[0], value

    def training(self, seed: int) -> Any:
        """The training batches with other randomness: in another order, with other masks and noise."""
        if isinstance(self.data, Replay):
            return Replay(self.data.loader, seed, self.network.like, self.steps)
        return SameBatch(self.data, seed) if self.assembly.random else self.data

    def choose(self, given: Any) -> tuple[Method, str]:
        """The method and why. It is chosen once: all that "auto" chooses from are exact."""
        if given != "auto":
            if not isinstance(given, Method):
                raise BilevelError(
                    f"method={given!r} is not a method. Pass an instance such as Reverse() or Forward(), or 'auto'."
                )
            return given, f"{given}, as asked."
        process = self._process(self.space.lam)
        chosen, reason = auto.choose(process)
        if isinstance(chosen, Spectral):
            try:
                # Only when the closed form is computed does it notice that the loss is not quadratic.
                chosen(process)
            except BilevelError:
                chosen, reason = auto.choose(self._process(self.space.lam), closed_form=False)
        return chosen, reason

    def trained(self, w: dict[str, Tensor]) -> nn.Module:
        """A copy of the model with parameters w, in eval mode, its running averages those of the training batches."""
        data = self.data
        batches = [data] if isinstance(data, Batch) else [data(t) for t in range(1, data.per_epoch + 1)]
        with seeded(self.seed, "running averages", 0, self.network.like.device):
            return self.network.trained(w, batches)

    def gap(self, lam: dict[str, Tree], w: dict[str, Tensor]) -> Gap:
        """How far the validation loss at w = w_T is from that of a training that goes on to the end."""
        everything = None
        if isinstance(self.data, Replay) and not self.assembly.random:
            everything = whole(self.train, self.seed, self.network.like, "train")
            refused = refuse_other_problem(lambda batch: self.assembly.data_loss(w, lam, batch), self.data, everything)
            if refused is not None:
                return refused
        return find_gap(self.problem, lam, w, self.task, everything, self.dynamics, self.steps, self.assembly.random)

    def _process(self, lam: dict[str, Tree]) -> Process:
        return Process(self.problem, lam, self.task, self.dynamics, self.steps)


def prepare(
    model: nn.Module,
    loss: Callable[..., Tensor] | Mapping[str, Callable[..., Tensor]],
    hyperparameters: Hyperparameter | Sequence[Hyperparameter],
    train: Any,
    val: Any,
    *,
    val_loss: Callable[..., Tensor] | None = None,
    steps: int = 100,
    dynamics: Any = "sgd",
    lr: float | None = None,
    momentum: float | None = None,
    seed: int = 0,
    check_derivatives: bool = True,
) -> Prepared:
    """The bilevel problem that `tune` solves; the arguments are those of `tune`.

    >>> import torch
    >>> import bilevel as bl
    >>> from bilevel.tuning import WeightDecay, prepare
    >>> _ = torch.manual_seed(0)
    >>> x, model = torch.randn(20, 3), torch.nn.Linear(3, 1)
    >>> data = x, x.sum(1, keepdim=True)
    >>> job = prepare(model, torch.nn.functional.mse_loss, WeightDecay(0.1), data, data, steps=5)
    >>> found = bl.hypergradient(job.problem, job.space.lam, job.task, dynamics=job.dynamics, steps=job.steps)
    >>> float(found.grad["weight_decay"]) > 0
    True
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise BilevelError(f"steps={steps!r} is not a number of training steps; pass an int ≥ 1.")
    declared = declared_in(hyperparameters)
    network = Network(model)
    data, examples = training_data(train, seed, network.like, steps)
    everything = whole(val, seed, network.like, "val")
    space = Space.of(declared, Setup(network.w, steps, examples, _names_of(loss)))
    assembly = _assemble(network, loss, val_loss, space, dynamics, lr, momentum)
    _warn_of_unseen_examples(declared, data, steps)
    assembly.look_for_randomness(data(1) if isinstance(data, Replay) else data, everything)
    training = SameBatch(data, seed) if assembly.random and isinstance(data, Batch) else data
    problem = replace(assembly.problem(), check_derivatives=check_derivatives)
    return Prepared(problem, Task(training, everything), steps, space, network, seed, assembly, data, train)


def _assemble(
    network: Network,
    loss: Any,
    val_loss: Any,
    space: Space,
    dynamics: Any,
    lr: float | None,
    momentum: float | None,
) -> Assembly:
    losses = criteria(loss, any(one.per_example for one in space.declared))
    takes_hp = any(one.takes_hp for one in losses.values())
    if val_loss is None and (takes_hp or len(losses) > 1):
        raise BilevelError(
            f"loss {'takes hyperparameters' if takes_hp else f'names {len(losses)} losses'}, and val_loss is not "
            "given. The validation loss must not be something that hyperparameters can make small by themselves: pass "
            "val_loss=…, torch.nn.functional.cross_entropy say."
        )
    judge = Criterion(next(iter(loss.values())) if isinstance(loss, Mapping) else loss, "loss")
    if val_loss is not None:
        judge = Criterion(val_loss, "val_loss")
    mixers = [one.name for one in space.declared if type(one).mix is not Hyperparameter.mix]
    if len(losses) > 1 and len(mixers) != 1:
        raise BilevelError(
            f"loss names {len(losses)} losses and {len(mixers)} hyperparameters to mix them. Declare one LossWeights()."
        )
    plain = [one.name for one in space.declared if type(one) is Hyperparameter]
    if plain and not (takes_hp or judge.takes_hp or (callable(dynamics) and not isinstance(dynamics, type))):
        raise BilevelError(
            f"Hyperparameter {plain[0]!r} reaches nothing: neither the loss nor the dynamics takes it. Write the loss "
            f"with a third argument, loss(output, target, hp), and use hp[{plain[0]!r}] in it."
        )
    return Assembly(network, losses, judge, space, dynamics, {"lr": lr, "momentum": momentum})


def _names_of(loss: Any) -> tuple[str, ...]:
    return tuple(map(str, loss)) if isinstance(loss, Mapping) else ("loss",)


def _warn_of_unseen_examples(declared: list[Hyperparameter], data: Batch | Replay, steps: int) -> None:
    if not isinstance(data, Replay) or not any(one.per_example for one in declared):
        return
    seen = steps * len(data(1).index)
    if seen < data.examples:
        warnings.warn(
            f"{steps} steps show the model {seen:,} of {data.examples:,} examples; the weights of the others will stay "
            "where they are. Take more steps or larger batches.",
            BilevelWarning,
            stacklevel=4,
        )
