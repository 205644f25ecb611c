"""`compile`: hypergradients of one problem as compiled code, which the caller keeps and calls."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import DynamicsLike
from bilevel.engine.checks import check_arguments, check_process
from bilevel.engine.kernels import ambient_state, form_of, key_orders
from bilevel.engine.method import Hypergradient, Method, Part
from bilevel.engine.process import Process
from bilevel.engine.user_functions import what_is
from bilevel.errors import BilevelError
from bilevel.hypergradients import Evaluator, Start, as_method, finished
from bilevel.methods.auto import choose
from bilevel.methods.reverse import Reverse
from bilevel.problem import Problem, Task
from bilevel.trees import Tree

# The relative difference of the compiled and the eager result may be this power of the machine precision.
AGREEMENT = 0.5


def compile(  # noqa: A001 - as in torch.compile
    problem: Problem,
    lam: Tree,
    task: Task,
    *,
    dynamics: DynamicsLike,
    steps: int,
    method: Method | str | None = None,
    allow_unused: bool = False,
    block: int = 25,
) -> CompiledHypergradient:
    """Compile the hypergradient of a problem, for calls with other λ and data of the same shapes.

    Compiling takes seconds to minutes and needs a C++ compiler. If the steps are small, a call then takes a fraction of
    the eager time. All checks of `hypergradient` are made here, and the compiled result must agree with the eager one.

    Python values that the functions read from elsewhere than their arguments (numbers in closures, globals, attributes)
    are fixed by compiling. After changing one, compile again; `fast.check(lam, task)` compares with the eager result.
    Tensors in closures are read at every call, but not other tensors that take their place (`module.buffer = other`).
    Random numbers and Python branches on numbers in tensors are refused.

    Args:
        problem: as for `hypergradient`.
        lam: an example of λ; only its structure and shapes matter.
        task: an example of the task.
        dynamics: Φ, as for `hypergradient`. Schedules must be arithmetic in t.
        steps: T.
        method: `Reverse()`, `Spectral()` or `"auto"`, which chooses one of the two.
        allow_unused: as for `hypergradient`.
        block: the number of steps that `Reverse` compiles together. It keeps the iterates between the blocks.

    Returns:
        `fast`: `fast(lam, task)` is the `Hypergradient`, and `fast.method` can be passed as `method=` to `solve`.

    >>> import torch, bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: (w - lam) ** 2, outer=lambda w, lam, x: w**2, init=lambda lam: torch.zeros_like(lam)
    ... )
    >>> call = {"dynamics": bl.GradientDescent(0.5), "steps": 1}
    >>> fast = bl.compile(problem, torch.tensor(1.0), bl.Task(None, None), **call)  # doctest: +SKIP
    >>> fast(torch.tensor(3.0), bl.Task(None, None)).grad  # doctest: +SKIP
    tensor(6.)
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise BilevelError(f"block={block!r} is not a number of steps to compile together; pass an int ≥ 1.")
    if isinstance(task, (list, tuple)):
        raise BilevelError("Compile for one task of the list, and call the result for each of them.")
    check_arguments(problem, lam, task, steps)
    evaluator = Evaluator(problem, dynamics, steps, allow_unused)
    process = evaluator.process(lam, task)
    chosen = as_method(method)
    if chosen is None:
        best, _ = choose(process)
        chosen = best if type(best).compile is not Method.compile else Reverse()
    check_process(process, chosen)
    form = _form(process)
    method_of_call = CompiledMethod(chosen, chosen.compile(process, block), form, problem, dynamics)
    fast = CompiledHypergradient(evaluator, method_of_call)
    fast.check(lam, task)
    return fast


