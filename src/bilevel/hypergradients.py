"""`hypergradient` returns f_T and its gradient; `objective` returns f_T as a tensor with `.backward()`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.distributed import World
from bilevel.dynamics import DynamicsLike, as_function_of_lam
from bilevel.engine.any_order import any_order, check_higher_derivatives
from bilevel.engine.calls import check_adjoint, continued, one_each, own_saved_tensors, refuse_changed_data, versions
from bilevel.engine.checks import check_arguments, check_problem_and_steps, check_process
from bilevel.engine.diagnosis import explain_divergence
from bilevel.engine.memory import Memory, memory_of
from bilevel.engine.method import Hypergradient, Method, Stats, to_device
from bilevel.engine.process import Process
from bilevel.engine.recomputed import NoOtherTensors, WithKnownGradient, refuse_forward_mode, under_torch_func
from bilevel.engine.samplers import check_task
from bilevel.errors import BilevelError
from bilevel.methods.auto import run_best
from bilevel.methods.reverse import Reverse
from bilevel.methods.unrolled import Unrolled, record
from bilevel.problem import Problem, Task
from bilevel.trees import Spec, Tree

Start = Tree | Hypergradient | None
logger = logging.getLogger("bilevel")


def hypergradient(
    problem: Problem,
    lam: Tree,
    task: Task | Sequence[Task],
    *,
    dynamics: DynamicsLike,
    steps: int,
    method: Method | str | None = None,
    start: Start = None,
    adjoint: Tensor | list[Tensor | None] | None = None,
    allow_unused: bool = False,
) -> Hypergradient:
    """f_T(λ) = E(w_T, λ) and ∇f_T(λ), with w_T from T steps of the dynamics (Eqs. 5 and 6).

    The result has no graph. For second derivatives, for a λ that is computed, and within `torch.func` use `objective`.

    Args:
        problem: the inner and outer objectives and the start.
        lam: λ, a tree of floating-point tensors; it is not changed and need not require grad.
        task: the data, or a list of tasks (a meta-batch, folds): value and gradient are then means over it.
        dynamics: Φ; an instance, a function of λ that returns one, or a function `step(loss, w, state, t)`.
        steps: T.
        method: how to differentiate; `Reverse()` by default. `"auto"` chooses by the sizes of w and λ, and gives its
            reason in `stats.reason` and in the log of the logger `bilevel`.
        start: begin at this w instead of init(λ), or continue from an earlier `Hypergradient` with its auxiliary
            variables and step number; with a list of tasks, a list of these.
        adjoint: the start of an implicit method's linear solver: the `.adjoint` of an earlier result.
        allow_unused: give a leaf of λ that reaches neither objective the gradient 0 instead of raising.

    Raises:
        BilevelError: the arguments cannot work; nothing was computed and nothing changed.
        DivergenceError: a number is not finite; the error names the step, the loss and the likely cause.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: (w - x) ** 2 + lam.exp() * w**2,
    ...     outer=lambda w, lam, x: (w - x) ** 2,
    ...     init=lambda lam: torch.zeros_like(lam),
    ... )
    >>> lam = torch.zeros((), dtype=torch.float64)
    >>> task = bl.Task(train=torch.tensor(2.0).double(), val=torch.tensor(1.5).double())
    >>> hg = bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(0.2), steps=100)
    >>> round(float(hg.value), 6), round(float(hg.grad), 6)
    (0.25, 0.5)
    """
    if under_torch_func():
        raise BilevelError(
            "hypergradient(...) was called within torch.func.grad, vmap or another transform, and its result has no "
            "graph that these could use. Write objective(...) there, which they differentiate and batch, or call "
            "hypergradient(...) outside, in a loop instead of vmap."
        )
    check_problem_and_steps(problem, steps)
    evaluator = Evaluator(problem, dynamics, steps, allow_unused, memory_of(problem))
    return evaluator.gradient(lam, task, method, start, adjoint)


def objective(
    problem: Problem,
    lam: Tree,
    task: Task | Sequence[Task],
    *,
    dynamics: DynamicsLike,
    steps: int,
    method: Method | str | None = None,
    allow_unused: bool = False,
) -> Tensor:
    """f_T(λ) as a scalar tensor: `.backward()` adds ∇f_T(λ) to the `.grad` of every leaf of λ that requires grad.

    Any torch optimiser, gradient clipping, learning-rate scheduler or DDP hook then works as with any other loss, and λ
    may itself be the output of a network. The arguments are those of `hypergradient`. If no leaf of λ requires grad,
    and under `torch.no_grad()`, only the value is computed.

    With an exact method it can be differentiated any number of times: `create_graph=True`, gradient penalties,
    `torch.autograd.functional.hessian`, `torch.func.grad`, `jacrev` and `vmap`, and `objective` inside the functions of
    another problem (three levels). A first derivative costs as much as `hypergradient`. A product with the Hessian runs
    the T steps once more, recorded as by `Unrolled`.

    Tensors of the task that require grad are differentiated like λ. A tensor that requires grad and that the functions
    read from a closure is refused: make it a leaf of λ.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: (w - lam) ** 2, outer=lambda w, lam, x: w**2, init=lambda lam: torch.zeros_like(lam)
    ... )
    >>> lam = torch.tensor(3.0, requires_grad=True)
    >>> f = bl.objective(problem, lam, bl.Task(None, None), dynamics=bl.GradientDescent(0.5), steps=1)
    >>> f.backward()
    >>> f.item(), lam.grad.item()
    (9.0, 6.0)
    """
    check_problem_and_steps(problem, steps)
    evaluator = Evaluator(problem, dynamics, steps, allow_unused, memory_of(problem))
    return _in_graph(evaluator, lam, task, as_method(method))


def _in_graph(evaluator: Evaluator, lam: Tree, task: Task | Sequence[Task], method: Method | None) -> Tensor:
    """f_T(λ) in the graph of λ and of the task's tensors."""
    transformed = under_torch_func()
    if (torch.is_grad_enabled() or transformed) and any(leaf.requires_grad for leaf in trees.tensors(task)):
        return _of_live_data(evaluator, lam, task, method)
    leaves, spec = trees.flatten(lam)
    if not transformed:
        refuse_forward_mode((lam, task))
        if not (torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in leaves)):
            if method is None or method.exact:
                return evaluator.value(lam, task)
            # Not every inexact method evaluates E at w_T: Implicit(newton=…) continues from there.
            return evaluator.gradient(lam, task, method).value
    # vmap may have batched the data. Passed as inputs, the tensors reach the function without the batch axis.
    data = trees.tensors(task) if transformed else []
    unchanged = () if transformed else versions(task)
    guard = NoOtherTensors if transformed else contextlib.nullcontext
    call = _Call(evaluator, spec, task, method, len(data), guard, unchanged)
    return WithKnownGradient.apply(call, len(data), *data, *leaves)[0]  # type: ignore[no-untyped-call]


