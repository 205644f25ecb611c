"""`Method`, the base class of all methods, and `Hypergradient`, which they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.engine.memory import kind_of
from bilevel.engine.process import Process, State
from bilevel.engine.replay import Plan
from bilevel.errors import BilevelError
from bilevel.trees import Tree

# Where λ can enter. "the fixed point" is the part of the dynamics that matters when w no longer changes: a penalty,
# not a step size.
Part = Literal["the start", "the inner objective", "the dynamics", "the fixed point", "the outer objective"]
EVERYTHING: frozenset[Part] = frozenset(
    {"the start", "the inner objective", "the dynamics", "the fixed point", "the outer objective"}
)


@dataclass(frozen=True)
class Stats:
    """The cost of a hypergradient, and how it was computed.

    Attributes:
        method: its name.
        steps: forward steps of the dynamics, including those recomputed from kept iterates.
        replayed: steps run with a graph, to be differentiated.
        peak_memory: bytes that the method itself kept from one step to another (iterates, tangents, recorded graph).
            It does not include the data, λ and the workspace of a single step.
        seconds: wall-clock time.
        residual: relative residual of the linear system, for the methods that solve one.
        products: products with the matrix of that system.
        error: the method's own estimate of its distance ‖g − ∇f‖ from what it approximates, if it has one.
        reason: why `"auto"` chose the method.
        plan: how `Reverse(memory=…)` divided its memory, with the bytes that this was predicted to take.
        iterations: for a dynamics that stops at a tolerance, the steps that it took; None for all others.
    """

    method: str
    steps: int = 0
    replayed: int = 0
    peak_memory: int = 0
    seconds: float = 0.0
    residual: float | None = None
    products: int = 0
    error: float | None = None
    reason: str | None = None
    plan: Plan | None = None
    iterations: int | None = None


@dataclass(frozen=True)
class Hypergradient:
    """f_T(λ) and ∇f_T(λ).

    Attributes:
        value: f_T(λ), a scalar tensor without a graph.
        grad: ∇f_T(λ), a tree like λ.
        inner: w_T, or a list of them when a list of tasks was passed.
        stats: its cost.
        state: (w_T, auxiliary variables). An online run continues from it, from `t` and from `tangents`.
        adjoint: the solution of the linear system of an implicit method, with which the next one can start.
        dynamics: the kind of dynamics whose auxiliary variables `state` holds.
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
    dynamics: str | None = field(default=None, repr=False)


def to_device(result: Hypergradient, device: torch.device) -> Hypergradient:
    """The result with all its tensors on a device."""

    def on_device(tree: Tree) -> Tree:
        return trees.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)

    names = ("value", "grad", "inner", "state", "tangents", "adjoint")
    return replace(result, **{name: on_device(getattr(result, name)) for name in names})


@dataclass(frozen=True)
class Method(ABC):
    """How ∇f_T(λ) is computed: `method(process)` returns a `Hypergradient`.

    Attributes:
        exact: it computes ∇f_T up to rounding, not an approximation.
        sees_dynamics: it differentiates the steps, so that step sizes and starts can be learned.
        second_derivatives: it differentiates gradients of the inner objective.
        outer_derivatives: it differentiates the outer objective. If False, that objective may be an accuracy.
        tolerance: for a method that is not exact, the relative error that the battery allows where its claim holds.
        single_tolerance: the same in float32.
        structure: the inner objective that it is written for, a class of `bilevel.structures`; None for any.
    """

    exact: ClassVar[bool] = True
    sees_dynamics: ClassVar[bool] = True
    second_derivatives: ClassVar[bool] = True
    outer_derivatives: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-6
    single_tolerance: ClassVar[float] = 1e-4
    structure: ClassVar[type | None] = None

    @abstractmethod
    def __call__(self, process: Process) -> Hypergradient:
        """The hypergradient of a process that has passed the checks."""

    def sees(self, process: Process) -> frozenset[Part]:
        """Where λ may enter: the parts of the process that this method differentiates."""
        return EVERYTHING

    def check(self, process: Process) -> None:  # noqa: B027 - most methods apply everywhere
        """Raise a `BilevelError` if this method does not apply to the process; called before any work, every time."""

    def check_key(self) -> Hashable:
        """The settings of this method that the checks depend on. Methods with equal keys share one check."""
        return self

    def kind_of_data(self, process: Process) -> Hashable:
        """The properties of λ, the start and the task that the checks depend on. Equal ones are checked once."""
        task = process.bound.task
        return kind_of([process.start, process.variables, task.train, task.val])

    def prepare(self, process: Process) -> Any:
        """Compute what is the same in all calls of one kind. It is kept as `process.check_results.prepared`.

        Called once for each kind of call, after all checks.
        """
        return None

    def compile(self, process: Process, block: int) -> Callable[[Process], Hypergradient]:
        """This method as compiled code for processes like this one, which has passed the checks.

        Args:
            process: an example of what the code will be called with.
            block: how many steps to compile together, for a method that takes steps.
        """
        raise BilevelError(
            f"{type(self).__name__} has no compiled form. Pass method=Reverse() or, for a quadratic inner objective, "
            "method=Spectral() to bilevel.compile(...)."
        )

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
        """The result, with the gradient carried through `encode` unless it is `pulled` already, as a tree like λ.

        `continues` says whether a later run may continue from the state.
        """
        parts = list(gradients) if pulled else process.pull_back(list(gradients))
        lam = process.variables[: process.outer_count]
        if any(g is None for g in parts) and not process.allow_unused:
            unseen = next(path for path, g in zip(trees.paths(process.lam), parts, strict=True) if g is None)
            other = "" if self.exact else "use an exact method such as Reverse(), "
            raise BilevelError(
                f"{type(self).__name__} found no path from λ{unseen} to the outer objective in these {process.steps} "
                f"steps: λ{unseen} affects only parts of w that the outer objective does not use, or affects them too "
                f"late. "
                f"Remove it from λ, {other}or pass allow_unused=True to have its gradient be zero."
            )
        filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(lam, parts, strict=True)]
        grad = process.lam_spec.unflatten(_each_with_its_own_memory(filled))
        last = process.times[-1] if process.steps else process.times.start - 1
        kept, dynamics = state if continues else None, process.bound.dynamics
        stats["iterations"] = dynamics.iterations(state[1]) if continues else None
        facts = {"dynamics": dynamics.kind if continues else None, **(extra or {})}
        # A copy, because the user may change it in place, and a later run continues from the state.
        inner = trees.clone(state[0]) if continues else state[0]
        return Hypergradient(value, grad, inner, Stats(type(self).__name__, **stats), kept, last, **facts)


def _each_with_its_own_memory(gradients: list[Tensor]) -> list[Tensor]:
    """The gradients as tensors that can be changed in place, as gradient clipping does, one by one.

    autograd returns one tensor for two leaves that enter as their sum, and one number in all places for a sum.
    """
    owners: set[int] = set()
    for i, g in enumerate(gradients):
        if g.data_ptr() in owners or (0 in g.stride() and g.numel() > 1):
            gradients[i] = g.clone(memory_format=torch.contiguous_format)
        owners.add(gradients[i].data_ptr())
    return gradients
