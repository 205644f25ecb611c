"""Pictures of the effects of an additive model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevel.estimators.additive.effects import AdditiveEffects, Effect
from bilevel.estimators.additive.terms import CategoryTerm, PairTerm
from bilevel.plotting import BLUE, GREY, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of more categories than this, those with the largest effects are shown.
MAX_CATEGORIES = 20


def draw(model: AdditiveEffects, terms: list[int], output: int, figure: Figure | None = None) -> Figure:
    """One panel for each term: a curve with its band, categories, or a pair's surface, with the training rows."""
    columns = min(4, max(len(terms), 1))
    rows = max(1, math.ceil(len(terms) / columns))
    with style():
        figure = new_figure(3.1 * columns, 2.7 * rows) if figure is None else figure
        for place, index in enumerate(terms):
            draw_term(figure.add_subplot(rows, columns, place + 1), model, index, output)
        return figure


def draw_term(axes: Axes, model: AdditiveEffects, index: int, output: int) -> None:
    """The effect of one term, with its name as the title."""
    effect = model.effect(index, output=output)
    if index >= len(model._design.terms):
        _surface(axes, model, model._design.pairs[index - len(model._design.terms)], effect)
    elif isinstance(model._design.terms[index], CategoryTerm):
        _categories(axes, effect)
    else:
        _curve(axes, model, index, effect, output)
    axes.set_title(effect.term, fontsize=10)
    axes.tick_params(labelsize=8)


def _curve(axes: Axes, model: AdditiveEffects, index: int, effect: Effect, output: int) -> None:
    """A curve with its band. The points are training rows: the effect plus the residual."""
    values, residual = model._training_columns[index], model._residuals[:, output]
    if values is not None:
        known = ~np.isnan(values)
        mean = np.interp(values[known], effect.grid, effect.mean)
        if model._points_are_residuals:
            axes.plot(values[known], mean + residual[known], ".", color=GREY, markersize=2.5, alpha=0.35)
        axes.plot(values[known], np.full(int(known.sum()), 0.0), "|", color=GREY, alpha=0.25, markersize=5,
                  transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
    axes.fill_between(effect.grid, *effect.band(), color=BLUE, alpha=0.25, linewidth=0)
    axes.plot(effect.grid, effect.mean, color=BLUE)
    axes.axhline(0, color=GREY, linewidth=0.8)
    if effect.missing is not None:
        mean_missing, deviation = effect.missing
        at = effect.grid[-1] + 0.08 * (effect.grid[-1] - effect.grid[0])
        axes.errorbar([at], [mean_missing], [1.96 * deviation], fmt="s", color=BLUE, markersize=4)
        axes.annotate("missing", (at, mean_missing), fontsize=7, ha="right", va="bottom", xytext=(-4, 3),
                      textcoords="offset points")  # fmt: skip


def _categories(axes: Axes, effect: Effect) -> None:
    shown = np.sort(np.argsort(-np.abs(effect.mean), kind="stable")[:MAX_CATEGORIES])
    places = np.arange(len(shown))
    axes.errorbar(effect.mean[shown], places, xerr=1.96 * effect.deviation[shown], fmt="o", color=BLUE, markersize=5)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(places, [str(name)[:18] for name in effect.grid[shown]])
    axes.set_ylim(-0.6, len(places) - 0.4)


def _surface(axes: Axes, model: AdditiveEffects, pair: PairTerm, effect: Effect) -> None:
    top = float(np.abs(effect.mean).max()) or 1.0
    grids, labels = [], []
    for grid in effect.grid:
        text = grid.dtype == object
        grids.append(np.arange(len(grid)) if text else grid)
        labels.append([str(name)[:12] for name in grid] if text else None)
    shade: Any = axes.pcolormesh(*grids, effect.mean.T, cmap="RdBu_r", vmin=-top, vmax=top, shading="nearest")
    first, second = (model._training_columns[index] for index in (pair.first, pair.second))
    if first is not None and second is not None:
        # Where there are no rows, the surface is extrapolated.
        axes.plot(first, second, ".", color="black", markersize=2, alpha=0.35)
    axes.grid(False)
    for axis, label in zip((axes.xaxis, axes.yaxis), labels, strict=True):
        if label is not None:
            some = slice(None, None, -(-len(label) // MAX_CATEGORIES))
            axis.set_ticks(np.arange(len(label))[some], label[some])
        else:
            axes.locator_params(axis="x" if axis is axes.xaxis else "y", nbins=5)
    axes.set_xlabel(model.terms_[pair.first], fontsize=8)
    axes.set_ylabel(model.terms_[pair.second], fontsize=8)
    axes.figure.colorbar(shade, ax=axes).ax.tick_params(labelsize=7)
