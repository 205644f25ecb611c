"""What a fitted additive model can show: each effect with its band, and the share of every term in one prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevel.errors import BilevelError
from bilevel.estimators.additive.base import BilevelAdditive, places
from bilevel.estimators.additive.terms import CategoryTerm, PairTerm
from bilevel.estimators.folds import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Bands are those of penalties smaller by this factor: the penalties themselves are uncertain. On three functions
# of 100 rows they hold the true curve at 93 % to 96 % of its points; at the tuned penalties, at 89 % to 94 %.
DOUBT = math.e


@dataclass(frozen=True)
class Effect:
    """The effect of one term on its grid.

    Attributes:
        term: its name.
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
        """Lower and upper ends: 1.96 deviations hold the curve at about 95 % of its points."""
        return self.mean - width * self.deviation, self.mean + width * self.deviation


class AdditiveEffects(BilevelAdditive):
    """The methods of a fitted additive model that show its terms."""

    def effect(self, term: Any, points: int = 100, output: int = -1) -> Effect:
        """The effect of a term, a name of `terms_` or a position in it, over the range of its training values.

        Args:
            points: of the grid.
            output: which class, in the order of `classes_`. Of two classes, effects are on the log-odds of the second.
        """
        self._check_fitted()
        index = self._term(term)
        terms = self._design.terms
        if index < len(terms):
            grid = self._grid(index, points)
            blocks = [terms[index].features(grid)]
            mean, deviation = self._of_features(index, blocks[0], output)
            missing = self._missing(index, output)
            return Effect(self.terms_[index], grid, mean, deviation, missing)
        pair = self._design.pairs[index - len(terms)]
        grids = [self._grid(k, min(points, 40)) for k in (pair.first, pair.second)]
        one, two = (part.reshape(-1) for part in np.meshgrid(*(np.arange(len(grid)) for grid in grids), indexing="ij"))
        all_blocks: list[list[Array]] = [[] for _ in terms]
        all_blocks[pair.first] = terms[pair.first].features(grids[0][one])
        all_blocks[pair.second] = terms[pair.second].features(grids[1][two])
        mean, deviation = self._of_features(index, pair.features(all_blocks), output)
        shape = tuple(len(grid) for grid in grids)
        return Effect(self.terms_[index], tuple(grids), mean.reshape(shape), deviation.reshape(shape))

    def explain(self, row: Any) -> dict[str, Any]:
        """The share of every term in the prediction of one row, largest first, after the intercept.

        The shares add up to the prediction, or to `decision_function` for a classifier; with several classes each is
        an array.
        """
        if hasattr(row, "to_frame") and not hasattr(row, "columns"):
            row = row.to_frame().T.infer_objects()
        elif isinstance(row, np.ndarray) and row.ndim == 1:
            row = row[None]
        shares = self._contributions(row)
        if len(shares) != 1:
            raise BilevelError(f"explain takes one row, but X has {len(shares)}; pass X.iloc[[i]] or X[i].")
        several = shares.shape[2] > 1
        order = np.argsort(-np.abs(shares[0]).max(1), kind="stable")
        start = np.atleast_1d(self.intercept_)
        found: dict[str, Any] = {"(intercept)": start if several else float(start[0])}
        for index in order:
            share = shares[0, index]
            found[self.terms_[index]] = share if several else float(share[0])
        return found

    def plot(self, terms: Any = None, output: int = -1, figure: Figure | None = None) -> Figure:
        """A figure of the most important effects: curve, band and training values; categories; or a pair's surface.

        Args:
            terms: names or positions; the twelve with the largest importance by default.
            output: the class, as for `effect`.
            figure: draw into this one, for example `matplotlib.pyplot.figure()`; a new one by default.
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
        raise BilevelError(f"{key!r} is no term; the terms are {', '.join(self.terms_[:20])}.")

    def _grid(self, index: int, points: int) -> Array:
        term = self._design.terms[index]
        return term.levels.astype(object) if isinstance(term, CategoryTerm) else np.linspace(*term.range, points)

    def _of_features(self, index: int, parts: list[Array], output: int) -> tuple[Array, Array]:
        """An effect and its deviation for the features of one term."""
        where = places(self._pieces).get(index)
        if where is None:
            zero = np.zeros(len(self._grid(index, 100)))
            return zero, zero
        features = np.hstack(parts) - self._reduction.mean[where]
        chosen = features @ self._reduction.rows(where)
        variance = ((chosen @ self._inverses[output]) * chosen).sum(1)
        return features @ self._coef[output, where], self._deviation * np.sqrt(np.maximum(variance, 0))

    def _missing(self, index: int, output: int) -> tuple[float, float] | None:
        term = self._design.terms[index]
        if not term.parts or term.parts[-1].kind != "missing":
            return None
        mean, deviation = self._of_features(index, term.features(np.array([np.nan])), output)
        return float(mean[0]), float(deviation[0])


def is_pair(model: AdditiveEffects, index: int) -> PairTerm | None:
    """The pair that a term is, or None."""
    single = len(model._design.terms)
    return model._design.pairs[index - single] if index >= single else None
