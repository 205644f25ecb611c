"""The picture of the certificates: bounds above the truth, and hypergradient errors, against T."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevel.experiments._plotting import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, picture, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What is smaller is rounding; on a logarithmic axis it would push everything else together.
FLOOR = 1e-14


def draw(path: Path, problems: Mapping[str, Any]) -> None:
    """A column for every problem: gaps and distances above, hypergradient errors below."""
    with picture(path, width=12.5, height=7.6) as figure:
        grid = figure.subplots(2, len(problems), squeeze=False, sharex="col")
        for column, one in enumerate(problems.values()):
            top, bottom = grid[:, column]
            titled(top, textwrap.fill(one["problem"], 44), "", "" if column else "distance from the limit")
            _bounds(top, one)
            titled(bottom, "", "inner steps $T$", "" if column else r"$\|g - \nabla f\|\,/\,\|\nabla f\|$")
            _errors(bottom, one)
            for axes in (top, bottom):
                axes.set_xscale("log", base=4)
                axes.set_xticks(one["T"], [str(t) for t in one["T"]])
                axes.minorticks_off()
        for row in grid:
            # Every curve falls, so that the lower left corner of the last column is the free one.
            row[-1].legend(*row[0].get_legend_handles_labels(), loc="lower left", fontsize=9)


def _bounds(axes: Axes, one: Mapping[str, Any]) -> None:
    t = one["T"]
    for name, key, colour, marker in (
        (r"$|f_T - f|$", "gap", BLUE, "o"),
        (r"$\|w_T - w_\lambda\|$", "distance", ORANGE, "s"),
    ):
        certified = _shown(one[f"certified {key}"])
        axes.plot(t, certified, color=colour, linestyle="--", linewidth=1.4, label=f"{name}, certified")
        axes.plot(
            t,
            _shown(one[f"true {key}"]),
            color=colour,
            linestyle="none",
            marker=marker,
            markersize=6.5,
            label=f"{name}, true",
        )
    axes.plot(t, _shown(one["‖∇L(w_T)‖/μ"]), color=GREY, linestyle=":", label=r"$\|\nabla L(w_T)\|/\mu$")
    axes.set_yscale("log")


def _errors(axes: Axes, one: Mapping[str, Any]) -> None:
    truncated = iter((SKY, PURPLE, GREEN, RED))
    for name, values in one["hypergradient errors"].items():
        if name == "∇f_T":
            style: dict[str, Any] = {"color": BLACK, "marker": "o", "label": r"$\nabla f_T$"}
        elif name == "Implicit":
            style = {"color": RED, "marker": "s", "label": "Implicit at $w_T$"}
        else:
            style = {"color": next(truncated, GREY), "marker": "^", "linestyle": "--", "label": name}
        axes.plot(one["T"], _shown(values), markersize=5.5, linewidth=1.5, **style)
    axes.set_yscale("log")


def _shown(values: Sequence[float]) -> Any:
    """Infinite bounds are left out."""
    shown = np.maximum(np.array(values, float), FLOOR)
    return np.where(np.isfinite(shown), shown, np.nan)
