"""The effects of a fitted additive model with their bands, and the share of every term in one prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevel.errors import BilevelError
from bilevel.estimators.additive.base import BilevelAdditive, term_slices
from bilevel.estimators.additive.terms import CategoryTerm, PairTerm
from bilevel.estimators.folds import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Bands are computed with penalties smaller by this factor, because the tuned penalties are uncertain. On three
# functions of 100 rows, these bands contain the true curve at 93 % to 96 % of its points; at the tuned penalties, at 89
# % to 94 %.
BAND_FACTOR = math.e


@dataclass(frozen=True)
class Effect:
    """The effect of one term on its grid.

    Attributes:
        term: the name of the term.
        grid: values of a column of numbers, or its categories; for a pair, the grids of both columns.
        mean: the effect, of shape points (× points for a pair), for one output.
        deviation: its standard deviation, of the same shape.
        missing: the effect of a missing value, and its deviation; None if no training row lacks a value.
    """

    term: str
    grid: Any
    mean: Array
    deviation: Array
    missing: tuple[float, float] | None = None

    def band(self, width: float = 1.96) -> tuple[Array, Array]:
        """Lower and upper ends. A width of 1.96 deviations contains the curve at about 95 % of its points."""
        return self.mean - width * self.deviation, self.mean + width * self.deviation


class AdditiveEffects(BilevelAdditive):
    """The methods of a fitted additive model that show its terms."""

    def effect(self, term: Any, points: int = 100, output: int = -1) -> Effect:
        """The effect of a term, a name of `terms_` or a position in it, over the range of its training values.

        Args:
            points: the number of grid points.
            output: the index of a class in `classes_`. With two classes, effects are on the log-odds of the second.
        """
        self._check_fitted()
        index = self._term(term)
        terms = self._design.terms
        if index < len(terms):
            grid = self._grid(index, points)
            blocks = [terms[index].features(grid)]
            mean, deviation = self._effect_of_features(index, blocks[0], output)
            missing = self._missing(index, output)
            return Effect(self.terms_[index], grid, mean, deviation, missing)
        pair = self._design.pairs[index - len(terms)]
        grids = [self._grid(k, min(points, 40)) for k in (pair.first, pair.second)]
        one, two = (part.reshape(-1) for part in np.meshgrid(*(np.arange(len(grid)) for grid in grids), indexing="ij"))
        all_blocks: list[list[Array]] = [[] for _ in terms]
        all_blocks[pair.first] = terms[pair.first].features(grids[0][one])
        all_blocks[pair.second] = terms[pair.second].features(grids[1][two])
        mean, deviation = self._effect_of_features(index, pair.features(all_blocks), output)
        shape = tuple(len(grid) for grid in grids)
        return Effect(self.terms_[index], tuple(grids), mean.reshape(shape), deviation.reshape(shape))

    def explain(self, row: Any) -> dict[str, Any]:
        """The share of every term in the prediction of one row: the intercept first, then the largest share.

        The shares add up to the prediction, or to `decision_function` for a classifier; with several classes each is
        an array.
        """
        if hasattr(row, "to_frame") and not hasattr(row, "columns"):
            row = row.to_frame().T.infer_objects()
        elif isinstance(row, np.ndarray) and row.ndim == 1:
            row = row[None]
        shares = self._contributions(row)
        if len(shares) != 1:
            raise BilevelError(f"explain takes one row, but it was given {len(shares)}. Pass X.iloc[[i]] or X[i].")
        several = shares.shape[2] > 1
        order = np.argsort(-np.abs(shares[0]).max(1), kind="stable")
        start = np.atleast_1d(self.intercept_)
        parts: dict[str, Any] = {"(intercept)": start if several else float(start[0])}
        for index in order:
            share = shares[0, index]
            parts[self.terms_[index]] = share if several else float(share[0])
        return parts

    def plot(self, terms: Any = None, output: int = -1, figure: Figure | None = None) -> Figure:
        """A figure of the most important effects: curves with bands and training values, categories, surfaces of pairs.

        Args:
            terms: names or positions. The default is the twelve terms with the largest importance.
            output: the class, as for `effect`.
            figure: the figure to draw into, for example `matplotlib.pyplot.figure()`. The default is a new one.
        """
        from bilevel.estimators.additive.pictures import draw

        self._check_fitted()
        if terms is None:
            terms = sorted(self.terms_, key=lambda name: -self.importance_[name])[:12]
            terms = [name for name in terms if self.importance_[name] > 0]
        return draw(self, [self._term(term) for term in terms], output, figure)

    def _term(self, key: Any) -> int:
        if isinstance(key, (int, np.integer)) and 0 <= key < len(self.terms_):
            return int(key)
        if key in self.terms_:
            return self.terms_.index(key)
        raise BilevelError(f"{key!r} is not a term. The terms are {', '.join(self.terms_[:20])}.")

    def _grid(self, index: int, points: int) -> Array:
        term = self._design.terms[index]
        return term.levels.astype(object) if isinstance(term, CategoryTerm) else np.linspace(*term.range, points)

    def _effect_of_features(self, index: int, parts: list[Array], output: int) -> tuple[Array, Array]:
        """The effect of one term and its standard deviation, for rows of its features."""
        where = term_slices(self._pieces).get(index)
        if where is None:
            zero = np.zeros(len(self._grid(index, 100)))
            return zero, zero
        features = np.hstack(parts) - self._reduction.mean[where]
        reduced = features @ self._reduction.rows(where)
        variance = ((reduced @ self._inverses[output]) * reduced).sum(1)
        return features @ self._coef[output, where], self._deviation * np.sqrt(np.maximum(variance, 0))

    def _missing(self, index: int, output: int) -> tuple[float, float] | None:
        term = self._design.terms[index]
        if not term.parts or term.parts[-1].kind != "missing":
            return None
        mean, deviation = self._effect_of_features(index, term.features(np.array([np.nan])), output)
        return float(mean[0]), float(deviation[0])


def as_pair(model: AdditiveEffects, index: int) -> PairTerm | None:
    """The term as a pair, or None if it has one column."""
    count = len(model._design.terms)
    return model._design.pairs[index - count] if index >= count else None
