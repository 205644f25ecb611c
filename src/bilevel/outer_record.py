"""The history of a `solve`, and the solution that it returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bilevel import trees
from bilevel.engine.method import Hypergradient, Stats
from bilevel.errors import Outcome
from bilevel.hyperiterations import Part
from bilevel.trees import Spec, Tree


@dataclass(frozen=True)
class Iteration:
    """The argument of a callback: hyperiteration k = 0, 1, … at λ, before λ is updated."""

    k: int
    lam: Tree
    hypergradient: Hypergradient
    gradient_norm: float


@dataclass(frozen=True)
class Solution:
    """The result of `solve`.

    Attributes:
        outer: λ. With `patience`, and with an algorithm that compares values, the best one seen; otherwise the last.
        inner: w_T at that λ (a list for a list of tasks).
        value: f_T at that λ.
        history: plain arrays with one entry per hyperiteration: "value", "gradient_norm", "seconds" since the start.
        outcome: a sentence that says how it ended; `outcome.kind` is a word for programs.
        stats: the cost of the last hypergradient.
    """

    outer: Tree
    inner: Tree
    value: float
    history: dict[str, np.ndarray]
    outcome: Outcome
    stats: Stats | None = None


@dataclass
class Record:
    """The history, and the λ that will be returned."""

    began: float = field(default_factory=time.perf_counter)
    values: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    best_value: float = float("inf")
    best: Iteration | None = None
    last: Iteration | None = None
    advance: Callable[..., None] = lambda done, value: None

    def keep(self, k: int, here: Iteration) -> None:
        """Store hyperiteration k as the last one, and as the best one if its value is."""
        self.last = here
        value = float(here.hypergradient.value)
        if value < self.best_value:
            self.best_value, self.best = value, here

    def add(self, k: int, here: Iteration) -> None:
        self.values.append(float(here.hypergradient.value))
        self.norms.append(here.gradient_norm)
        self.seconds.append(time.perf_counter() - self.began)
        self.advance(k + 1, value=f"{self.values[-1]:.6g}")

    def patience(self, patience: int) -> Part:
        """The part that ends the loop when the value has not improved for `patience` hyperiterations."""

        def part(k: int, here: Iteration) -> Outcome | None:
            best_k = self.best.k if self.best is not None else -1
            if k - best_k < patience:
                return None
            return Outcome(
                "stopped early",
                f"Stopped early: no improvement on {self.best_value:.6g} (hyperiteration {best_k}) for {patience} "
                "hyperiterations.",
            )

        return part

    def solution(self, begin: Tree, outcome: Outcome, best: bool) -> Solution:
        history = {
            "value": np.array(self.values),
            "gradient_norm": np.array(self.norms),
            "seconds": np.array(self.seconds),
        }
        kept = self.best if best and self.best is not None else self.last
        if kept is None:
            return Solution(begin, None, float("nan"), history, outcome)
        result = kept.hypergradient
        return Solution(kept.lam, result.inner, float(result.value), history, outcome, result.stats)

    def state(self) -> dict[str, Any]:
        """Everything but the time of the start, for a checkpoint."""

        def kept(here: Iteration | None) -> Any:
            return None if here is None else (here.k, trees.leaves(here.lam), here.hypergradient, here.gradient_norm)

        return {
            "values": self.values,
            "norms": self.norms,
            "seconds": self.seconds,
            "best": kept(self.best),
            "last": kept(self.last),
        }

    def load(self, state: dict[str, Any], spec: Spec) -> None:
        """Restore a state; `spec` is the structure of λ."""

        def restored(kept: Any) -> Iteration | None:
            return None if kept is None else Iteration(kept[0], spec.unflatten(kept[1]), kept[2], kept[3])

        self.values, self.norms, self.seconds = state["values"], state["norms"], state["seconds"]
        self.best, self.last = restored(state["best"]), restored(state["last"])
        self.best_value = float("inf") if self.best is None else float(self.best.hypergradient.value)
        self.began = time.perf_counter() - (self.seconds[-1] if self.seconds else 0.0)
