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
        values: the values of all hyperparameters, in natural units.
        tuned: the tuned settings by name. Each may be a function of t.
        fixed: `lr` and `momentum` if they were passed, for a name or a class.

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
            f"{name}={value!r} was passed together with dynamics={given!r}, which has its own settings. Set {name} "
            "there, or pass the dynamics by its name."
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
        no_momentum = isinstance(momentum, (int, float)) and momentum == 0
        return GradientDescent(lr) if no_momentum else HeavyBall(lr, momentum)
    known = _named_dynamics()
    if name.lower() not in known:
        raise BilevelError(f"dynamics={name!r} is not known. Pass {_names()}, or an instance of a dynamics.")
    kind = known[name.lower()]
    needs_lr = any(f.name == "lr" and f.default is dataclasses.MISSING for f in dataclasses.fields(kind))
    return _with(kind(0.1) if needs_lr else kind(), settings)


def _with(given: Dynamics, settings: Mapping[str, Any]) -> Dynamics:
    """The dynamics with some settings replaced. The momentum of Adam is its first beta."""
    if isinstance(given, TorchOptim):
        return TorchOptim(given.optimizer, **{**given.settings, **settings})
    fields = {field.name for field in dataclasses.fields(given)}
    changed = dict(settings)
    if "momentum" in changed and "momentum" not in fields and "betas" in fields:
        changed["betas"] = (changed.pop("momentum"), given.betas[1])  # type: ignore[attr-defined]
    unknown = sorted(set(changed) - fields)
    if unknown:
        raise BilevelError(
            f"{type(given).__name__} has no setting {unknown[0]!r} to tune. It has "
            f"{', '.join(sorted(fields)) or 'none'}. Use a dynamics that has it, or remove the hyperparameter."
        )
    return dataclasses.replace(given, **changed)


def _named_dynamics() -> dict[str, Any]:
    """The dynamics that need no setting other than `lr`, by name in lower case."""
    named = {}
    for kind in dynamics.find().values():
        required = [f.name for f in dataclasses.fields(kind) if f.init and f.default is dataclasses.MISSING]
        if required in ([], ["lr"]) and "lr" in {f.name for f in dataclasses.fields(kind)}:
            named[kind.__name__.lower()] = kind
    return named


def _names() -> str:
    return ", ".join(map(repr, ["sgd", *_named_dynamics()]))
