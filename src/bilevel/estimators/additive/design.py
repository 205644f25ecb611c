"""The matrix of an additive model: the features of all terms side by side, and which penalty belongs to which."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from bilevel.estimators.additive.terms import CategoryTerm, Kind, NumericTerm, PairTerm
from bilevel.estimators.folds import Array

# The most columns that get a curve beside their slope, and the most whose slopes have a penalty of their own.
CURVES, OWN_SLOPES = 40, 60


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
    """

    def __init__(self, columns: list[Array], weight: Array, relevance: Array) -> None:
        numeric = [j for j, column in enumerate(columns) if column.dtype == np.float64]
        curved = set(sorted(numeric, key=lambda j: -relevance[j])[:CURVES])
        self.terms: list[NumericTerm | CategoryTerm] = [
            NumericTerm(column, weight, j in curved) if column.dtype == np.float64 else CategoryTerm(column, weight)
            for j, column in enumerate(columns)
        ]
        self.pairs: list[PairTerm] = []
        self.one_slope = len(numeric) > OWN_SLOPES

    def blocks(self, columns: list[Array]) -> list[list[Array]]:
        """The features of every single column's parts."""
        return [term.features(column) for term, column in zip(self.terms, columns, strict=True)]

    def matrix(self, columns: list[Array], blocks: list[list[Array]] | None = None) -> Array:
        blocks = self.blocks(columns) if blocks is None else blocks
        parts = [part for block in blocks for part in block]
        parts += [part for pair in self.pairs for part in pair.features(blocks)]
        return np.hstack(parts) if parts else np.zeros((len(columns[0]), 0))

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


def candidates(design: Design, importance: Array, most: int, excluded: set[int]) -> list[tuple[int, int]]:
    """All pairs of the `most` most important terms: an interaction without a main effect is rare."""
    usable = [j for j, term in enumerate(design.terms) if term.parts and j not in excluded and importance[j] > 0]
    top = sorted(sorted(usable, key=lambda j: -importance[j])[:most])
    return list(itertools.combinations(top, 2))
