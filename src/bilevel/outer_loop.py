"""`solve`: min over λ in Λ of f_T(λ), by any algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from bilevel import trees
from bilevel.algorithms.base import Algorithm, OuterProblem
from bilevel.algorithms.descent import Descent
from bilevel.constraints import Constraint, as_constraint
from bilevel.distributed import world
from bilevel.dynamics import DynamicsLike
from bilevel.engine.checks import check_lam, refuse_data_made_of_lam
from bilevel.engine.memory import memory_of
from bilevel.engine.method import Hypergradient, Method
from bilevel.errors import BilevelError, DivergenceError, Outcome
from bilevel.hypergradients import Evaluator, as_method
from bilevel.hyperiterations import Loop, LoopEnded, Part, budget, tolerance
from bilevel.outer_checkpoints import OuterCheckpoints, description, fingerprint, pack, run_facts, without_caches
from bilevel.outer_ranks import minimise_on_ranks
from bilevel.outer_record import Iteration, Record, Solution
from bilevel.outer_sources import Tasks, TaskSource, check_inner_side, listed, with_outer_batch
from bilevel.problem import Problem, Task
from bilevel.progress import bar
from bilevel.trees import Tree

__all__ = ["Iteration", "Solution", "TaskSource", "Tasks", "solve"]


def solve(
    problem: Problem,
    lam: Tree,
    tasks: Tasks | TaskSource,
    *,
    dynamics: DynamicsLike | None = None,
    steps: int | None = None,
    method: Method | str | Callable[[int], Method] | None = None,
    algorithm: Algorithm | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    constraint: Constraint | Any = None,
    iterations: int = 100,
    start: Literal["cold", "warm", "online"] | Tree = "cold",
    tol: float | None = None,
    patience: int | None = None,
    callbacks: Sequence[Callable[[Iteration], bool | None]] = (),
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 10,
    progress: bool | None = None,
    allow_unused: bool = False,
    raise_on_failure: bool = False,
) -> Solution:
    """Minimise f_T over Λ by following hypergradients.

    In a script that torchrun started, the processes share the tasks of a list. Each process returns what a single one
    would return, bit for bit.

    Args:
        problem: the inner and outer objectives and the start.
        lam: where to begin; it is copied, not changed.
        tasks: one task, a list (value and gradient are means over it), or a stochastic source: a function of the
            hyperiteration k = 0, 1, … or an iterator, returning a task or a list each time. `val` of a task may be a
            sampler of its own: hyperiteration k evaluates the outer objective on the batch `val(k + 1)`.
        dynamics: Φ, as for `hypergradient`; not for an algorithm that takes inner steps of its own.
        steps: T, the inner steps of every hyperiteration; likewise.
        method: how to differentiate, as for `hypergradient`, or a function of the hyperiteration k that returns it:
            `lambda k: Implicit(CG(tol=0.1 * 0.9**k), newton=0.1 * 0.9**k)` solves both linear system and inner problem
            more accurately as λ converges.
        algorithm: how λ is moved: `Descent(optimizer, scheduler)` by default, `LBFGSB()` for f_T without noise.
            `SOBA()` and other single-loop algorithms move w and λ together, on batches of both levels.
        optimizer: builds any torch optimiser from the leaves of λ; short for `algorithm=Descent(optimizer)`. Adam with
            lr=1e-2 by default.
        scheduler: builds a torch learning-rate scheduler from the optimiser; stepped once per hyperiteration.
        constraint: Λ; λ is projected onto it before the first and after every update.
        iterations: hyperiterations.
        start: "cold" begins every inner run at init(λ). "warm" begins at the previous w_T, and an implicit method's
            linear solver at its previous solution; a sampler of training batches goes on with new ones. "online" never
            restarts: the inner run goes on for `steps` more steps, velocities and step number included. With
            `Forward()` that is real-time hyperparameter optimisation (RTHO), with `Reverse()` or `Truncated(k)`
            truncated back-propagation. A w, or a list with one for each task, such as `inner` of an earlier `Solution`,
            is where a warm start begins.
        tol: stop when the norm of the (projected) gradient falls to this.
        patience: stop when the value has not improved for this many hyperiterations, and return the best λ.
        callbacks: called with an `Iteration` before every update; one that returns True stops the loop.
        checkpoint: a folder for checkpoints. A call that finds one there goes on from it, so after a crash, run the
            same script again. That of another problem, λ, dynamics or method is refused. A task source must be a
            function of k, or an iterator that begins anew.
        checkpoint_every: hyperiterations between two checkpoints.
        progress: show a progress bar; None shows one on a terminal, and a line a minute elsewhere.
        allow_unused: as for `hypergradient`.
        raise_on_failure: raise the `DivergenceError` instead of returning it as the outcome.

    Interrupting with Ctrl-C returns the solution reached so far.

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
    chosen = _algorithm(algorithm, optimizer, scheduler)
    start, w = (start, None) if isinstance(start, str) else ("warm", start)
    _check(lam, iterations, start, patience, tasks, method, chosen)
    if isinstance(tasks, (Task, list, tuple)):
        refuse_data_made_of_lam(lam, tasks)
    dynamics, steps, tasks = check_inner_side(chosen, dynamics, steps, method, tol, patience, tasks, iterations)
    constraint = as_constraint(constraint)
    begin = trees.clone(lam if constraint is None else constraint.project(trees.detach(lam)))
    record = Record()
    parts: list[Part] = [record.keep, budget(iterations), record.add]
    parts += [tolerance(tol)] if tol is not None else []
    parts += [record.patience(patience)] if patience is not None else []
    loop = Loop(parts)
    evaluator = Evaluator(problem, dynamics, steps, allow_unused, memory_of(problem))
    run = _OuterRun(loop, evaluator, tasks, _by_k(method), constraint, iterations, start, w, chosen.compares_values)
    loop.parts += [run.callback_part([callbacks] if callable(callbacks) else callbacks)] if callbacks else []
    outer = OuterProblem(begin, constraint, run.hyperiteration, run.evaluate)
    if chosen.moves_w:
        process = partial(evaluator.process, start=w)
        outer = replace(outer, task=cast(Task, tasks), process=process, report=run.report)

    try:
        with world() as evaluator.world:
            outer, begun = run.resumed(outer, record, chosen, checkpoint, checkpoint_every), run.done
            show = progress if evaluator.world.writes else False
            with bar("hyperiterations", iterations, "f_T(λ) {task.fields[value]}", run.done, show) as record.advance:
                outcome = loop.run(lambda: minimise_on_ranks(evaluator.world, chosen.minimise, outer))
    except KeyboardInterrupt:
        outcome = Outcome(
            "interrupted",
            f"Interrupted after {len(record.values)} of {iterations} hyperiterations; this is the solution so far.",
        )
    except DivergenceError as error:
        if raise_on_failure:
            raise
        outcome = Outcome(
            "diverged", f"Diverged at hyperiteration {len(record.values)}: {error} λ is left at its last finite value."
        )
    except BilevelError as error:
        # Input that cannot work fails at once. A later failure keeps what was reached until then.
        if raise_on_failure or not record.values or run.done == begun:
            raise
        outcome = Outcome("failed", f"Failed at hyperiteration {len(record.values)}: {error}")
    return record.solution(begin, outcome, best=patience is not None or chosen.compares_values)


