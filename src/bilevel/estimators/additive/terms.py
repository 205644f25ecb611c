"""The terms of an additive model. A term maps one or two columns to centred features, in parts with a penalty each.

The mean squares of a part's features on the training rows add up to 1. So equal penalties of two parts mean equal
prior variances of their effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.interpolate import BSpline

from bilevel.estimators.folds import Array

Kind = Literal["linear", "curve", "category", "missing", "product", "surface"]

# The number of knots of a curve, at quantiles, and the largest number of its features: the smoothest are kept.
KNOTS, RANK = 10, 6
# The weight of first differences of coefficients beside second differences, so that no curve is unpenalised.
SLOPE = 0.03
# Up to about this number of deviations from its median, a column enters linearly; beyond, by its logarithm.
TAIL = 3.0
# How far an effect is extrapolated beyond the training rows, as a fraction of their range. It is constant from there.
REACH = 0.1


@dataclass(frozen=True)
class Part:
    """Features of a term that share one penalty."""

    kind: Kind
    size: int


@dataclass(frozen=True)
class Curve:
    """Cubic splines with common knots, continued as straight lines.

    Attributes:
        knots: all knots, with three beyond each end of the range.
        coefficients: the coefficients of the B-splines, one column per curve.
    """

    knots: Array
    coefficients: Array

    @classmethod
    def through(cls, inner: Array) -> Curve:
        """All B-splines with these inner knots. The outer knots have the distance of the outermost two."""
        steps = np.arange(1, 4)
        left, right = inner[0] - steps[::-1] * (inner[1] - inner[0]), inner[-1] + steps * (inner[-1] - inner[-2])
        return cls(np.concatenate([left, inner, right]), np.eye(len(inner) + 2))

    def __call__(self, z: Array) -> Array:
        inside = np.clip(z, self.knots[3], self.knots[-4])
        spline, beyond = BSpline(self.knots, self.coefficients, 3), (z - inside)[:, None]
        return spline(inside) + beyond * spline(inside, 1) if beyond.any() else spline(inside)


class NumericTerm:
    """f(x) = β z + Σ_k u_k c_k(z), with z the standardised column, for a numeric column.

    Far from the median, z grows like the logarithm of the distance, so that a few huge values do not determine β. The
    c_k are cubic splines without their mean and slope, in Demmler–Reinsch form: orthogonal on the training rows, in
    ascending order of roughness, and scaled so that Σ u_k² is the roughness, the squared second differences of the
    spline's coefficients. So a ridge penalty on u is a roughness penalty, and one on β a shrinkage penalty. Outside the
    range of the training rows, f continues for a tenth of that range and is then constant. A missing value has an
    effect of its own.

    Args:
        x: the column, NaN where a value is missing.
        weight: the weight of every row.
        curved: whether the term has a curve beside the slope.
    """

    def __init__(self, x: Array, weight: Array, curved: bool = True) -> None:
        present = ~np.isnan(x) & (weight > 0)
        v, s = x[present], weight[present] / max(weight[present].sum(), 1e-300)
        self.gap = float(1 - weight[present].sum() / weight.sum())
        self.range = (float(v.min()), float(v.max())) if len(v) else (0.0, 0.0)
        mean = float(s @ v) if len(v) else 0.0
        deviation = float(np.sqrt(s @ (v - mean) ** 2)) if len(v) else 0.0
        self.curve: Curve | None = None
        self.parts: list[Part] = []
        # A constant column has a deviation of zero up to rounding.
        self.varies = deviation > 1e-10 * max(abs(mean), 1e-300)
        if self.varies:
            low, self.middle, high = quantiles(v, s, np.array([0.25, 0.5, 0.75]))
            spread = (high - low) / 1.349  # the standard deviation, if the distribution is normal
            self.scale = float(TAIL * (spread if spread > 1e-3 * deviation else deviation))
            compressed = self._compressed(v)
            self.centre = float(s @ compressed)
            self.unit = float(np.sqrt(s @ (compressed - self.centre) ** 2))
            self.parts.append(Part("linear", 1))
            if curved and len(np.unique(v)) >= 4:
                self._add_curve((compressed - self.centre) / self.unit, s)
        if 1e-12 < self.gap < 1:
            self.parts.append(Part("missing", 1))

    @property
    def leading(self) -> int:
        """The number of features that enter pairs: the slope and the smoothest curve."""
        return 2 if any(part.kind == "curve" for part in self.parts) else 1

    def _compressed(self, v: Array) -> Array:
        return np.arcsinh((v - self.middle) / self.scale)

    def _add_curve(self, z: Array, s: Array) -> None:
        distinct = np.unique(z)
        steps = np.linspace(0, 1, min(KNOTS, len(distinct)))
        knots = np.unique(quantiles(z, s, steps))
        if len(knots) < 4:
            # Most rows have the same value. Quantiles of the distinct values give more knots.
            knots = np.unique(np.quantile(distinct, steps))
        raw = Curve.through(knots)
        B = raw(z)
        mean = s @ B
        slope = (s * z) @ (B - mean)
        B = B - mean - np.outer(z, slope)
        first = np.diff(np.eye(B.shape[1]), axis=0)
        second = np.diff(first, axis=0)
        roughness, directions = np.linalg.eigh(second.T @ second + SLOPE * first.T @ first)
        # The first direction is a constant, which centred functions do not contain.
        basis = directions[:, 1:] / np.sqrt(roughness[1:])
        features = B @ basis
        variance, rotation = np.linalg.eigh(features.T @ (s[:, None] * features))
        variance, rotation = variance[::-1], rotation[:, ::-1]
        total = variance.sum()
        kept = int((variance[:RANK] > 2e-3 * total).sum())
        if not total > 1e-10:
            return
        basis = basis @ rotation[:, :kept] / np.sqrt(total)
        self.curve, self.mean, self.slope = Curve(raw.knots, basis), mean @ basis, slope @ basis
        self.parts.append(Part("curve", kept))

    def features(self, x: Array, reach: float = REACH) -> list[Array]:
        """The features of every part, for new values of the column.

        Args:
            reach: values beyond the training rows are clipped at this fraction of their range.
        """
        missing = np.isnan(x)
        parts = []
        if self.varies:
            margin = reach * (self.range[1] - self.range[0])
            v = np.clip(np.where(missing, self.middle, x), self.range[0] - margin, self.range[1] + margin)
            z = np.where(missing, 0.0, (self._compressed(v) - self.centre) / self.unit)
            parts.append(z[:, None])
            if self.curve is not None:
                curves = self.curve(z) - self.mean - np.outer(z, self.slope)
                parts.append(np.where(missing[:, None], 0.0, curves))
        if self.parts and self.parts[-1].kind == "missing":
            parts.append(((missing - self.gap) / np.sqrt(self.gap * (1 - self.gap)))[:, None])
        return parts


class CategoryTerm:
    """f(x) = u_k for category k, with a ridge penalty on u. Missing is a category. A new category has f = 0."""

    def __init__(self, x: Array, weight: Array) -> None:
        text = _filled(x)
        self.levels = np.unique(text[weight > 0])
        chosen = text[:, None] == self.levels
        self.share = weight @ chosen / weight.sum()
        self.unit = float(np.sqrt(max(1 - (self.share**2).sum(), 0.0)))
        # One feature is enough for two categories.
        self.two = len(self.levels) == 2
        self.parts = [Part("category", 1 if self.two else len(self.levels))] if len(self.levels) > 1 else []

    @property
    def leading(self) -> int:
        """The number of features that enter pairs: all categories."""
        return self.parts[0].size

    def features(self, x: Array, reach: float = REACH) -> list[Array]:
        if not self.parts:
            return []
        chosen = (_filled(x)[:, None] == self.levels).astype(float)
        known = chosen.sum(1, keepdims=True) > 0
        indicators = np.where(known, (chosen - self.share) / self.unit, 0.0)
        return [indicators[:, 1:] * np.sqrt(2)] if self.two else [indicators]


class PairTerm:
    """f(x, z): products of the leading features of two terms, minus their projection on the features of the two terms.

    The product of the two slopes has one penalty, the other products another.

    Args:
        first: the position of the first term.
        second: the position of the second term.
        terms: all terms of single columns.
        blocks: the features of these terms on the training rows.
    """

    def __init__(
        self, first: int, second: int, terms: list[NumericTerm | CategoryTerm], blocks: list[list[Array]], weight: Array
    ) -> None:
        self.first, self.second = first, second
        self.curved = [any(part.kind == "curve" for part in terms[k].parts) for k in (first, second)]
        products, alone = self._raw(blocks)
        root = np.sqrt(weight / weight.sum())[:, None]
        # The coefficients of the projection.
        self.shadow = np.linalg.lstsq(root * alone, root * products, rcond=1e-8)[0]
        squares = ((root * (products - alone @ self.shadow)) ** 2).sum(0)
        self.split = all(self.curved)
        cuts = [slice(0, 1), slice(1, None)] if self.split else [slice(None)]
        unit = np.sqrt(np.concatenate([np.full(len(squares[cut]), squares[cut].sum()) for cut in cuts]))
        self.unit = np.where(unit > 1e-6, unit, np.inf)
        size = products.shape[1]
        self.parts = [Part("product", 1), Part("surface", size - 1)] if self.split else [Part("product", size)]

    def features(self, blocks: list[list[Array]]) -> list[Array]:
        products, alone = self._raw(blocks)
        residual = (products - alone @ self.shadow) / self.unit
        return [residual[:, :1], residual[:, 1:]] if self.split else [residual]

    def _raw(self, blocks: list[list[Array]]) -> tuple[Array, Array]:
        """Products of the leading features, and all features of both terms with a constant."""
        one, two = blocks[self.first], blocks[self.second]
        a, b = (_leading(*both) for both in zip((one, two), self.curved, strict=True))
        products = (a[:, :, None] * b[:, None, :]).reshape(len(a), -1)
        return products, np.column_stack([np.ones(len(a)), *one, *two])


def quantiles(v: Array, s: Array, steps: Array) -> Array:
    """Weighted quantiles: a value of weight 2 counts as two values."""
    order = np.argsort(v, kind="stable")
    below = np.cumsum(s[order])
    # The smallest value with at least this fraction of the weight at or below it, up to rounding.
    return v[order][np.searchsorted(below, (1 - 1e-12) * steps * below[-1])]


def _leading(block: list[Array], curved: bool) -> Array:
    return np.hstack([block[0], block[1][:, :1]]) if curved else block[0]


def _filled(x: Array) -> Array:
    """The values as text, with "(missing)" for None."""
    return np.array(["(missing)" if value is None else value for value in x], dtype=object).astype(str)