def value_of(
    problem: Problem, lam: Tree, task: Task | Sequence[Task], *, dynamics: DynamicsLike, steps: int, start: Start = None
) -> Tensor:
    """f_T(λ) alone: a forward run that keeps nothing."""
    check_problem_and_steps(problem, steps)
    return Evaluator(problem, dynamics, steps, memory=memory_of(problem)).value(lam, task, start)


@dataclass
class Evaluator:
    """f_T and ∇f_T as functions of λ and the tasks, with a memory of checks.

    A loop owns one: `solve` has one for each run. `hypergradient` and `objective` use the memory that belongs to their
    problem.
    """

    problem: Problem
    dynamics: DynamicsLike
    steps: int
    allow_unused: bool = False
    memory: Memory = field(default_factory=Memory)
    # The processes that share the tasks of a list.
    world: World = field(default_factory=World)

    def gradient(
        self,
        lam: Tree,
        task: Task | Sequence[Task],
        method: Any = None,
        start: Start = None,
        adjoint: Any = None,
        drawn: int = 0,
    ) -> Hypergradient:
        """`hypergradient` of this problem."""
        chosen = as_method(method)
        tasks = check_arguments(self.problem, lam, task, self.steps)
        starts = one_each(start, tasks, task, "start")
        adjoints = one_each(adjoint, tasks, task, "adjoint")
        for one in adjoints:
            check_adjoint(one)

        def result(i: int) -> Hypergradient:
            return self._of_one_task(self.process(lam, tasks[i], starts[i], adjoint=adjoints[i], drawn=drawn), chosen)

        with own_saved_tensors():
            if not isinstance(task, (list, tuple)):
                return result(0)
            results = self.world.collect(result, range(len(tasks)))
        device = trees.leaves(lam)[0].device
        if self.world.size > 1 and device.type != "cpu":
            results = [to_device(one, device) for one in results]
        return _mean(results)

    def value(self, lam: Tree, task: Task | Sequence[Task], start: Start = None) -> Tensor:
        """f_T alone."""
        tasks = check_arguments(self.problem, lam, task, self.steps)
        values = []
        with own_saved_tensors():
            for one, begin in zip(tasks, one_each(start, tasks, task, "start"), strict=True):
                process = self.process(lam, one, begin, allow_unused=True)
                check_process(process, Unrolled(), value_only=True)
                with torch.no_grad(), continued(process):
                    values.append(process.bound.outer(process.run()).detach())
                if not bool(torch.isfinite(values[-1])):
                    explain_divergence(process)
        return torch.stack(values).mean()

    def process(self, lam: Tree, task: Task, start: Start = None, **settings: Any) -> Process:
        previous = start if isinstance(start, Hypergradient) else None
        begin = None if previous is not None else start
        settings = {"allow_unused": self.allow_unused, "memory": self.memory, **settings}
        return Process(self.problem, lam, task, self.dynamics, self.steps, begin, previous, **settings)

    def _of_one_task(self, process: Process, method: Method | None) -> Hypergradient:
        began = time.perf_counter()
        reason = None
        if method is None:
            with continued(process):
                result, reason = run_best(process)
            if self.memory.reason != reason:
                self.memory.reason = reason
                logger.info(reason)
        else:
            check_process(process, method)
            with continued(process):
                result = method(process)
        return finished(process, result, began, reason)


