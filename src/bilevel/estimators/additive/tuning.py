"""Tunes all penalties of an additive model together, by hypergradients of a criterion."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from bilevel.algorithms.lbfgsb import LBFGSB
from bilevel.estimators.additive.criteria import Criterion, PenaltyGroups, TunedPenalties
from bilevel.estimators.additive.design import Piece

# The log penalties that are tried first.
GRID = (9.0, 7.0, 5.0, 3.0, 1.0, -1.0, -3.0)


def grouped(pieces: list[Piece]) -> tuple[PenaltyGroups, PenaltyGroups, list[str]]:
    """One penalty for each part of a term; one penalty for each kind of part; and the names of the kinds."""
    names: list[str] = list(dict.fromkeys(piece.kind for piece in pieces))
    kind_of = {piece.penalty: names.index(piece.kind) for piece in pieces}
    part = np.zeros(max(piece.where.stop for piece in pieces), dtype=int)
    for piece in pieces:
        part[piece.where] = piece.penalty
    kinds = np.array([kind_of[k] for k in range(len(kind_of))])
    return PenaltyGroups(part, kinds), PenaltyGroups(kinds[part], np.arange(len(names))), names


@dataclass
class KindLevels:
    """One penalty for each kind of part, tuned.

    Attributes:
        tuned: the result. Its λ has one entry for each of `names`.
        expected_loss: an estimate of the loss of a good model, which scales the term for the degrees of freedom.
    """

    tuned: TunedPenalties
    names: list[str]
    expected_loss: float


def tune_kinds(
    criterion: Criterion, pieces: list[Piece], algorithm: LBFGSB, smaller: KindLevels | None = None
) -> KindLevels:
    """One penalty for each kind of part.

    Args:
        smaller: the penalties of a model with fewer terms, to start from. None starts from the best point of a grid
            with the same penalty for all kinds.
    """
    _, by_kind, names = grouped(pieces)
    if smaller is None:
        # The term for the degrees of freedom is large here, so that the search does not start from a fit that
        # interpolates all rows. Such a fit can have a small leave-one-out loss by chance.
        problem = criterion.problem(by_kind, criterion.constant)
        best: TunedPenalties | None = None
        for level in (level for level in GRID if level >= criterion.box[0]):
            last = (None, None) if best is None else (best.inner, best.adjoint)
            here = criterion.evaluate(problem, torch.full((len(names),), level, dtype=torch.float64), *last)
            if best is not None and here.value > 1.02 * best.value:
                break
            best = here if best is None or here.value < best.value else best
        assert best is not None
        expected_loss = best.value
    else:
        expected_loss = smaller.tuned.value
        level_of = dict(zip(smaller.names, smaller.tuned.lam.tolist(), strict=True))
        first = [level_of.get(name, level_of.get("curve", level_of.get("linear", 0.0)) + 2.0) for name in names]
        lam = torch.tensor(first, dtype=torch.float64).clamp(*criterion.box)
        best = criterion.evaluate(criterion.problem(by_kind), lam)
    return KindLevels(criterion.minimise(by_kind, best, 0.0, expected_loss, algorithm), names, expected_loss)


def tune_each(
    criterion: Criterion, pieces: list[Piece], strength: float, algorithm: LBFGSB, levels: KindLevels
) -> TunedPenalties:
    """Tune one penalty per group, from the penalties of the kinds.

    Args:
        strength: the strength of the tether; inf keeps one penalty per kind.
    """
    by_part, _, names = grouped(pieces)
    start = levels.tuned
    expanded = TunedPenalties(start.lam[torch.from_numpy(by_part.kinds)], start.value, start.inner, start.outcome)
    if math.isinf(strength) or len(by_part.kinds) == len(names):
        expanded.tether = math.inf
        return expanded
    return criterion.minimise(by_part, expanded, strength, levels.expected_loss, algorithm)
