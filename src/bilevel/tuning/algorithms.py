"""The inner optimisation algorithm, with those of its settings that are tuned put in."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from bilevel import dynamics
from bilevel.dynamics.base import Dynamics
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.dynamics.heavy_ball import HeavyBall
from bilevel.dynamics.step_function import StepFunction
from bilevel.dynamics.torch_optim import TorchOptim
from bilevel.errors import BilevelError


def algorithm(given: Any, values: Mapping[str, Any], tuned: Mapping[str, Any], fixed: Mapping[str, Any]) -> Dynamics:
    """The dynamics with its tuned settings.

    Args:
        given: "sgd", the name of a dynamics, an instance, a function of the values by name, or a function
            step(loss, w, state, t).
        values: of all hyperparameters, in natural units.
        tuned: settings by name; each may be a function of t.
        fixed: `lr` and `momentum` where they are not tuned, for an algorithm given by its name.

    >>> algorithm("sgd", {}, {"lr": 0.5}, {"lr": None, "momentum": 0.9})
    HeavyBall(lr=0.5, momentum=0.9)
    """
    _refuse_two(given, tuned, {name: x for name, x in fixed.items() if x is not None})
    if isinstance(given, str):
        return _named(given, {**{name: x for name, x in fixed.items() if x is not None}, **tuned})
    if isinstance(given, Dynamics):
        return _with(given, tuned)
    if callable(given) and not isinstance(given, type):
        if len(inspect.signature(given).parameters) == 4:
            return _with(StepFunction(given), tuned)
        made = given(values)
        if not isinstance(made, Dynamics):
            raise BilevelError(
                f"The function passed as dynamics returned {type(made).__name__}; it must return a dynamics, as in "
                "lambda hp: bilevel.Adam(lr=hp['lr'])."
            )
        return _with(made, tuned)
    raise BilevelError(
        f"dynamics={given!r} is not a dynamics. Pass {_names()}, an instance such as bilevel.Adam(1e-3), or a function "
        "of the hyperparameters' values that returns one."
    )


def _refuse_two(given: Any, tuned: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """A number that would be passed over in silence is an error."""
    for name, value in fixed.items():
        if name in tuned:
            role = "Momentum" if name == "momentum" else "LearningRate"
            raise BilevelError(
                f"{name}={value!r} was passed, and {name!r} is also declared as a hyperparameter. Leave {name}= out "
                f"and let the hyperparameter start there, as in {role}({value!r})."
            )
        if isinstance(given, Dynamics) or (callable(given) and not isinstance(given, type)):
            raise BilevelError(
                f"{name}={value!r} was passed together with dynamics={given!r}, which has settings of its own. Put it "
                "in there, or give the dynamics by its name."
            )


def _named(name: str, settings: dict[str, Any]) -> Dynamics:
    if name.lower() == "sgd":
        lr, momentum = settings.get("lr", 0.1), settings.get("momentum", 0.0)
        plain = isinstance(momentum, (int, float)) and momentum == 0
        return GradientDescent(lr) if plain else HeavyBall(lr, momentum)
    found = {kind.__name__.lower(): kind for kind in _by_lr()}
    if name.lower() not in found:
        raise BilevelError(f"dynamics={name!r} is not known. Pass {_names()}, or an instance of a dynamics.")
    kind = found[name.lower()]
    needs_lr = any(f.name == "lr" and f.default is dataclasses.MISSING for f in dataclasses.fields(kind))
    return _with(kind(0.1) if needs_lr else kind(), settings)


def _with(given: Dynamics, settings: Mapping[str, Any]) -> Dynamics:
    """The dynamics with some settings replaced."""
    if not settings:
        return given
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


def _by_lr() -> list[Any]:
    """The dynamics that are complete once their `lr` is known."""
    found = []
    for kind in dynamics.find().values():
        needed = [f.name for f in dataclasses.fields(kind) if f.init and f.default is dataclasses.MISSING]
        if needed in ([], ["lr"]) and "lr" in {f.name for f in dataclasses.fields(kind)}:
            found.append(kind)
    return found


def _names() -> str:
    return ", ".join(["'sgd'", *(repr(kind.__name__.lower()) for kind in _by_lr())])
