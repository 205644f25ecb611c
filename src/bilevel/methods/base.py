"""What a method is, and what every method returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics import DynamicsLike
from bilevel.errors import BilevelError
from bilevel.methods.process import Process, State
from bilevel.problem import Problem, Task
from bilevel.trees import Tree

# Where λ can enter. "the fixed point" is what of the dynamics remains when w no longer moves: a penalty, not a step
# size.
Part = Literal["the start", "the inner objective", "the dynamics", "the fixed point", "the outer objective"]
EVERYTHING: frozenset[Part] = frozenset(
    {"the start", "the inner objective", "the dynamics", "the fixed point", "the outer objective"}
)


@dataclass(frozen=True)
class Stats:
    """What a hypergradient cost.

    Attributes:
        method: its name.
        steps: forward steps of the dynamics, those recomputed from checkpoints included.
        replayed: steps run once more with a graph, to be differentiated.
        peak_memory: bytes that the method itself kept from one step to another (iterates, tangents, recorded graph).
            The data, λ and a single step's workspace come on top.
        seconds: wall-clock time.
        residual: relative residual of the linear system, for the methods that solve one.
        products: products with the matrix of that system.
        reason: why `"auto"` chose the method.
    """

    method: str
    steps: int = 0
    replayed: int = 0
    peak_memory: int = 0
    seconds: float = 0.0
    residual: float | None = None
    products: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class Hypergradient:
    """f_T(λ) and ∇f_T(λ).

    Attributes:
        value: f_T(λ), a scalar tensor without a graph.
        grad: ∇f_T(λ), a tree like λ.
        inner: w_T, or a list of them when a list of tasks was passed.
        stats: what it cost.
        state: (w_T, auxiliary variables); with `t` and `tangents`, what the online variants continue from.
        adjoint: the solution of the linear system of an implicit method, to warm-start the next one with.
    """

    value: Tensor
    grad: Tree
    inner: Tree
    stats: Stats
    state: State | None = field(default=None, repr=False)
    t: int = 0
    tangents: list[Tensor | None] | None = field(default=None, repr=False)
    adjoint: Tensor | None = field(default=None, repr=False)
    tasks: list[Hypergradient] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Method(ABC):
    """A way to compute ∇f_T(λ): `method(process)` for any method and any process.

    Attributes:
        exact: it computes ∇f_T itself, to rounding, and not an approximation of it.
        sees_dynamics: it differentiates the steps, so that step sizes and starts can be learned.
        second_derivatives: it differentiates gradients of the inner objective.
        structure: the inner objective that it is written for, a class of `bilevel.structures`; None for any.
    """

    exact: ClassVar[bool] = True
    sees_dynamics: ClassVar[bool] = True
    second_derivatives: ClassVar[bool] = True
    structure: ClassVar[type | None] = None

    @abstractmethod
    def __call__(self, process: Process) -> Hypergradient:
        """The hypergradient of a process that has passed the checks."""

    def sees(self, process: Process) -> frozenset[Part]:
        """Where λ may enter for this method to notice it."""
        return EVERYTHING

    def check(self, process: Process) -> None:  # noqa: B027 - most methods apply everywhere
        """Raise a `BilevelError` if this method does not apply to the process; called before any work, every time."""

    def remembered_as(self) -> Hashable:
        """What of this method the remembered checks depend on: two that share it need one check between them."""
        return self

    def look(self, process: Process) -> None:  # noqa: B027 - most methods need to know nothing more
        """Learn what the method needs to know about the process into `process.findings`, where it is remembered."""

    def recall(
        self, problem: Problem, lam: Tree, task: Task, dynamics: DynamicsLike, steps: int, allow_unused: bool
    ) -> Hypergradient | None:
        """The hypergradient by a shorter way, where a call is like one that has passed all checks; None in any
        doubt."""
        return None

    @classmethod
    def examples(cls) -> list[Self]:
        """Instances for the conformance battery of `bilevel.testing`."""
        return [cls()]

    def result(
        self,
        process: Process,
        value: Tensor,
        state: State,
        gradients: Sequence[Tensor | None],
        *,
        pulled: bool = False,
        continues: bool = True,
        extra: dict[str, Any] | None = None,
        **stats: Any,
    ) -> Hypergradient:
        """Wrap up: carry the gradient through `encode` and put it into λ's shape; a later run may begin at the state
        where it `continues`."""
        parts = list(gradients) if pulled else process.pull_back(list(gradients))
        lam = process.variables[: process.outer_count]
        if any(g is None for g in parts) and not process.allow_unused:
            unseen = next(path for path, g in zip(trees.paths(process.lam), parts, strict=True) if g is None)
            other = "" if self.exact else "use an exact method such as Reverse(), "
            raise BilevelError(
                f"{type(self).__name__} found no way from λ{unseen} to the outer objective in these {process.steps} "
                f"steps: λ{unseen} moves only parts of w that the outer objective does not look at, or too late. "
                f"Remove it from λ, {other}or pass allow_unused=True to have its gradient be zero."
            )
        filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(lam, parts, strict=True)]
        grad = trees.flatten(process.lam)[1].unflatten(filled)
        last = process.times[-1] if process.steps else process.times.start - 1
        kept = state if continues else None
        return Hypergradient(value, grad, state[0], Stats(type(self).__name__, **stats), kept, last, **(extra or {}))
