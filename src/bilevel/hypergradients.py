"""The two ways to ask for a gradient: `hypergradient` returns it, `objective` hides it behind `.backward()`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import DynamicsLike, as_function_of_lam
from bilevel.errors import BilevelError
from bilevel.methods.auto import run_best
from bilevel.methods.base import Hypergradient, Method, Stats
from bilevel.methods.checks import check_arguments, check_process, is_finite
from bilevel.methods.diagnosis import explain_divergence
from bilevel.methods.process import Process
from bilevel.methods.reverse import Reverse
from bilevel.methods.samplers import check_task
from bilevel.methods.twice import eagerly
from bilevel.methods.unrolled import Unrolled, record
from bilevel.problem import Problem, Task
from bilevel.recomputed import Known, NoOtherTensors, refuse_forward_mode, under_torch_func
from bilevel.trees import Spec, Tree

Start = Tree | Hypergradient | None


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
        method: how to differentiate; `Reverse()` by default. `"auto"` picks from the sizes and prints why.
        start: begin at this w instead of init(λ), or continue an earlier `Hypergradient` (velocities and step number
            included); with a list of tasks, a list of these.
        adjoint: where an implicit method's solver begins, an earlier result's `.adjoint`.
        allow_unused: give a leaf of λ that reaches neither objective the gradient 0 instead of raising.

    Raises:
        BilevelError: what was passed cannot work; nothing was computed and nothing changed.
        DivergenceError: a number stopped being finite; it names the step, the loss and the likely cause.

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
            "graph that these could follow. Write objective(...) there, which they differentiate and batch, or call "
            "hypergradient(...) outside, in a loop instead of vmap."
        )
    chosen = _as_method(method)
    if chosen is not None and start is None and isinstance(task, Task):
        recalled = chosen.recall(problem, lam, task, dynamics, steps, allow_unused)
        if recalled is not None:
            return recalled
    tasks = check_arguments(problem, lam, task, steps)
    starts = _one_each(start, tasks, task, "start")
    adjoints = _one_each(adjoint, tasks, task, "adjoint")
    results = [
        _of_one_task(
            Process(problem, lam, one, dynamics, steps, *_split(begin), adjoint=warm, allow_unused=allow_unused), chosen
        )
        for one, begin, warm in zip(tasks, starts, adjoints, strict=True)
    ]
    return results[0] if not isinstance(task, (list, tuple)) else _mean(results)


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
    may itself be the output of a network. The arguments are those of `hypergradient`. Where no leaf of λ requires grad,
    and under `torch.no_grad()`, only the value is computed.

    With an exact method it can be differentiated as often as one likes: `create_graph=True`, gradient penalties,
    `torch.autograd.functional.hessian`, `torch.func.grad`, `jacrev` and `vmap`, and `objective` inside the functions of
    another problem (three levels). A first derivative costs what `hypergradient` costs; a product with the Hessian runs
    the T steps once more, recorded as by `Unrolled`.

    Tensors of the task that require grad are differentiated like λ. What the functions read from a closure is not, and
    is refused where it requires grad: make it a leaf of λ.

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
    chosen = _as_method(method)
    transformed = under_torch_func()
    arguments: dict[str, Any] = {"dynamics": dynamics, "steps": steps, "allow_unused": allow_unused}
    if (torch.is_grad_enabled() or transformed) and any(leaf.requires_grad for leaf in trees.tensors(task)):
        return _of_live_data(problem, lam, task, method=chosen or "auto", **arguments)
    leaves, spec = trees.flatten(lam)
    if not transformed:
        refuse_forward_mode((lam, task))
        if not (torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in leaves)):
            if chosen is None or chosen.exact:
                return value_of(problem, lam, task, dynamics=dynamics, steps=steps)
            # Not every inexact method evaluates E after T steps: Implicit(newton=…) goes on from there.
            return hypergradient(problem, lam, task, method=chosen, **arguments).value
    # vmap may have batched the data, and hands out one of the batch where data are inputs.
    data = trees.tensors(task) if transformed else []
    watch = NoOtherTensors if transformed else contextlib.nullcontext
    call = _Call(problem, spec, task, chosen, arguments, len(data), watch)
    return Known.apply(call, len(data), *data, *leaves)[0]  # type: ignore[no-untyped-call]


def value_of(
    problem: Problem, lam: Tree, task: Task | Sequence[Task], *, dynamics: DynamicsLike, steps: int, start: Start = None
) -> Tensor:
    """f_T(λ) alone: the forward run without anything kept."""
    tasks = check_arguments(problem, lam, task, steps)
    starts = _one_each(start, tasks, task, "start")
    values = []
    for one, begin in zip(tasks, starts, strict=True):
        process = Process(problem, lam, one, dynamics, steps, *_split(begin), allow_unused=True)
        check_process(process, Unrolled(), value_only=True)
        with torch.no_grad():
            values.append(process.bound.outer(process.run()).detach())
        if not bool(torch.isfinite(values[-1])):
            explain_divergence(process)
    return torch.stack(values).mean()


@dataclass(frozen=True)
class _Call:
    """A call of `objective` as a function of tensors alone: the first `data` are those of the task, if any, and the
    others the leaves of λ."""

    problem: Problem
    spec: Spec
    task: Task | Sequence[Task]
    method: Method | None
    arguments: dict[str, Any]
    data: int
    watch: Callable[[], AbstractContextManager[Any]]

    def evaluate(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        """f_T and ∇f_T by the method."""
        lam, task = self._arguments(tensors)
        method = "auto" if self.method is None else self.method
        with self.watch(), torch.enable_grad():
            result = hypergradient(self.problem, lam, task, method=method, **self.arguments)
        return result.value, trees.leaves(result.grad)

    def record(self, *tensors: Tensor) -> Tensor:
        """f_T with all steps in one graph: its derivatives beyond the first are the same for every exact method."""
        if self.method is not None and not self.method.exact:
            raise BilevelError(
                f"objective(…, method={self.method!r}) was asked for a second derivative (by create_graph=True, for a "
                "Hessian, or within another problem), and has none: its gradient is an approximation, which is not the "
                "derivative of its value. Pass method=Reverse() or another exact method."
            )
        lam, task = self._arguments(tensors)
        tasks = [task] if isinstance(task, Task) else task
        run = self.arguments["dynamics"], self.arguments["steps"]
        with eagerly():
            runs = [Process(self.problem, lam, one, *run, live=True) for one in tasks]
            return torch.stack([record(process)[0] for process in runs]).mean()

    def _arguments(self, tensors: Sequence[Tensor]) -> tuple[Tree, Task | Sequence[Task]]:
        data, task = iter(tensors[: self.data]), self.task
        if self.data:
            task = trees.map(lambda leaf: next(data) if isinstance(leaf, Tensor) else leaf, task)
        return self.spec.unflatten(tensors[self.data :]), task


def _of_live_data(
    problem: Problem, lam: Tree, task: Task | Sequence[Task], *, dynamics: DynamicsLike, **arguments: Any
) -> Tensor:
    """`objective` for tasks with tensors that require grad: these become leaves of λ, which `encode` puts back."""
    values, build = [], as_function_of_lam(dynamics)
    for one in [task] if isinstance(task, Task) else task:
        check_task(one)
        leaves = trees.leaves(one)
        at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
        if not at:
            values.append(objective(problem, lam, one, dynamics=dynamics, **arguments))
            continue
        # Remembered, because a problem remembers what has been checked.
        known = problem.checked.setdefault(("live data", at), {})
        wider = known.setdefault("problem", _with_data(problem, at))
        both = (lam, [leaves[i] for i in at])
        values.append(objective(wider, both, trees.detach(one), dynamics=lambda lam: build(lam[0]), **arguments))
    return torch.stack(values).mean()


def _with_data(problem: Problem, at: tuple[int, ...]) -> Problem:
    """The problem whose λ is the pair of the other's λ and the leaves `at` of its task."""

    def encode(lam: Tree, task: Task) -> Task:
        leaves, spec = trees.flatten(task)
        for index, leaf in zip(at, lam[1], strict=True):
            leaves[index] = leaf
        whole: Task = spec.unflatten(leaves)
        return whole if problem.encode is None else problem.encode(lam[0], whole)

    return Problem(
        inner=lambda w, lam, batch: problem.inner(w, lam[0], batch),
        outer=lambda w, lam, batch: problem.outer(w, lam[0], batch),
        init=lambda lam: problem.init(lam[0]),
        encode=encode,
    )


