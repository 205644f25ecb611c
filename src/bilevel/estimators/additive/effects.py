"""The effects of a fitted additive model with their bands, and the share of every term in one prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from bilevel.errors import BilevelError
from bilevel.estimators.additive.base import BilevelAdditive, term_slices
from bilevel.estimators.additive.columns import position
from bilevel.estimators.additive.terms import CategoryTerm
from bilevel.estimators.folds import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Bands are computed with penalties smaller by this factor, because the tuned penalties are uncertain. On three
# functions of 100 rows, these bands contain the true curve at 93 to 96 % of its points. At the tuned penalties it is
# 89 to 94 %.
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
        check_is_fitted(self)
        output = self._output(output)
        index = position(term, "term", self.terms_, "term")
        terms = self._design.terms
        if index < len(terms):
            grid = self._grid(index, points)
            if not terms[index].parts:
                return Effect(self.terms_[index], grid, np.zeros(len(grid)), np.zeros(len(grid)))
            mean, deviation = self._effect_of_features(index, terms[index].features(grid), output)
            return Effect(self.terms_[index], grid, mean, deviation, self._missing(index, output))
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

        check_is_fitted(self)
        output = self._output(output)
        if terms is None:
            terms = sorted(self.terms_, key=lambda name: -self.importance_[name])[:12]
            terms = [name for name in terms if self.importance_[name] > 0]
        return draw(self, [position(term, "terms", self.terms_, "term") for term in terms], output, figure)

    def _output(self, output: int) -> int:
        """The index of the coefficients of a class. Two classes have one output, that of the second."""
        count, classes = len(self._coef), len(getattr(self, "classes_", ()))
        legal = [-1, 1] if classes == 2 else list(range(-count, count))
        if output not in legal:
            raise BilevelError(
                f"output={output!r} has no effects. "
                + (
                    "With two classes, effects are on the log-odds of the second; those of the first are their "
                    "negatives. Leave output= out."
                    if classes == 2
                    else f"Pass an index from 0 to {count - 1}."
                )
            )
        return -1 if classes == 2 else output

    def _grid(self, index: int, points: int) -> Array:
        term = self._design.terms[index]
        return term.levels.astype(object) if isinstance(term, CategoryTerm) else np.linspace(*term.range, points)

    def _effect_of_features(self, index: int, parts: list[Array], output: int) -> tuple[Array, Array]:
        """The effect of one term and its standard deviation, for rows of its features."""
        where = term_slices(self._pieces)[index]
        features = np.hstack(parts) - self._reduction.mean[where]
        reduced = features @ self._reduction.rows(where)
        variance = ((reduced @ self._inverses[output]) * reduced).sum(1)
        return features @ self._coef[output, where], self._deviation * np.sqrt(np.maximum(variance, 0))

    def _missing(self, index: int, output: int) -> tuple[float, float] | None:
        term = self._design.terms[index]
        if term.parts[-1].kind != "missing":
            return None
        mean, deviation = self._effect_of_features(index, term.features(np.array([np.nan])), output)
        return float(mean[0]), float(deviation[0])