def _algorithm(algorithm: Any, optimizer: Any, scheduler: Any) -> Algorithm:
    if algorithm is None:
        return Descent(optimizer, scheduler)
    if not isinstance(algorithm, Algorithm):
        raise BilevelError(
            f"algorithm={algorithm!r} is not an algorithm. Pass an instance, such as Descent() or LBFGSB()."
        )
    if optimizer is not None or scheduler is not None:
        raise BilevelError(
            "optimizer and scheduler are settings of Descent, and algorithm was passed too. Write "
            "algorithm=Descent(optimizer, scheduler), or pass only one of them."
        )
    return algorithm


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
    """The properties that two methods must share for the adjoint of one to be a start for the other's."""
    return type(method), getattr(method, "condition", None)


@dataclass
class _OuterRun:
    """f_T and ∇f_T at one λ after the other, with the state that a warm or online start keeps between them."""

    loop: Loop
    evaluator: Evaluator
    tasks: Any
    methods: Callable[[int], Any]
    constraint: Constraint | None
    iterations: int
    start: str
    w: Tree | None
    compares_values: bool = False
    done: int = 0
    drawn: Any = None
    method: Any = None
    previous: Hypergradient | None = None
    previous_kind: Any = None
    save: Callable[[int], None] = lambda k: None

    def resumed(
        self, outer: OuterProblem, record: Record, algorithm: Algorithm, folder: str | Path | None, every: int
    ) -> OuterProblem:
        """The outer problem at the checkpoint in the folder, if there is one; checkpoints will be written there."""
        processes = self.evaluator.world
        if processes.size == 1 and folder is None:
            return outer
        problem = run_facts(self.evaluator, outer.lam, self.methods(0))
        if not isinstance(self.tasks, Iterator):
            problem["tasks"] = fingerprint(self._draw(0))
        processes.same(problem, "The processes called solve(…) with different λ, tasks, steps, dynamics or methods.")
        if folder is None:
            return outer
        if not algorithm.resumes:
            raise BilevelError(
                f"checkpoint={str(folder)!r} was passed, but {type(algorithm).__name__} cannot resume from a saved "
                "state. Leave checkpoint= out, or use another algorithm, such as Descent()."
            )
        kind = {"algorithm": description(algorithm), "start": self.start, "constraint": description(self.constraint)}
        checkpoints = OuterCheckpoints(Path(folder), every, processes, {**problem, **kind})
        leaves, spec = trees.flatten(outer.lam)
        states: list[Callable[[], Tree]] = []

        def save(k: int) -> None:
            if k == 1:  # what cannot be saved is refused now, and not after `every` hyperiterations
                pack(record.state())
            if k and (k % every == 0 or k == self.iterations):
                if self.previous is not None:
                    # This run goes on with what is saved, so that a resumed one has the same bits.
                    self.previous = without_caches(self.previous)
                previous = None if self.start == "cold" else self.previous
                if processes.writes:
                    state = {"algorithm": states[0](), "record": record.state(), "previous": previous}
                    checkpoints.save(k, {**state, "one_step_more": self._value_after(1, record.last)})

        self.save, found, saved = save, checkpoints.load(outer.lam), None
        if found is not None:
            self.done, state = found
            saved, self.previous = state["algorithm"], state["previous"]
            self.method, self.drawn = self.methods(self.done - 1), self._draw_again(self.done)
            self.previous_kind = _kind(self.method)
            earlier = Record()
            earlier.load(state["record"], spec)
            eps = torch.finfo(leaves[0].dtype if earlier.last is None else earlier.last.hypergradient.value.dtype).eps
            if earlier.last is not None and not algorithm.moves_w:
                value = float(earlier.last.hypergradient.value)
                checkpoints.check_value(value, self._value_again(earlier.last), earlier.values[0], eps)
            # If w is carried on, E at w_T does not say whether L has changed; E after one more step does.
            after = state.get("one_step_more")
            if after is not None and after == after:
                checkpoints.check_value(after, self._value_after(1, earlier.last), earlier.values[0], eps)
            record.load(state["record"], spec)
        return replace(outer, saved=saved, keep=states.append)

    def _value_again(self, last: Iteration) -> float | None:
        """f_T at the λ of hyperiteration `done` − 1, or None where it cannot be computed again."""
        if self.start == "cold" and not isinstance(self.tasks, Iterator):
            try:
                return float(self.evaluator.gradient(last.lam, self.drawn, self.method).value)
            except DivergenceError:
                return float("nan")
        # The w at which the steps began is not kept. The outer objective at the w where they ended is f_T too.
        method = as_method(self.method)
        return None if method is None or not method.exact else self._value_after(0, last, self.drawn)

    def _value_after(self, steps: int, last: Iteration | None, tasks: Any = None) -> float | None:
        """E after so many steps from the w_T of hyperiteration `done` − 1; None where it cannot be computed."""
        if last is None or isinstance(self.tasks, Iterator):  # an iterator may be random
            return None
        try:
            tasks = self._draw(0) if tasks is None else tasks
            return float(replace(self.evaluator, steps=steps).value(last.lam, tasks, last.hypergradient.inner))
        except DivergenceError:
            return float("nan")
        except BilevelError:  # batches that processes share
            return None

    def callback_part(self, callbacks: Sequence[Callable[[Iteration], bool | None]]) -> Part:
        def part(k: int, here: Iteration) -> Outcome | None:
            # All callbacks are called, also after one that stops the loop. Each may keep its copy of λ.
            results = [
                callback(Iteration(k, trees.clone(here.lam), here.hypergradient, here.gradient_norm))
                for callback in callbacks
            ]
            # If a callback stops one process, all stop: a callback may depend on the clock.
            if not self.evaluator.world.any(any(answer is True for answer in results)):
                return None
            return Outcome("stopped early", f"Stopped early by a callback at hyperiteration {k}.")

        return part

    def hyperiteration(self, lam: Tree) -> Hypergradient:
        """Evaluate λ as the next hyperiteration, and report the result to the parts of the loop.

        λ after the last update is evaluated too, on the tasks drawn last. In an online run that would take more inner
        steps, so the loop ends before it.
        """
        k, self.done = self.done, self.done + 1
        self.save(k)
        if k < max(1, self.iterations):
            self.drawn, self.method = self._draw(k), self.methods(k)
        elif self.start == "online":
            raise LoopEnded(Outcome("finished", f"Ran all {k} hyperiterations."))
        result = self.evaluate(lam)
        self.loop.report(k, Iteration(k, lam, result, self._stationarity(lam, result.grad)))
        return result

    def report(self, lam: Tree, result: Hypergradient, norm: float) -> None:
        """Report an iteration of an algorithm that takes inner steps of its own to the parts of the loop."""
        k, self.done = self.done, self.done + 1
        self.save(k)
        self.loop.report(k, Iteration(k, lam, result, norm))

    def evaluate(self, lam: Tree) -> Hypergradient:
        """f_T and ∇f_T at λ, with the tasks and the method of this hyperiteration."""
        extra: dict[str, Any] = {"drawn": self.drawn_before()}
        kind = _kind(self.method)
        if self.previous is None:
            extra["start"] = self.w
        elif self.start == "online":
            extra["start"] = self.previous
        elif self.start == "warm":
            extra["start"] = self.previous.inner
            if kind == self.previous_kind:
                many = isinstance(self.drawn, (list, tuple))
                extra["adjoint"] = [one.adjoint for one in self.previous.tasks] if many else self.previous.adjoint
        result = self.evaluator.gradient(lam, self.drawn, self.method, **extra)
        self.previous, self.previous_kind = result, kind
        return result

    def drawn_before(self) -> int:
        """The number of training batches that earlier hyperiterations used: a warm start continues with new ones."""
        goes_on = self.start == "warm" and not self.compares_values
        return (self.done - 1) * self.evaluator.steps if goes_on else 0

    def _draw(self, k: int) -> Tasks:
        if isinstance(self.tasks, (Task, list, tuple)):
            return with_outer_batch(self.tasks, k)
        if not isinstance(self.tasks, Iterator):
            return with_outer_batch(self.tasks(k), k)
        for tasks in self.tasks:
            return with_outer_batch(tasks, k)
        raise LoopEnded(Outcome("finished", f"The task source ended after {k} of {self.iterations} hyperiterations."))

    def _draw_again(self, k: int) -> Tasks:
        """The tasks of hyperiteration k − 1, with an iterator moved on to those of k."""
        if not isinstance(self.tasks, Iterator):
            return self._draw(k - 1)
        return [self._draw(i) for i in range(k)][-1]

    def _stationarity(self, lam: Tree, grad: Tree) -> float:
        """‖∇f‖, or ‖λ − P(λ − ∇f)‖ where there is a constraint: zero exactly at stationary points."""
        if self.constraint is not None:
            grad = trees.subtract(lam, self.constraint.project(trees.subtract(lam, grad)))
        return float(torch.linalg.vector_norm(grad) if isinstance(grad, Tensor) else trees.norm(grad))


