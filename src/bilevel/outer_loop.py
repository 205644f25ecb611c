"""The outer loop: min over λ in Λ of f_T(λ), with any torch optimiser."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from bilevel import trees
from bilevel.constraints import Constraint, as_constraint
from bilevel.dynamics import DynamicsLike
from bilevel.errors import BilevelError, DivergenceError, Outcome
from bilevel.hypergradients import hypergradient
from bilevel.methods.base import Hypergradient, Method, Stats
from bilevel.methods.checks import check_lam
from bilevel.problem import Problem, Task
from bilevel.progress import outer_progress
from bilevel.trees import Tree

Tasks: TypeAlias = Task | Sequence[Task]
TaskSource: TypeAlias = Callable[[int], Tasks] | Iterator[Tasks]


@dataclass(frozen=True)
class Iteration:
    """What a callback is given: hyperiteration k = 0, 1, … at λ, before λ is updated."""

    k: int
    lam: Tree
    hypergradient: Hypergradient
    gradient_norm: float


@dataclass(frozen=True)
class Solution:
    """What the outer loop reached.

    Attributes:
        outer: λ. With `patience`, the best one seen; otherwise the last.
        inner: w_T at that λ (a list for a list of tasks).
        value: f_T at that λ.
        history: plain arrays with one entry per hyperiteration: "value", "gradient_norm", "seconds" since the start.
        outcome: a sentence that says how it ended; `outcome.kind` is a word for programs.
        stats: what the last hypergradient cost.
    """

    outer: Tree
    inner: Tree
    value: float
    history: dict[str, np.ndarray]
    outcome: Outcome
    stats: Stats | None = None


def solve(
    problem: Problem,
    lam: Tree,
    tasks: Tasks | TaskSource,
    *,
    dynamics: DynamicsLike,
    steps: int,
    method: Method | str | Callable[[int], Method] | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    constraint: Constraint | Any = None,
    iterations: int = 100,
    start: Literal["cold", "warm", "online"] = "cold",
    tol: float | None = None,
    patience: int | None = None,
    callbacks: Sequence[Callable[[Iteration], bool | None]] = (),
    progress: bool | None = None,
    allow_unused: bool = False,
    raise_on_failure: bool = False,
) -> Solution:
    """Minimise f_T over Λ by following hypergradients.

    Args:
        problem: the inner and outer objectives and the start.
        lam: where to begin; it is copied, not changed.
        tasks: one task, a list (value and gradient are means over it), or a stochastic source: a function of the
            hyperiteration k = 0, 1, … or an iterator, returning a task or a list each time.
        dynamics: Φ, as for `hypergradient`.
        steps: T, the inner steps of every hyperiteration.
        method: how to differentiate, as for `hypergradient`, or a function of the hyperiteration k that returns it:
            `lambda k: Implicit(CG(tol=0.1 * 0.9**k), newton=0.1 * 0.9**k)` solves both linear system and inner problem
            more accurately as λ comes to rest.
        optimizer: builds any torch optimiser from the leaves of λ; Adam with lr=1e-2 by default.
        scheduler: builds a torch learning-rate scheduler from the optimiser; stepped once per hyperiteration.
        constraint: Λ; λ is projected onto it before the first and after every update.
        iterations: hyperiterations.
        start: "cold" begins every inner run at init(λ). "warm" begins at the previous w_T, and an implicit method's
            linear solver at its previous solution. "online" never restarts: the inner run goes on for `steps` more
            steps, velocities and step number included. With `Forward()` that is real-time hyperparameter optimisation
            (RTHO), with `Reverse()` or `Truncated(k)` truncated back-propagation.
        tol: stop when the norm of the (projected) gradient falls to this.
        patience: stop when the value has not improved for this many hyperiterations, and return the best λ.
        callbacks: called with an `Iteration` before every update; one that returns True stops the loop.
        progress: show a progress bar; None shows one on a terminal.
        allow_unused: as for `hypergradient`.
        raise_on_failure: raise the `DivergenceError` instead of returning it as the outcome.

    Interrupting with Ctrl-C returns what was reached.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: (w - lam) ** 2,
    ...     outer=lambda w, lam, x: (w - 1) ** 2,
    ...     init=lambda lam: torch.zeros_like(lam),
    ... )
    >>> sol = bl.solve(
    ...     problem, torch.tensor(3.0), bl.Task(None, None), dynamics=bl.GradientDescent(0.5), steps=1,
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.5), iterations=50, tol=1e-6,
    ... )
    >>> print(round(sol.outer.item(), 4), sol.outcome)
    1.0 Converged: the gradient norm fell to 0 ≤ 1e-06 at hyperiteration 1.
    """
    _check(lam, iterations, start, patience, tasks, method, optimizer)
    constraint = as_constraint(constraint)
    callbacks = [callbacks] if callable(callbacks) else callbacks
    loop = _Loop(
        problem, tasks, {"dynamics": dynamics, "steps": steps, "allow_unused": allow_unused}, _by_k(method), start
    )
    point = _Point(lam, constraint)
    torch_optimizer = optimizer(point.leaves) if optimizer else torch.optim.Adam(point.leaves, lr=1e-2)
    torch_scheduler = scheduler(torch_optimizer) if scheduler else None
    record = _Record()
    outcome = Outcome("finished", f"Ran all {iterations} hyperiterations.")

    try:
        with outer_progress(iterations, progress) as report:
            for k in range(iterations):
                result = loop.evaluate(point.tree(), k)
                gradient_norm = point.stationarity(result.grad)
                record.add(result, gradient_norm, point, k)
                report(k + 1, record.values[-1])
                if tol is not None and gradient_norm <= tol:
                    outcome = Outcome(
                        "converged",
                        f"Converged: the gradient norm fell to {gradient_norm:.3g} ≤ {tol:.3g} at hyperiteration {k}.",
                    )
                    break
                if patience is not None and k - record.best_k >= patience:
                    outcome = Outcome(
                        "stopped early",
                        f"Stopped early: no improvement on {record.best_value:.6g} (hyperiteration {record.best_k}) "
                        f"for {patience} hyperiterations.",
                    )
                    break
                # Every callback is called, so that one that stops the loop does not hide it from the others.
                wishes = [callback(Iteration(k, point.copy(), result, gradient_norm)) for callback in callbacks]
                if any(wish is True for wish in wishes):
                    outcome = Outcome("stopped early", f"Stopped early by a callback at hyperiteration {k}.")
                    break
                _update(torch_optimizer, torch_scheduler, point, loop, result)
            else:
                if start != "online":
                    record.keep(loop.evaluate(point.tree(), None), point, iterations)
    except KeyboardInterrupt:
        outcome = Outcome(
            "interrupted",
            f"Interrupted after {len(record.values)} of {iterations} hyperiterations; this is what was reached.",
        )
    except DivergenceError as error:
        if raise_on_failure:
            raise
        outcome = Outcome(
            "diverged", f"Diverged at hyperiteration {len(record.values)}: {error} λ is left at its last finite value."
        )
    except BilevelError as error:
        # Input that cannot work fails at once; what fails later keeps what was reached until then.
        if raise_on_failure or not record.values:
            raise
        outcome = Outcome("failed", f"Failed at hyperiteration {len(record.values)}: {error}")
    except _SourceEnded:
        outcome = Outcome(
            "finished", f"The task source ended after {len(record.values)} of {iterations} hyperiterations."
        )
    return record.solution(point, outcome, best=patience is not None)


def _update(
    optimizer: torch.optim.Optimizer, scheduler: Any, point: _Point, loop: _Loop, result: Hypergradient
) -> None:
    """One step of the outer optimiser and the projection onto Λ; optimisers that search a line evaluate f_T again
    through the closure."""
    known: Hypergradient | None = result

    def closure() -> Tensor:
        nonlocal known
        here = known or loop.evaluate(point.tree(), None)
        known = None
        for leaf, grad in zip(point.leaves, trees.leaves(here.grad), strict=True):
            leaf.grad = grad.clone()
        return here.value

    with torch.enable_grad():
        closure()
    known = result
    optimizer.step(closure)  # type: ignore[arg-type]
    point.project()
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(float(result.value))
    elif scheduler is not None:
        scheduler.step()
    try:
        check_lam(point.tree())
    except DivergenceError as error:
        raise DivergenceError(
            f"The update made λ non-finite (gradient norm {float(trees.norm(result.grad)):.3g}); lower the outer step "
            f"size. {error}"
        ) from error


def _by_k(method: Any) -> Callable[[int], Any]:
    """The method as a function of the hyperiteration."""
    if isinstance(method, (Method, type)) or not callable(method):
        return lambda k: method
    try:
        inspect.signature(method).bind(0)
    except TypeError as error:
        raise BilevelError(
            "method is a function that cannot be called with the hyperiteration. Write method=lambda k: Reverse(), or "
            "pass the method itself."
        ) from error
    return cast(Callable[[int], Any], method)


def _kind(method: Any) -> tuple[Any, ...]:
    """What two methods must share for the adjoint of one to be a guess for the other's."""
    return type(method), getattr(method, "condition", None)


