"""The design matrix of an additive model: the features of all terms, and the penalty of each feature."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from bilevel.estimators.additive.terms import RANK, REACH, CategoryTerm, Kind, NumericTerm, PairTerm
from bilevel.estimators.folds import Array

# At most this number of columns have a curve.
MAX_CURVES = 40
# A table with more numeric columns than this is wide.
WIDE = 60
# Curves and pairs are added while an evaluation of the criterion takes fewer floating-point operations than this. A
# log-loss needs several Newton steps.
MAX_OPERATIONS, NEWTON_STEPS = 1.2e8, 4


@dataclass(frozen=True)
class Piece:
    """One part of one term: the columns of the matrix with its features, and the index of its penalty."""

    term: int
    kind: Kind
    where: slice
    penalty: int


class Design:
    """The terms of a table's columns, and of pairs of them.

    Args:
        columns: numbers (float64) or categories (object), as `read_columns` gives them.
        weight: the weight of every row.
        relevance: a number per column. If not all columns can have a curve, those with the largest numbers do.
        max_features: the largest number of features, from `feature_limit`.
        max_slopes: with more numeric columns than this, all slopes share one penalty.
    """

    def __init__(
        self, columns: list[Array], weight: Array, relevance: Array, max_features: int, max_slopes: int
    ) -> None:
        numeric = [j for j, column in enumerate(columns) if column.dtype == np.float64]
        self.one_slope = len(numeric) > max_slopes
        # The number of slopes with a penalty of their own.
        self.own_slopes = 0 if self.one_slope else len(numeric)
        terms: dict[int, NumericTerm | CategoryTerm] = {
            j: CategoryTerm(column, weight) for j, column in enumerate(columns) if j not in numeric
        }
        # Slopes that share one penalty are reduced to at most as many features as rows (see `Reduction`).
        used = self.own_slopes or min(len(numeric), len(weight))
        used += sum(part.size for term in terms.values() for part in term.parts)
        curves = min(MAX_CURVES, max(0, max_features - used) // RANK)
        curved = set(sorted(numeric, key=lambda j: -relevance[j])[:curves])
        terms |= {j: NumericTerm(columns[j], weight, j in curved) for j in numeric}
        self.terms = [terms[j] for j in range(len(columns))]
        self.pairs: list[PairTerm] = []

    def blocks(self, columns: list[Array], reach: float = REACH) -> list[list[Array]]:
        """The features of every column, part by part. `NumericTerm.features` explains `reach`."""
        return [term.features(column, reach) for term, column in zip(self.terms, columns, strict=True)]

    def matrix(self, blocks: list[list[Array]]) -> Array:
        """The features of all terms and pairs, from the blocks of the columns."""
        parts = [part for block in blocks for part in block]
        parts += [part for pair in self.pairs for part in pair.features(blocks)]
        return np.hstack(parts) if parts else np.zeros((0, 0))

    def pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        at = penalties = 0
        slopes: int | None = None
        for index, term in enumerate([*self.terms, *self.pairs]):
            for part in term.parts:
                shared = self.one_slope and part.kind == "linear"
                penalty = slopes if shared and slopes is not None else penalties
                if shared:
                    slopes = penalty
                pieces.append(Piece(index, part.kind, slice(at, at + part.size), penalty))
                at, penalties = at + part.size, max(penalties, penalty + 1)
        return pieces


def relevance(columns: list[Array], outputs: Array, weight: Array) -> Array:
    """The largest squared correlation of a column, or of its square, with an output."""
    share = weight / weight.sum()
    y = outputs - share @ outputs
    y = y / np.sqrt(np.maximum(share @ y**2, 1e-300))
    found = np.zeros(len(columns))
    for j, column in enumerate(columns):
        if column.dtype == np.float64:
            x = np.where(np.isnan(column), np.nanmean(column) if not np.isnan(column).all() else 0.0, column)
            x = x - share @ x
            x = x / math.sqrt(max(float(share @ x**2), 1e-300))
            square = x**2 - 1
            square = square / math.sqrt(max(float(share @ square**2), 1e-300))
            found[j] = max(float((((share * v) @ y) ** 2).max()) for v in (x, square))
    return found


def feature_limit(rows: int, outputs: int, squares: bool) -> int:
    """The largest number of features for which an evaluation is fast enough.

    For p features, squared errors take rows · p · min(rows, p) operations. A log-loss needs the Hessian of the
    coefficients of all outputs.
    """
    if squares:
        return int(MAX_OPERATIONS / rows**2 if rows**3 < MAX_OPERATIONS else (MAX_OPERATIONS / rows) ** 0.5)
    sizes = np.arange(1, 2000)
    return int((NEWTON_STEPS * sizes**2 * (rows + sizes) < MAX_OPERATIONS).sum() / outputs)


def candidates(
    design: Design, importance: Array, count: int, excluded: set[int], max_features: int
) -> list[tuple[int, int]]:
    """Pairs of the `count` most important terms, with at most `max_features` features together.

    Important pairs come first. Only important terms are paired, because interactions without main effects are rare.
    """
    usable = [j for j, term in enumerate(design.terms) if term.parts and j not in excluded and importance[j] > 0]
    top = sorted(sorted(usable, key=lambda j: -importance[j])[:count])
    chosen = []
    for i, j in sorted(itertools.combinations(top, 2), key=lambda pair: -importance[pair[0]] * importance[pair[1]]):
        size = design.terms[i].leading * design.terms[j].leading
        if size <= max_features:
            chosen.append((i, j))
            max_features -= size
    return sorted(chosen)