def _check(
    lam: Tree, iterations: int, start: str, patience: int | None, tasks: Any, method: Any, algorithm: Algorithm
) -> None:
    check_lam(lam)
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
        raise BilevelError(f"iterations={iterations!r} is not a number of hyperiterations; pass an int ≥ 0.")
    if start not in ("cold", "warm", "online"):
        raise BilevelError(f"start={start!r} is not known; pass 'cold', 'warm', 'online', or a w to begin with.")
    if patience is not None and patience < 1:
        raise BilevelError(f"patience={patience} would stop at once; pass a number ≥ 1 or None.")
    if start == "online" and method == "auto":
        raise BilevelError(
            "start='online' needs a method that can continue a run: pass Forward(), Reverse() or Truncated(k)."
        )
    source = not isinstance(tasks, (Task, list, tuple))
    if source and not (callable(tasks) or isinstance(tasks, Iterator)):
        raise BilevelError(
            f"tasks is {type(tasks).__name__}; pass a Task, a list of them, a function of the hyperiteration, or an "
            "iterator."
        )
    noisy = source or any(callable(task.val) for task in listed(tasks))
    if algorithm.compares_values and (noisy or start == "online"):
        raise BilevelError(
            f"{type(algorithm).__name__} compares values of f_T at several λ, which is only meaningful where every "
            "hyperiteration evaluates the same function: pass a Task or a list of them, with a batch as val, and "
            "start='cold' or 'warm'."
        )
