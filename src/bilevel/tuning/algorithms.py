"""The dynamics of the training, with its tuned settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from bilevel import dynamics
from bilevel.dynamics.base import Dynamics
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.dynamics.heavy_ball import HeavyBall
from bilevel.dynamics.torch_optim import TorchOptim
from bilevel.errors import BilevelError


def algorithm(given: Any, values: Mapping[str, Any], tuned: Mapping[str, Any], fixed: Mapping[str, Any]) -> Dynamics:
    """The dynamics with its tuned settings.

    Args:
        given: "sgd", the name of a dynamics, an instance, a class of `torch.optim`, a function of the values by name,
            or a function step(loss, w, state, t).
        values: of all hyperparameters, in natural units.
        tuned: settings by name; each may be a function of t.
        fixed: `lr` and `momentum` where they were passed, for a name or a class.

    >>> algorithm("sgd", {}, {"lr": 0.5}, {"momentum": 0.9})
    HeavyBall(lr=0.5, momentum=0.9)
    """
    for name in fixed:
        if name in tuned:
            role = "Momentum" if name == "momentum" else "LearningRate"
            raise BilevelError(
                f"{name}={fixed[name]!r} was passed, and {name!r} is also declared as a hyperparameter. Leave {name}= "
                f"out and let the hyperparameter start there, as in {role}({fixed[name]!r})."
            )
    if isinstance(given, str):
        return _by_name(given, {**fixed, **tuned})
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return TorchOptim(given, **{**fixed, **tuned})
    for name, value in fixed.items():
        raise BilevelError(
            f"{name}={value!r} was passed together with dynamics={given!r}, which has settings of its own. Put {name} "
            "in there, or give the dynamics by its name."
        )
    if not callable(given) and not isinstance(given, Dynamics):
        raise BilevelError(
            f"dynamics={given!r} is not a dynamics. Pass {_names()}, an instance such as bilevel.Adam(1e-3), or a "
            "function of the hyperparameters' values that returns one, as in lambda hp: bilevel.Adam(lr=hp['lr'])."
        )
    return _with(dynamics.as_function_of_lam(given)(values), tuned)


def _by_name(name: str, settings: dict[str, Any]) -> Dynamics:
    if name.lower() == "sgd":
        lr, momentum = settings.get("lr", 0.1), settings.get("momentum", 0.0)
        plain = isinstance(momentum, (int, float)) and momentum == 0
        return GradientDescent(lr) if plain else HeavyBall(lr, momentum)
    named = _complete_with_lr()
    if name.lower() not in named:
        raise BilevelError(f"dynamics={name!r} is not known. Pass {_names()}, or an instance of a dynamics.")
    kind = named[name.lower()]
    needs_lr = any(f.name == "lr" and f.default is dataclasses.MISSING for f in dataclasses.fields(kind))
    return _with(kind(0.1) if needs_lr else kind(), settings)


def _with(given: Dynamics, settings: Mapping[str, Any]) -> Dynamics:
    """The dynamics with some settings replaced; the momentum of Adam is its first beta."""
    if isinstance(given, TorchOptim):
        return TorchOptim(given.optimizer, **{**given.settings, **settings})
    fields = {field.name for field in dataclasses.fields(given)}
    changed = dict(settings)
    if "momentum" in changed and "momentum" not in fields and "betas" in fields:
        changed["betas"] = (changed.pop("momentum"), given.betas[1])  # type: ignore[attr-defined]
    unknown = sorted(set(changed) - fields)
    if unknown:
        raise BilevelError(
            f"{type(given).__name__} has no setting {unknown[0]!r} to tune; it has "
            f"{', '.join(sorted(fields)) or 'none'}. Use a dynamics that has it, or take the hyperparameter out."
        )
    return dataclasses.replace(given, **changed)


def _complete_with_lr() -> dict[str, Any]:
    """The dynamics that need no other setting than `lr`, by name in lower case."""
    found = {}
    for kind in dynamics.find().values():
        required = [f.name for f in dataclasses.fields(kind) if f.init and f.default is dataclasses.MISSING]
        if required in ([], ["lr"]) and "lr" in {f.name for f in dataclasses.fields(kind)}:
            found[kind.__name__.lower()] = kind
    return found


def _names() -> str:
    return ", ".join(map(repr, ["sgd", *_complete_with_lr()]))
