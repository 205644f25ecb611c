"""What an estimator's file provides: its validation criterion as a function of the features' log penalties."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from bilevel.estimators.folds import Array, Folds
from bilevel.problem import Problem, Task


@dataclass(frozen=True)
class Evaluation:
    """f and ∂f/∂(log penalty) for every feature, at one point."""

    value: float
    gradient: Array


# The relative error of a gradient that is as good as none.
EXACT = 1e-8


class Criterion(ABC):
    """f(λ) = Σ_k E_k(w^k_λ): fold k trains on its rows with the penalties and is judged on those held out.

    Attributes:
        method: a sentence that says how hypergradients are computed, and why so for this size.
    """

    method: str
    folds: Folds

    @abstractmethod
    def evaluate(self, log_alpha: Array, accuracy: float = EXACT) -> Evaluation:
        """f and its gradient. What was found may start the next evaluation, so neighbouring points are cheap.

        Args:
            accuracy: a relative error of the gradient that will do; those that solve directly do better anyhow.
        """

    @abstractmethod
    def restricted(self, folds: Folds) -> Self:
        """The criterion of other folds of the same rows."""

    @abstractmethod
    def refit(self, log_alpha: Array) -> tuple[Array, Array]:
        """Coefficients (features, outputs) and intercepts (outputs,) trained on all rows with these penalties."""

    @abstractmethod
    def bilevel_problem(self, log_alpha: Array) -> tuple[Problem, Any, Task, Any, dict[str, Any]]:
        """The same criterion for the engine: problem, λ, task, the w that was found there, and what `certify` should
        be told."""
