"""The matrix of an additive model: the features of all terms side by side, and which penalty belongs to which."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from bilevel.estimators.additive.terms import RANK, REACH, CategoryTerm, Kind, NumericTerm, PairTerm
from bilevel.estimators.folds import Array

# The most columns that get a curve beside their slope, and the most whose slopes have a penalty of their own.
CURVES, OWN_SLOPES = 40, 60
# Floating-point operations of one evaluation of the criterion up to which curves and pairs are added. A log-loss needs
# several Newton steps.
AFFORDABLE, NEWTON_STEPS = 1.2e8, 4


@dataclass(frozen=True)
class Piece:
    """One part of one term: where its features are in the matrix, and its penalty among all penalties."""

    term: int
    kind: Kind
    where: slice
    penalty: int


class Design:
    """The terms of a table's columns, and of pairs of them.

    Args:
        columns: numbers (float64) or categories (object), as `read_columns` gives them.
        weight: the weight of every row.
        relevance: which columns get a curve if there are many: those with the largest number.
        room: how many features there may be, as `affordable` says.
    """

    def __init__(self, columns: list[Array], weight: Array, relevance: Array, room: int) -> None:
        numeric = [j for j, column in enumerate(columns) if column.dtype == np.float64]
        self.one_slope = len(numeric) > OWN_SLOPES
        terms: dict[int, NumericTerm | CategoryTerm] = {
            j: CategoryTerm(column, weight) for j, column in enumerate(columns) if j not in numeric
        }
        # Slopes with one penalty need as many numbers as there are rows.
        taken = min(len(numeric), len(weight)) + sum(part.size for term in terms.values() for part in term.parts)
        curves = min(CURVES, max(0, room - taken) // RANK)
        curved = set(sorted(numeric, key=lambda j: -relevance[j])[:curves])
        terms |= {j: NumericTerm(columns[j], weight, j in curved) for j in numeric}
        self.terms = [terms[j] for j in range(len(columns))]
        self.pairs: list[PairTerm] = []

    def blocks(self, columns: list[Array], reach: float = REACH) -> list[list[Array]]:
        """The features of every single column's parts; `reach` as for `NumericTerm.features`."""
        return [term.features(column, reach) for term, column in zip(self.terms, columns, strict=True)]

    def matrix(self, blocks: list[list[Array]]) -> Array:
        """The features of all terms, from those of single columns."""
        parts = [part for block in blocks for part in block]
        parts += [part for pair in self.pairs for part in pair.features(blocks)]
        return np.hstack(parts) if parts else np.zeros((0, 0))

    def pieces(self) -> list[Piece]:
        found: list[Piece] = []
        at = penalties = 0
        slopes: int | None = None
        for index, term in enumerate([*self.terms, *self.pairs]):
            for part in term.parts:
                shared = self.one_slope and part.kind == "linear"
                penalty = slopes if shared and slopes is not None else penalties
                if shared:
                    slopes = penalty
                found.append(Piece(index, part.kind, slice(at, at + part.size), penalty))
                at, penalties = at + part.size, max(penalties, penalty + 1)
        return found

    def add_pairs(self, chosen: list[tuple[int, int]], blocks: list[list[Array]], weight: Array) -> None:
        self.pairs = [PairTerm(i, j, self.terms, blocks, weight) for i, j in chosen]


def affordable(rows: int, outputs: int, squares: bool) -> int:
    """How many features an evaluation can afford.

    Squares take rows · p · min(rows, p) operations for p features; log-losses a Hessian of all outputs' coefficients.
    """
    if squares:
        return int(AFFORDABLE / rows**2 if rows**3 < AFFORDABLE else (AFFORDABLE / rows) ** 0.5)
    sizes = np.arange(1, 2000)
    return int((NEWTON_STEPS * sizes**2 * (rows + sizes) < AFFORDABLE).sum() / outputs)


def candidates(design: Design, importance: Array, most: int, excluded: set[int], room: int) -> list[tuple[int, int]]:
    """The pairs of the `most` most important terms, the most important first, as long as their features have room.

    An interaction without a main effect is rare.
    """
    usable = [j for j, term in enumerate(design.terms) if term.parts and j not in excluded and importance[j] > 0]
    top = sorted(sorted(usable, key=lambda j: -importance[j])[:most])
    found = []
    for i, j in sorted(itertools.combinations(top, 2), key=lambda pair: -importance[pair[0]] * importance[pair[1]]):
        room -= (size := design.terms[i].leading * design.terms[j].leading)
        if room >= 0:
            found.append((i, j))
        else:
            room += size
    return sorted(found)