def finished(process: Process, result: Hypergradient, began: float, reason: str | None = None) -> Hypergradient:
    """The result with its time, or an error that says why it is not finite."""
    if not trees.all_finite((result.value, result.grad)):
        explain_divergence(process)
    # This takes a tenth of the time of dataclasses.replace, which matters for small problems.
    stats = Stats(**{**vars(result.stats), "seconds": time.perf_counter() - began, "reason": reason})
    return Hypergradient(**{**vars(result), "stats": stats})


@dataclass(frozen=True)
class _Call:
    """A call of `objective` as a function of tensors alone: the first `data` are those of the task, if any, and the
    others the leaves of λ."""

    evaluator: Evaluator
    spec: Spec
    task: Task | Sequence[Task]
    method: Method | None
    data: int
    guard: Callable[[], AbstractContextManager[Any]]
    data_versions: tuple[int, ...]

    def evaluate(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        """f_T and ∇f_T by the method."""
        lam, task = self._arguments(tensors)
        method = "auto" if self.method is None else self.method
        with self.guard(), torch.enable_grad():
            result = self.evaluator.gradient(lam, task, method)
        return result.value, trees.leaves(result.grad)

    def record(self, *tensors: Tensor) -> Tensor:
        """f_T with all steps in one graph: its derivatives beyond the first are the same for every exact method."""
        if self.method is not None and not self.method.exact:
            raise BilevelError(
                f"objective(…, method={self.method!r}) was asked for a second derivative (by create_graph=True, for a "
                "Hessian, or within another problem), and has none: its gradient is an approximation, which is not the "
                "derivative of its value. Pass method=Reverse() or another exact method."
            )
        if not self.data:
            refuse_changed_data(self.task, self.data_versions)
        lam, task = self._arguments(tensors)
        tasks = [task] if isinstance(task, Task) else task
        for one in tasks:
            check_higher_derivatives(self.evaluator.process(trees.detach(lam), one))
        with any_order():
            runs = [self.evaluator.process(lam, one, live=True) for one in tasks]
            return torch.stack([record(process)[0] for process in runs]).mean()

    def _arguments(self, tensors: Sequence[Tensor]) -> tuple[Tree, Task | Sequence[Task]]:
        data, task = iter(tensors[: self.data]), self.task
        if self.data:
            task = trees.map(lambda leaf: next(data) if isinstance(leaf, Tensor) else leaf, task)
        return self.spec.unflatten(tensors[self.data :]), task


def _of_live_data(evaluator: Evaluator, lam: Tree, task: Task | Sequence[Task], method: Method | None) -> Tensor:
    """`objective` for tasks with tensors that require grad."""
    tasks = [task] if isinstance(task, Task) else task
    calls = [with_live_data(evaluator, lam, one) for one in tasks]
    return torch.stack([_in_graph(*call, method) for call in calls]).mean()


def with_live_data(evaluator: Evaluator, lam: Tree, task: Task) -> tuple[Evaluator, Tree, Task]:
    """The same problem with the tensors of the task that require grad as leaves of λ; `encode` puts them back."""
    check_task(task)
    leaves = trees.leaves(task)
    at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
    if not at:
        return evaluator, lam, task
    memories, build = evaluator.memory.related, as_function_of_lam(evaluator.dynamics)
    if at not in memories:
        memories[at] = Memory()
    problem = _with_data(evaluator.problem, at)
    extended = replace(evaluator, problem=problem, dynamics=lambda lam: build(lam[0]), memory=memories[at])
    return extended, (lam, [leaves[i] for i in at]), trees.detach(task)


def _with_data(problem: Problem, at: tuple[int, ...]) -> Problem:
    """The problem whose λ is the pair of the original λ and the leaves `at` of the task."""

    def encode(lam: Tree, task: Task) -> Task:
        leaves, spec = trees.flatten(task)
        for index, leaf in zip(at, lam[1], strict=True):
            leaves[index] = leaf
        whole: Task = spec.unflatten(leaves)
        return whole if problem.encode is None else problem.encode(lam[0], whole)

    return replace(problem.reading(lambda lam: lam[0]), encode=encode)


def as_method(method: Any) -> Method | None:
    """The method, or None for "auto"."""
    if method is None:
        return Reverse()
    if isinstance(method, Method):
        return method
    if method == "auto":
        return None
    raise BilevelError(
        f"method={method!r} is not a method. Pass an instance such as Reverse(), Forward() or Implicit(CG()), or the "
        "word 'auto'."
    )


def _mean(results: list[Hypergradient]) -> Hypergradient:
    """Mean value and gradient over tasks (Eqs. 3 and 4 with 1/N). Times and counts are added, memory is the largest."""
    grad = trees.map(lambda *parts: torch.stack(parts).mean(0), *(result.grad for result in results))
    stats = [result.stats for result in results]
    residuals = [s.residual for s in stats if s.residual is not None]
    errors = [s.error for s in stats if s.error is not None]
    iterations = [s.iterations for s in stats if s.iterations is not None]
    total = replace(
        stats[0],
        steps=sum(s.steps for s in stats),
        replayed=sum(s.replayed for s in stats),
        products=sum(s.products for s in stats),
        seconds=sum(s.seconds for s in stats),
        peak_memory=max(s.peak_memory for s in stats),
        # The error of a mean is at most the mean of the errors.
        error=sum(errors) / len(errors) if len(errors) == len(stats) else None,
        residual=max(residuals) if residuals else None,
        iterations=sum(iterations) if iterations else None,
    )
    value = torch.stack([result.value for result in results]).mean()
    return Hypergradient(value, grad, [result.inner for result in results], total, tasks=results)