class _SourceEnded(Exception):
    pass


@dataclass
class _Loop:
    """Evaluates f_T and its gradient, hyperiteration by hyperiteration, carrying over what a warm or online start
    needs."""

    problem: Problem
    tasks: Any
    settings: dict[str, Any]
    methods: Callable[[int], Any]
    start: str
    previous: Hypergradient | None = None
    drawn: Tasks | None = None
    method: Method | str | None = None

    def evaluate(self, lam: Tree, k: int | None) -> Hypergradient:
        """f_T and ∇f_T at λ on the tasks of hyperiteration k; None stays with those drawn last."""
        if k is not None or self.drawn is None:
            self.drawn = self._draw(k or 0)
        tasks = self.drawn
        last = self.method
        if k is not None or self.method is None:
            self.method = self.methods(k or 0)
        extra: dict[str, Any] = {"method": self.method}
        if self.previous is not None and self.start == "warm":
            extra["start"] = self.previous.inner
            many = isinstance(tasks, (list, tuple))
            # A method of another kind solves another system.
            if _kind(last) == _kind(self.method):
                extra["adjoint"] = [task.adjoint for task in self.previous.tasks] if many else self.previous.adjoint
        elif self.previous is not None and self.start == "online":
            extra["start"] = self.previous
        self.previous = hypergradient(self.problem, lam, tasks, **self.settings, **extra)
        return self.previous

    def _draw(self, k: int) -> Tasks:
        if isinstance(self.tasks, (Task, list, tuple)):
            return self.tasks
        if isinstance(self.tasks, Iterator):
            try:
                return next(self.tasks)
            except StopIteration:
                raise _SourceEnded from None
        return self.tasks(k)


