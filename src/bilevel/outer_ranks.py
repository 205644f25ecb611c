"""One outer loop on several processes: rank 0 runs the algorithm, and all processes evaluate f_T."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from bilevel.algorithms.base import OuterProblem
from bilevel.distributed import World
from bilevel.engine.method import Hypergradient
from bilevel.errors import BilevelError, Outcome
from bilevel.hyperiterations import LoopEnded
from bilevel.trees import Tree


def minimise_on_ranks(world: World, minimise: Callable[[OuterProblem], Outcome], outer: OuterProblem) -> Outcome:
    """Run `minimise(outer)` on rank 0; the other ranks evaluate f_T at the λ that rank 0 sends. Returns the outcome.

    Copies of an algorithm on different machines may round differently, and would then evaluate different λ. An error or
    a `LoopEnded` in an evaluation ends it on all ranks. An algorithm that takes inner steps of its own evaluates
    batches, not lists of tasks, so each rank runs it whole.
    """
    if world.size == 1 or outer.report is not None:
        return minimise(outer)
    return _leader(world, minimise, outer) if world.writes else _follower(world, outer)


def _leader(world: World, minimise: Callable[[OuterProblem], Outcome], outer: OuterProblem) -> Outcome:
    def broadcasting(name: str) -> Callable[[Tree], Hypergradient]:
        evaluate: Callable[[Tree], Hypergradient] = getattr(outer, name)

        def call(lam: Tree) -> Hypergradient:
            world.from_first((name, lam))
            try:
                return evaluate(lam)
            except (BilevelError, LoopEnded) as error:
                raise _EndedOnAllRanks(error) from error

        return call

    try:
        outcome = minimise(
            replace(outer, hyperiteration=broadcasting("hyperiteration"), evaluate=broadcasting("evaluate"))
        )
    except _EndedOnAllRanks as ended:
        raise ended.error from None
    except BilevelError as error:
        world.from_first(("error", type(error), str(error)))
        raise
    world.from_first(("outcome", outcome))
    return outcome


def _follower(world: World, outer: OuterProblem) -> Outcome:
    while True:
        name, *message = world.from_first()
        if name == "outcome":
            return cast(Outcome, message[0])
        if name == "error":
            raise message[0](message[1])
        getattr(outer, name)(*message)


class _EndedOnAllRanks(Exception):
    """The exception that ended an evaluation on all ranks."""

    def __init__(self, error: Any) -> None:
        super().__init__()
        self.error = error
