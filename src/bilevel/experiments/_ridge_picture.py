"""The picture of Table 5: errors against T, and which coefficients were learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bilevel.experiments._plotting import BLUE, GREEN, GREY, ORANGE, PURPLE, picture, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class HasLam(Protocol):
    """Anything that carries the learned λ."""

    @property
    def lam(self) -> list[float]: ...


def draw(
    path: Path,
    numbers: Mapping[str, Any],
    fits: Mapping[str, Sequence[HasLam]],
    informative: int,
    limits: tuple[float, float],
) -> None:
    """Save both panels; the x axis counts rows of the table, since 'exact' has no T."""
    labels = list(numbers)
    with picture(path) as figure:
        left, right = figure.subplots(1, 2)
        _errors(left, numbers)
        _coefficients(right, fits, informative, limits)
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
        axes.errorbar(
            x,
            median,
            yerr=(median - low, high - median),
            color=colour,
            marker=marker,
            markersize=6,
            capsize=3,
            label=f"{kind}, ours",
        )
        printed = [(at, row["paper"]) for at, row in zip(x, rows, strict=True) if row["paper"] is not None]
        if printed:
            at, values = zip(*printed, strict=True)
            axes.plot(
                at,
                values,
                linestyle="none",
                marker=marker,
                markersize=9,
                markerfacecolor="none",
                markeredgewidth=1.8,
                color=colour,
                label=f"{kind}, paper",
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda index: ("test" in names[index], "paper" in names[index]))
    axes.legend(
        [handles[i] for i in order],
        [names[i] for i in order],
        title="bars: quartiles over data sets",
        title_fontsize=9.5,
    )


def _coefficients(
    axes: Axes, fits: Mapping[str, Sequence[HasLam]], informative: int, limits: tuple[float, float]
) -> None:
    titled(axes, "Learned regularisation", "inner steps $T$", r"$\exp(\lambda_i)$")
    # The jitter only spreads the dots sideways; it is drawn from a fixed seed so that a picture is a function of its
    # numbers.
    jitter = np.random.default_rng(0)
    groups = (
        ("informative features", GREEN, slice(None, informative), -0.2),
        ("noise features", PURPLE, slice(informative, None), 0.2),
    )
    for name, colour, part, shift in groups:
        for position, found in enumerate(fits.values()):
            values = np.exp(np.array([one.lam for one in found]))[:, part].ravel()
            x = position + shift + jitter.uniform(-0.13, 0.13, len(values))
            axes.plot(
                x, values, linestyle="none", marker=".", markersize=4.5, alpha=0.35, color=colour, markeredgewidth=0
            )
            axes.plot(
                [position + shift - 0.17, position + shift + 0.17],
                [np.median(values)] * 2,
                color=colour,
                linewidth=3,
                label=name if position == 0 else None,
            )
    for limit in limits:
        axes.axhline(
            np.exp(limit),
            color=GREY,
            linestyle=":",
            linewidth=1.2,
            label=r"edge of $\Lambda$" if limit == limits[0] else None,
        )
    axes.set_yscale("log")
    axes.set_ylim(np.exp(limits[0]) / 3, np.exp(limits[1]) * 60)
    axes.legend(
        loc="upper center",
        ncols=3,
        columnspacing=1.2,
        handlelength=1.4,
        title="dots: one per feature and data set; lines: medians",
        title_fontsize=9.5,
    )