def _of_one_task(process: Process, method: Method | None) -> Hypergradient:
    began = time.perf_counter()
    reason = None
    if method is None:
        result, reason = run_best(process)
        if process.problem.checked.get("auto", {}).get("reason") != reason:
            process.problem.checked["auto"] = {"reason": reason}
            print(reason)
    else:
        check_process(process, method)
        result = method(process)
    if not (is_finite(result.value) and all(map(is_finite, trees.leaves(result.grad)))):
        explain_divergence(process)
    stats = {**vars(result.stats), "seconds": time.perf_counter() - began, "reason": reason}
    return Hypergradient(**{**vars(result), "stats": Stats(**stats)})


def _as_method(method: Any) -> Method | None:
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


def _split(start: Start) -> tuple[Tree | None, Hypergradient | None]:
    return (None, start) if isinstance(start, Hypergradient) else (start, None)


def _one_each(value: Any, tasks: list[Task], given: Any, name: str) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        if isinstance(value, Hypergradient) and value.tasks:
            raise BilevelError(
                f"{name} is a result for a list of tasks, but one task was passed. Pass one of its `.tasks`."
            )
        return [value]
    if value is None:
        return [None] * len(tasks)
    if isinstance(value, Hypergradient):
        value = value.tasks
    if not isinstance(value, (list, tuple)) or len(value) != len(tasks):
        raise BilevelError(f"{name} must be a list with one entry for each of the {len(tasks)} tasks.")
    return list(value)


def _mean(results: list[Hypergradient]) -> Hypergradient:
    """Mean value and gradient over tasks (Eqs. 3 and 4 with 1/N); costs add up, memory does not."""
    grad = trees.map(lambda *parts: torch.stack(parts).mean(0), *(result.grad for result in results))
    stats = [result.stats for result in results]
    residuals = [s.residual for s in stats if s.residual is not None]
    total = replace(
        stats[0],
        steps=sum(s.steps for s in stats),
        replayed=sum(s.replayed for s in stats),
        products=sum(s.products for s in stats),
        seconds=sum(s.seconds for s in stats),
        peak_memory=max(s.peak_memory for s in stats),
        residual=max(residuals) if residuals else None,
    )
    value = torch.stack([result.value for result in results]).mean()
    return Hypergradient(value, grad, [result.inner for result in results], total, tasks=results)