class _Point:
    """λ as leaves that a torch optimiser can own, always inside Λ."""

    def __init__(self, lam: Tree, constraint: Constraint | None) -> None:
        values, self.spec = trees.flatten(lam)
        self.constraint = constraint
        self.leaves = [value.detach().clone().requires_grad_() for value in values]
        self.project()

    def tree(self) -> Tree:
        return self.spec.unflatten(leaf.detach() for leaf in self.leaves)

    def copy(self) -> Tree:
        return trees.clone(self.tree())

    def project(self) -> None:
        if self.constraint is not None:
            with torch.no_grad():
                for leaf, value in zip(self.leaves, trees.leaves(self.constraint.project(self.tree())), strict=True):
                    leaf.copy_(value)

    def stationarity(self, grad: Tree) -> float:
        """‖∇f‖, or ‖λ − P(λ − ∇f)‖ where there is a constraint: zero exactly at stationary points."""
        if self.constraint is None:
            return float(trees.norm(grad))
        lam = self.tree()
        return float(trees.norm(trees.subtract(lam, self.constraint.project(trees.subtract(lam, grad)))))


@dataclass
class _Record:
    """The history, and the λ that will be returned."""

    began: float = field(default_factory=time.perf_counter)
    values: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    best_value: float = float("inf")
    best_k: int = -1
    best: tuple[Tree, Hypergradient] | None = None
    last: tuple[Tree, Hypergradient] | None = None

    def add(self, result: Hypergradient, gradient_norm: float, point: _Point, k: int) -> None:
        self.values.append(float(result.value))
        self.norms.append(gradient_norm)
        self.seconds.append(time.perf_counter() - self.began)
        self.keep(result, point, k)

    def keep(self, result: Hypergradient, point: _Point, k: int) -> None:
        """λ at hyperiteration k is the last one now, and perhaps the best."""
        self.last = (point.copy(), result)
        if float(result.value) < self.best_value:
            self.best_value, self.best_k, self.best = float(result.value), k, self.last

    def solution(self, point: _Point, outcome: Outcome, best: bool) -> Solution:
        kept = self.best if best and self.best is not None else self.last
        history = {
            "value": np.array(self.values),
            "gradient_norm": np.array(self.norms),
            "seconds": np.array(self.seconds),
        }
        if kept is None:
            return Solution(point.copy(), None, float("nan"), history, outcome)
        lam, result = kept
        return Solution(lam, result.inner, float(result.value), history, outcome, result.stats)


def _check(
    lam: Tree, iterations: int, start: str, patience: int | None, tasks: Any, method: Any, optimizer: Any
) -> None:
    check_lam(lam)
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
        raise BilevelError(f"iterations={iterations!r} is not a number of hyperiterations; pass an int ≥ 0.")
    if start not in ("cold", "warm", "online"):
        raise BilevelError(f"start={start!r} is not known; pass 'cold', 'warm' or 'online'.")
    if patience is not None and patience < 1:
        raise BilevelError(f"patience={patience} would stop at once; pass a number ≥ 1 or None.")
    if start == "online" and method == "auto":
        raise BilevelError("start='online' needs a method that can go on: pass Forward(), Reverse() or Truncated(k).")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise BilevelError(
            "optimizer is an instance, but λ's leaves are made here. Pass a function, as in "
            "optimizer=lambda params: torch.optim.Adam(params, lr=1e-2)."
        )
    source = not isinstance(tasks, (Task, list, tuple))
    if source and not (callable(tasks) or isinstance(tasks, Iterator)):
        raise BilevelError(
            f"tasks is {type(tasks).__name__}; pass a Task, a list of them, a function of the hyperiteration, or an "
            "iterator."
        )
    if source and start != "cold":
        raise BilevelError(
            f"start={start!r} carries w from one hyperiteration to the next, but a task source draws other tasks each "
            "time. Pass start='cold'."
        )
