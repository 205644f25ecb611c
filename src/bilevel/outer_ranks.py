"""One outer loop on several processes: rank 0 decides, and all processes evaluate."""

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


def led(world: World, minimise: Callable[[OuterProblem], Outcome], outer: OuterProblem) -> Outcome:
    """`minimise(outer)` by rank 0; the other ranks evaluate wherever rank 0 does.

    Copies of an algorithm on different machines may round differently, and would then ask about different λ. So λ is
    that of rank 0. What ends an evaluation, an error or `LoopEnded`, ends it on all ranks. An algorithm that takes
    inner steps of its own evaluates batches, not lists of tasks, so each rank runs it whole.
    """
    if world.size == 1 or outer.report is not None:
        return minimise(outer)
    return _leader(world, minimise, outer) if world.writes else _follower(world, outer)


def _leader(world: World, minimise: Callable[[OuterProblem], Outcome], outer: OuterProblem) -> Outcome:
    def told(name: str) -> Callable[[Tree], Hypergradient]:
        evaluate: Callable[[Tree], Hypergradient] = getattr(outer, name)

        def call(lam: Tree) -> Hypergradient:
            world.from_first((name, lam))
            try:
                return evaluate(lam)
            except (BilevelError, LoopEnded) as error:
                raise _Everywhere(error) from error

        return call

    try:
        outcome = minimise(replace(outer, hyperiteration=told("hyperiteration"), evaluate=told("evaluate")))
    except _Everywhere as ended:
        raise ended.error from None
    except BilevelError as error:
        world.from_first(("error", type(error), str(error)))
        raise
    world.from_first(("outcome", outcome))
    return outcome


def _follower(world: World, outer: OuterProblem) -> Outcome:
    while True:
        name, *said = world.from_first()
        if name == "outcome":
            return cast(Outcome, said[0])
        if name == "error":
            raise said[0](said[1])
        getattr(outer, name)(*said)


class _Everywhere(Exception):
    """What ended an evaluation on all ranks."""

    def __init__(self, error: Any) -> None:
        super().__init__()
        self.error = error
