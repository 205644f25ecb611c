"""Where `solve` takes its data from: tasks, samplers of validation batches, and sources of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from bilevel.algorithms.base import Algorithm
from bilevel.algorithms.single_loop import SingleLoop
from bilevel.dynamics import DynamicsLike
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.samplers import check_draws, refuse_one_batch, same
from bilevel.errors import BilevelError
from bilevel.problem import Task

Tasks: TypeAlias = Task | Sequence[Task]
TaskSource: TypeAlias = Callable[[int], Tasks] | Iterator[Tasks]


def listed(tasks: Any) -> list[Task]:
    """The tasks of one task or of a list; none of a source."""
    given = tasks if isinstance(tasks, (list, tuple)) else [tasks]
    return [task for task in given if isinstance(task, Task)]


def with_outer_batch(tasks: Any, k: int) -> Any:
    """The tasks with the validation batches of hyperiteration k = 0, 1, … in place of their samplers."""
    if isinstance(tasks, (list, tuple)):
        return [with_outer_batch(task, k) for task in tasks]
    return replace(tasks, val=tasks.val(k + 1)) if isinstance(tasks, Task) and callable(tasks.val) else tasks


def check_inner_side(
    algorithm: Algorithm,
    dynamics: DynamicsLike | None,
    steps: int | None,
    method: Any,
    tol: float | None,
    patience: int | None,
    tasks: Any,
    iterations: int,
) -> tuple[DynamicsLike, int, Any]:
    """Check the arguments, and return the dynamics, T and the tasks in the form that the algorithm needs."""
    name = type(algorithm).__name__
    if not algorithm.moves_w:
        if dynamics is None or steps is None:
            raise BilevelError(
                f"{name} follows hypergradients through T inner steps: pass dynamics=… and steps=…, such as "
                "dynamics=GradientDescent(0.1), steps=100. Only algorithms that take inner steps of their own, such as "
                "SOBA(), need neither."
            )
        for task in listed(tasks):
            check_draws("val", task.val, last=iterations)
            refuse_one_batch(task.train, steps)
        _refuse_one_task(tasks, iterations)
        return dynamics, steps, tasks
    for setting, value in (("dynamics", dynamics), ("steps", steps), ("method", method)):
        if value is not None:
            raise BilevelError(
                f"{name} takes inner steps of its own, so {setting}={value!r} would not be used. Leave {setting} out; "
                f"the step sizes are {name}(inner_lr=…, outer_lr=…)."
            )
    task = _one_task(name, tasks)
    noisy = callable(task.train) or callable(task.val)
    reduced = isinstance(algorithm, SingleLoop) and algorithm.variance_reduced
    for setting, limit in (("tol", tol), ("patience", patience)):
        if limit is not None and noisy and not (reduced and setting == "tol"):
            raise BilevelError(
                f"{setting}={limit!r} compares numbers that {name} knows on one batch only, so the end would be "
                "random. Leave it out, decide in a callback on all the data, or pass tol with SABA or SRBA, whose "
                "noise vanishes."
            )
    # The process is only an example for the checks; its step is not used.
    return GradientDescent(1e-3), 1, task


def _refuse_one_task(tasks: Any, iterations: int) -> None:
    """Refuse a function of k that gives the same data for every k. A task with a sampler in it goes on by itself."""
    numbers = [k for k in (0, 1, 2, 4, 7, 12) if k < iterations]
    if not callable(tasks) or isinstance(tasks, Iterator) or len(numbers) < 3:
        return
    first = _data(tasks(0))
    if first is not None and all(same(first, _data(tasks(k))) for k in numbers[1:]):
        *most, last = map(str, numbers)
        raise BilevelError(
            f"tasks is a biased source: it gave the same data for k = {', '.join(most)} and {last}, so other data "
            "would never be seen. Use its argument, as the seed of what is drawn; or, if there is one task, pass "
            "the task itself."
        )


def _data(tasks: Any) -> list[Any] | None:
    """The batches of the tasks that were drawn; None where one of them has a sampler or is no task."""
    found = listed(tasks)
    fixed = found and not any(callable(side) for task in found for side in (task.train, task.val))
    return [(task.train, task.val) for task in found] if fixed else None


def _one_task(name: str, tasks: Any) -> Task:
    if isinstance(tasks, Task):
        return tasks
    if isinstance(tasks, (list, tuple)):
        if len(tasks) == 1 and isinstance(tasks[0], Task):
            return tasks[0]
        raise BilevelError(
            f"{name} updates one w, but a list of {len(tasks)} tasks was passed. Pass one task whose w holds the "
            "variables of all of them, or use Descent()."
        )
    if isinstance(tasks, Iterator):
        raise BilevelError(
            f"{name} draws batches by number, so that a run can be repeated and resumed, but tasks is an iterator. "
            "Pass a Task whose train and val are samplers, or a function of k that returns a task."
        )
    return Task(train=lambda t: tasks(t - 1).batch(t), val=lambda k: with_outer_batch(tasks(k - 1), k - 1).val)
