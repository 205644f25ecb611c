"""The base class of algorithms for the outer problem, and the problem as they see it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from bilevel.constraints import Constraint
from bilevel.engine.method import Hypergradient
from bilevel.engine.process import Process
from bilevel.errors import BilevelError, Outcome
from bilevel.problem import Task
from bilevel.trees import Tree


@dataclass(frozen=True)
class OuterProblem:
    """min over λ in Λ of f_T(λ), as an algorithm sees it.

    Attributes:
        lam: where to begin, a point of Λ; a copy that belongs to the algorithm.
        constraint: Λ, or None where λ is free.
        hyperiteration: f_T and ∇f_T at a λ, as hyperiteration k = 0, 1, … It is recorded and passed to callbacks. The
            algorithm must not change this λ afterwards. The call raises `LoopEnded` if the loop has to end here; the
            algorithm must not catch it.
        evaluate: f_T and ∇f_T at a λ on the tasks of the current hyperiteration, not recorded: for line searches.
        saved: the state to resume from, as the function given to `keep` returned it; None at the beginning of a run.
        keep: the algorithm passes a function that returns its state, before the first hyperiteration. The loop may
            call it during every hyperiteration, to save a checkpoint. The state is a tree of tensors and plain Python
            values. An algorithm that starts from it repeats that hyperiteration and then goes on with the same numbers.
        task: the data, for algorithms that move w themselves; `train` and `val` may be functions of the draw.
        process: the problem at a λ and a task of batches, for such algorithms.
        report: for such algorithms, replaces `hyperiteration`. It takes λ, a `Hypergradient` with E, w and the
            direction of λ, and the norm of all directions.
    """

    lam: Tree
    constraint: Constraint | None
    hyperiteration: Callable[[Tree], Hypergradient]
    evaluate: Callable[[Tree], Hypergradient]
    saved: Tree | None = None
    keep: Callable[[Callable[[], Tree]], None] = lambda state: None
    task: Task | None = None
    process: Callable[[Tree, Task], Process] | None = None
    report: Callable[[Tree, Hypergradient, float], None] | None = None


def check_settings(tol: float, first_step: float, **counts: int) -> None:
    """Refuse settings that are not a tolerance, the length of a step, and numbers of iterations or values."""
    for name, number in counts.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise BilevelError(f"{name}={number!r} is not a number of iterations or values; pass an int ≥ 1.")
    if not tol >= 0:
        raise BilevelError(f"tol={tol!r} is not a tolerance; pass a number ≥ 0.")
    if not 0 < first_step < math.inf:
        raise BilevelError(f"first_step={first_step!r} is not a length; pass a number > 0.")


@dataclass(frozen=True)
class Algorithm(ABC):
    """A way to minimise f_T over Λ: `solve(..., algorithm=...)`. A frozen dataclass of settings.

    Attributes:
        compares_values: it decides by comparing values of f_T at several λ. It needs the same task in every
            hyperiteration, and `solve` returns the best λ instead of the last.
        moves_w: it takes inner steps of its own, and uses `task`, `process` and `report` of the outer problem.
        resumes: it can go on from a state that was saved (`OuterProblem.keep` and `saved`).
    """

    compares_values: ClassVar[bool] = False
    moves_w: ClassVar[bool] = False
    resumes: ClassVar[bool] = False

    @abstractmethod
    def minimise(self, outer: OuterProblem) -> Outcome:
        """Call `outer.hyperiteration(λ)` with one λ of Λ after the other. Return an outcome when the algorithm is done;
        most algorithms go on until `LoopEnded` is raised."""

    @classmethod
    def examples(cls) -> list[Self]:
        """Instances for the tests; each minimises a convex quadratic over a box within 400 hyperiterations."""
        return [cls()]
