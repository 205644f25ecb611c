"""Dynamics Φ: one file each. The conformance battery and the command line find new files here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from bilevel import discovery
from bilevel.dynamics.base import Dynamics, gradient
from bilevel.dynamics.step_function import StepFunction
from bilevel.errors import BilevelError
from bilevel.trees import Tree

DynamicsLike: TypeAlias = Dynamics | Callable[..., Any]


def find() -> dict[str, type[Dynamics]]:
    """Every dynamics in this folder, by name."""
    return discovery.classes(sys.modules[__name__], Dynamics)  # type: ignore[type-abstract]


def as_function_of_lam(dynamics: DynamicsLike) -> Callable[[Tree], Dynamics]:
    """The dynamics as a function of λ, whatever form it was passed in."""
    if isinstance(dynamics, Dynamics):
        return lambda lam: dynamics
    if callable(dynamics) and not inspect.isclass(dynamics):
        if _count_parameters(dynamics) == 4:
            step = StepFunction(dynamics)
            return lambda lam: step
        return lambda lam: _built(dynamics, lam)
    raise BilevelError(
        f"dynamics={dynamics!r} is not a dynamics. Pass an instance such as GradientDescent(lr=0.1), a function of λ "
        "that returns one, or a function step(loss, w, state, t) -> (w, state)."
    )


def _built(build: Callable[[Tree], Any], lam: Tree) -> Dynamics:
    dynamics = build(lam)
    if not isinstance(dynamics, Dynamics):
        raise BilevelError(
            f"The function of λ passed as dynamics returned {type(dynamics).__name__}. It must return a dynamics, as "
            "in lambda lam: GradientDescent(lr=lam['lr'].exp()); a step function must take the four parameters (loss, "
            "w, state, t)."
        )
    return dynamics


def _count_parameters(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds and p.default is p.empty]
    return len(required)


__all__ = ["Dynamics", "DynamicsLike", "as_function_of_lam", "find", "gradient"]
