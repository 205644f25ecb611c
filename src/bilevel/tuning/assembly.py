"""The bilevel problem of a model, its losses and its declared hyperparameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics.base import Dynamics
from bilevel.errors import BilevelError
from bilevel.problem import Problem
from bilevel.trees import Tree
from bilevel.tuning.algorithms import algorithm
from bilevel.tuning.batches import Batch
from bilevel.tuning.losses import Criterion
from bilevel.tuning.network import Network
from bilevel.tuning.randomness import draws, mixed, seeded
from bilevel.tuning.space import Space

# What is wrong with the user's functions is said by the checks, with the shapes; looking for randomness one only looks.
_SAID_LATER = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)


@dataclass
class Assembly:
    """min over λ of val_loss(w_T), with w_T from T steps on the training loss; each hyperparameter enters by its hook.

    Attributes:
        random: whether a step draws random numbers (dropout, augmentation), seeded by the batch's seed and t.
        random_outer: whether the validation loss does (noise inside the model). It has the same ones every time, so
            that f_T is a function.
    """

    network: Network
    losses: dict[str, Criterion]
    val_loss: Criterion
    space: Space
    dynamics_given: Any
    fixed: Mapping[str, Any]
    random: bool = False
    random_outer: bool = False

    def problem(self) -> Problem:
        return Problem(inner=self.inner, outer=self.outer, init=self.init)

    def inner(self, w: dict[str, Tensor], lam: dict[str, Tree], batch: Batch) -> Tensor:
        """The training loss on a batch."""
        if not self.random:
            return self._inner(w, lam, batch, None)
        t, device = batch.t or 0, self.network.like.device
        noise = torch.Generator(device).manual_seed(mixed(batch.seed, "augmentation", t))
        with seeded(batch.seed, "step", t, device):
            return self._inner(w, lam, batch, noise)

    def _inner(self, w: dict[str, Tensor], lam: dict[str, Tree], batch: Batch, noise: torch.Generator | None) -> Tensor:
        loss, values = self.data_loss(w, lam, batch, noise), self.space.values(lam)
        for role in self.space.declared:
            penalty = role.penalty(values[role.name], w, self.space.setup)
            loss = loss if penalty is None else loss + penalty
        return loss

    def data_loss(
        self, w: dict[str, Tensor], lam: dict[str, Tree], batch: Batch, noise: torch.Generator | None = None
    ) -> Tensor:
        """The training loss on a batch without penalties."""
        values = self.space.values(lam)
        roles = [(one, values[one.name]) for one in self.space.declared]
        inputs, targets = batch.inputs, batch.targets
        for role, value in roles:
            inputs = role.inputs(value, inputs, noise)
        output = self.network.train(w, inputs)
        for role, value in roles:
            targets = role.targets(value, targets, output)
        parts = [loss(output, batch, targets, values) for loss in self.losses.values()]
        mixtures = [role.mix(value, parts) for role, value in roles]
        loss = next((mixture for mixture in mixtures if mixture is not None), parts[0])
        for role, value in roles:
            loss = role.weigh(value, loss, batch.index)
        return loss.mean()

    def outer(self, w: dict[str, Tensor], lam: dict[str, Tree], batch: Batch) -> Tensor:
        """The validation loss."""
        if not self.random_outer:
            return self._outer(w, lam, batch)
        with seeded(batch.seed, "validation", 0, self.network.like.device):
            return self._outer(w, lam, batch)

    def _outer(self, w: dict[str, Tensor], lam: dict[str, Tree], batch: Batch) -> Tensor:
        values = self.space.values(lam) if self.val_loss.takes_hp else {}
        return self.val_loss(self.network.evaluate(w, batch.inputs), batch, batch.targets, values)

    def init(self, lam: dict[str, Tree]) -> dict[str, Tensor]:
        """The start: the model's parameters, unless a hyperparameter changes them."""
        w, values = self.network.w, self.space.values(lam)
        for role in self.space.declared:
            w = role.initial(values[role.name], w, self.space.setup)
        return w

    def dynamics(self, lam: dict[str, Tree]) -> Dynamics:
        """Φ at these hyperparameters."""
        values = self.space.values(lam)
        settings: dict[str, Any] = {}
        for role in self.space.declared:
            found = role.settings(values[role.name], self.space.setup)
            twice = sorted(set(found) & set(settings))
            if twice:
                raise BilevelError(
                    f"Two hyperparameters set the dynamics' {twice[0]!r}, {role.name!r} among them. Keep one."
                )
            settings.update(found)
        return algorithm(self.dynamics_given, values, settings, self.fixed)

    def look_for_randomness(self, train: Batch, val: Batch) -> None:
        """Note whether the training loss and the validation loss draw random numbers."""
        w, lam = self.network.w, trees.detach(self.space.lam)
        self.random = any(role.random for role in self.space.declared) or self._draws(
            lambda: self._inner(w, lam, train, None)
        )
        self.random_outer = self._draws(lambda: self._outer(w, lam, val))

    def _draws(self, loss: Callable[[], Tensor]) -> bool:
        with torch.no_grad(), contextlib.suppress(*_SAID_LATER):
            return draws(loss, self.network.like.device)
        return False
