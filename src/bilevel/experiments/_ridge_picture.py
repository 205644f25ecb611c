"""The picture of Table 5: errors against T, and which coefficients were learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevel.plotting import BLUE, GREEN, GREY, ORANGE, PURPLE, dots, picture, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(
    path: Path,
    numbers: Mapping[str, Any],
    lams: Mapping[str, Sequence[Sequence[float]]],
    informative: int,
    limits: tuple[float, float],
) -> None:
    """Both panels; the x axis counts rows of the table, since 'exact' has no T. `lams` has a learned λ per data set."""
    labels = list(numbers)
    with picture(path) as figure:
        left, right = figure.subplots(1, 2)
        _errors(left, numbers)
        _coefficients(right, lams, informative, limits)
        for axes in (left, right):
            axes.set_xticks(range(len(labels)), labels)
            axes.set_xlim(-0.5, len(labels) - 0.5)
            axes.grid(axis="x", visible=False)


def _errors(axes: Axes, numbers: Mapping[str, Any]) -> None:
    titled(axes, r"Error after learning $\lambda$", "inner steps $T$", "MAPE (per cent)")
    for kind, colour, marker, shift in (("validation", BLUE, "o", -0.09), ("test", ORANGE, "s", 0.09)):
        rows = [row[kind] for row in numbers.values()]
        x = np.arange(len(rows)) + shift
        median = np.array([row["median"] for row in rows])
        low, high = np.array([row["quartiles"] for row in rows]).T
        spread = (median - low, high - median)
        axes.errorbar(x, median, spread, color=colour, marker=marker, markersize=6, capsize=3, label=f"{kind}, ours")
        paper = [np.nan if row["paper"] is None else row["paper"] for row in rows]
        if not np.isnan(paper).all():
            hollow = {"marker": marker, "markerfacecolor": "none", "markeredgewidth": 1.8}
            dots(axes, x, paper, colour, f"{kind}, paper", 9, **hollow)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda index: ("test" in names[index], "paper" in names[index]))
    legend: Any = {"title": "bars: quartiles over data sets", "title_fontsize": 9.5}
    axes.legend([handles[i] for i in order], [names[i] for i in order], **legend)


def _coefficients(
    axes: Axes, lams: Mapping[str, Sequence[Sequence[float]]], informative: int, limits: tuple[float, float]
) -> None:
    titled(axes, "Learned regularisation", "inner steps $T$", r"$\exp(\lambda_i)$")
    jitter = np.random.default_rng(0)  # spreads the dots sideways; a fixed seed, so that equal numbers look alike
    groups = (
        ("informative features", GREEN, slice(None, informative), -0.2),
        ("noise features", PURPLE, slice(informative, None), 0.2),
    )
    for name, colour, part, shift in groups:
        for position, found in enumerate(lams.values()):
            values = np.exp(np.array(found))[:, part].ravel()
            middle = position + shift
            x = middle + jitter.uniform(-0.13, 0.13, len(values))
            dots(axes, x, values, colour, size=4.5, marker=".", alpha=0.35, markeredgewidth=0)
            shown = name if position == 0 else None
            axes.plot([middle - 0.17, middle + 0.17], [np.median(values)] * 2, color=colour, linewidth=3, label=shown)
    for limit, edge in zip(limits, (r"edge of $\Lambda$", None), strict=True):
        axes.axhline(np.exp(limit), color=GREY, linestyle=":", linewidth=1.2, label=edge)
    axes.set_yscale("log")
    axes.set_ylim(np.exp(limits[0]) / 3, np.exp(limits[1]) * 60)
    legend: Any = {"title": "dots: one per feature and data set; lines: medians", "title_fontsize": 9.5}
    axes.legend(loc="upper center", ncols=3, columnspacing=1.2, handlelength=1.4, **legend)
