"""The pictures of Figures 3 and 4 and of Table 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bilevel.experiments._effect_of_t_tables import PRINTED
from bilevel.plotting import BLACK, BLUE, GREEN, GREY, ORANGE, Axes, dots, picture, titled


def draw_curves(path: Path, runs: Mapping[str, Any]) -> None:
    """f_T and f while H is learned, and the test accuracy beside them."""
    with picture(path, height=5) as figure:
        left, right = figure.subplots(1, 2)
        titled(left, "Figure 3: the outer objective", "hyperiteration", r"$f_T(H)$, and $f(H)$ for exact")
        titled(right, "Figure 4: accuracy on the test set", "hyperiteration", "test accuracy (per cent)")
        colours = shades(list(runs))
        for name, one in runs.items():
            exact = name == "exact"
            style: dict[str, Any] = {"color": colours[name], "label": name if exact else f"$T$ = {name}"}
            style |= {"linestyle": (0, (4, 1.5)), "linewidth": 1.3, "zorder": 4} if exact else {}
            left.plot(one["value"], **style)
            right.plot(100 * np.array(one["test accuracy"]), **style)
            peak = [one["peak"]["hyperiteration"]], [100 * one["peak"]["accuracy"]]
            ring: Any = {"markeredgecolor": "white", "markeredgewidth": 1.2, "zorder": 6, "clip_on": False}
            dots(right, *peak, colours[name], size=7, **ring)
        for axes in (left, right):
            # A scale that shows the first hyperiterations, where most changes, at a larger size.
            last = len(one["value"]) - 1
            axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
            axes.set_xlim(0, last)
            axes.set_xticks([tick for tick in (0, 10, 50, 100, 200, 300, 500, 750, 1000, 2000) if tick <= last])
        starts, lows = zip(*((one["value"][0], min(one["value"])) for one in runs.values()), strict=True)
        left.set_ylim(0.9 * min(lows), 1.03 * max(starts))
        # The accuracies to compare lie close together; low ones at the start may be cut off.
        lowest = min(100 * one["test accuracy"][-1] for one in runs.values())
        best = max(100 * one["peak"]["accuracy"] for one in runs.values())
        right.set_ylim(max(0, lowest - 7), best + 0.7)
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), handlelength=2.6)
        where: Any = {"xycoords": "axes fraction", "ha": "right"}
        right.annotate("dots: best of each run", (0.98, 0.03), fontsize=9.5, color=GREY, **where)


def shades(names: Sequence[str]) -> dict[str, Any]:
    """From light to dark with growing T, in an order that also holds in grey; exact is black."""
    from matplotlib import colormaps

    few = [name for name in names if name != "exact"]
    light = np.linspace(0.9, 0.1, len(few))
    found: dict[str, Any] = {name: colormaps["viridis"](x) for name, x in zip(few, light, strict=True)}
    return found | {"exact": BLACK}


def draw_times(path: Path, times: Mapping[str, Any]) -> None:
    """Time over that of the closed form: the paper's, Algorithm 1 and Spectral; and a step's time against H."""
    with picture(path) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _ratios(left, times)
        _steps(right, times["size of H"])


def _ratios(axes: Axes, times: Mapping[str, Any]) -> None:
    titled(axes, "Table 2: time of a hyperiteration, exact = 1", "inner steps $T$", "times the exact one's")
    names = list(times["Reverse"])
    bars = (
        ("paper, Algorithm 1", GREY, [PRINTED[n] / PRINTED["exact"] if n in PRINTED else None for n in names]),
        ("ours, Algorithm 1", ORANGE, [times["Reverse"][n]["over exact"] for n in names]),
        ("ours, Spectral", BLUE, [times["Spectral"][n]["over exact"] for n in names]),
    )
    for place, (name, colour, heights) in enumerate(bars):
        known = [(x, height) for x, height in enumerate(heights) if height is not None]
        x, height = np.array(known).T if known else (np.array([]), np.array([]))
        drawn = axes.bar(x + 0.27 * (place - 1), height, 0.25, color=colour, label=name)
        axes.bar_label(drawn, [f"{h:.2g}" if h < 10 else f"{h:.0f}" for h in height], fontsize=8.5, padding=1)
    axes.axhline(1, color=BLACK, linewidth=1, linestyle="--")
    axes.set_yscale("log")
    axes.set_ylim(0.1, 3 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}×")
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left")


def _steps(axes: Axes, sizes: Sequence[Mapping[str, Any]]) -> None:
    titled(axes, "Algorithm 1: time of one step", "entries of $H$ (those of $w$ stay)", "milliseconds")
    axes.bar(range(len(sizes)), [1e3 * one["seconds per step"] for one in sizes], 0.5, color=GREEN)
    axes.set_xticks(range(len(sizes)), [f"{one['entries of H']:,}" for one in sizes])
    axes.margins(x=0.15)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, 1.25 * max((1e3 * one["seconds per step"] for one in sizes), default=1.0))