@dataclass
class CompiledHypergradient:
    """The result of `compile`: call it with λ and a task.

    Attributes:
        method: the compiled code as a method, for `solve(…, method=fast.method)`.
    """

    evaluator: Evaluator = field(repr=False)
    method: CompiledMethod

    def __call__(self, lam: Tree, task: Task, start: Start = None) -> Hypergradient:
        """f_T(λ) and ∇f_T(λ) on this task."""
        began = time.perf_counter()
        check_arguments(self.evaluator.problem, lam, task, self.evaluator.steps)
        process = self.evaluator.process(lam, task, start)
        return finished(process, self.method(process), began)

    def check(self, lam: Tree, task: Task) -> None:
        """Compare with the eager method at this λ and task; raise a `BilevelError` if they disagree."""
        fast, slow = self(lam, task), self.evaluator.gradient(lam, task, self.method.eager)
        pairs = [(fast.value, slow.value), *zip(trees.leaves(fast.grad), trees.leaves(slow.grad), strict=True)]
        if all(_agree(one, two) for one, two in pairs):
            return
        raise BilevelError(
            "The compiled code gives another hypergradient than the functions that it was compiled from. A number that "
            "they read besides their arguments has changed since: call bilevel.compile(...) again. If this happens at "
            "the first call, they are not pure functions of (w, λ, t, batch), or the result is dominated by rounding "
            "error: call hypergradient(...) instead."
        )


@dataclass(frozen=True)
class CompiledMethod(Method):
    """The compiled form of a method, for the problem, the dynamics and the form of calls that it was compiled for."""

    eager: Method
    run: Callable[[Process], Hypergradient] = field(repr=False)
    form: Hashable = field(repr=False)
    problem: Problem = field(repr=False)
    dynamics: DynamicsLike = field(repr=False)

    def __call__(self, process: Process) -> Hypergradient:
        for name, compiled, given in (
            ("problem", self.problem, process.problem),
            ("dynamics", self.dynamics, process.source),
        ):
            if not _same(compiled, given):
                raise BilevelError(
                    f"This method was compiled for another {name}, whose hypergradient it would return. Pass the "
                    f"{name} that was passed to bilevel.compile(...), with the same functions as objects, or call "
                    f"bilevel.compile(...) for this {name} too."
                )
        if _form(process) != self.form:
            raise BilevelError(
                f"This was compiled for another call. λ is now {trees.describe(process.lam)} and the task "
                f"{trees.describe(process.task)}, with T = {process.steps}; the structure, shapes, dtypes, devices and "
                "numbers in the task must be those of the call that was compiled, and so must torch's default dtype "
                "and autocast. Call bilevel.compile(...) for this call too."
            )
        return self.run(process)

    def check(self, process: Process) -> None:
        self.eager.check(process)

    def check_key(self) -> Hashable:
        return self.eager.check_key()

    def sees(self, process: Process) -> frozenset[Part]:
        return self.eager.sees(process)

    def prepare(self, process: Process) -> Any:
        return self.eager.prepare(process)

    @classmethod
    def examples(cls) -> list[Any]:
        """No examples, because only `compile` makes instances."""
        return []


def _form(process: Process) -> Hashable:
    """The properties of a process, besides its functions, that compiled code relies on."""
    tensors = [form_of(x) for x in (*process.variables, *process.data())]
    both = process.lam, process.task
    structure = process.lam_spec, process.task_spec, key_orders(both), trees.settings(both)
    constants = tuple(map(_content, process.constants()))
    return structure, constants, ambient_state(), process.allow_unused, process.times, tuple(tensors)


def _content(leaf: Any) -> str:
    """A constant of the task in a form that can be compared."""
    # repr abbreviates long arrays and tables. pickle does not, but knows functions by their names only.
    if callable(leaf):
        return repr(leaf)
    try:
        return hashlib.sha256(pickle.dumps(leaf)).hexdigest()
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise BilevelError(
            f"The task holds {what_is(leaf)}, whose content cannot be compared between calls ({error}). Pass its "
            "numbers as tensors, or call bilevel.hypergradient, which compiles nothing."
        ) from error


def _same(one: Any, other: Any) -> bool:
    """Whether two problems or dynamics are one object, or hold equal settings and the same functions.

    >>> from bilevel.dynamics.gradient_descent import GradientDescent
    >>> _same(GradientDescent(0.1), GradientDescent(0.1)), _same(GradientDescent(0.1), GradientDescent(0.2))
    (True, False)
    """
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return form_of(one) == form_of(other) and torch.equal(one, other)
    if is_dataclass(one):
        return all(_same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _agree(one: Tensor, two: Tensor) -> bool:
    scale = float(two.abs().max()) if two.numel() else 0.0
    tolerance = torch.finfo(two.dtype).eps ** AGREEMENT
    return bool(torch.allclose(one, two, rtol=tolerance, atol=tolerance * scale))
