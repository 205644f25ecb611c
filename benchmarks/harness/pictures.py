"""The pictures that several sections draw, and the style of all pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from harness.figures import baseline, size_of
from harness.tables import milliseconds
from harness.timing import Ratio, Timing

COLOURS = {"bilevel": "#1f5fa8", "torch peer": "#b5543b", "by hand": "#7a7a7a", "jax": "#4f8a52", "floor": "#c9b458"}
LINES = {
    "Unrolled": ("#d08a2e", "o"),
    "Reverse": ("#1f5fa8", "s"),
    "Reverse('sqrt')": ("#4aa3c7", "D"),
    "Forward": ("#8a4fa3", "^"),
    "Reversible": ("#2e8b57", "v"),
    "Spectral": ("#c0392b", "P"),
    "jaxopt": ("#4f8a52", "X"),
}
OTHER_LINE = ("#7a7a7a", "o")


@dataclass(frozen=True)
class Picture:
    """A figure with its file name and its caption."""

    name: str
    caption: str
    figure: Figure


@contextmanager
def style() -> Iterator[None]:
    """The matplotlib settings of all pictures."""
    with plt.rc_context(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.dpi": 140,
            "savefig.bbox": "tight",
        }
    ):
        yield


def ratio_bars(name: str, by_case: dict[str, list[Timing]]) -> Iterator[Picture]:
    """The time of each contestant relative to the fastest torch peer, with one panel per case."""
    cases = {case: timings for case, timings in by_case.items() if baseline(timings)}
    if not cases:
        return
    figure, axes = plt.subplots(1, len(cases), figsize=(4.6 * len(cases), 3.6), squeeze=False)
    for axis, (case, timings) in zip(axes[0], cases.items(), strict=True):
        base = baseline(timings)
        assert base is not None
        ran = sorted((t for t in timings if t.rounds), key=lambda t: -t.minimum)
        ratios = [Ratio.of(timing, base) for timing in ran]
        values = np.array([ratio.value for ratio in ratios])
        spread = np.array([[r.value - r.low for r in ratios], [r.high - r.value for r in ratios]])
        axis.barh(
            [t.label for t in ran],
            values,
            xerr=spread,
            color=[COLOURS[t.group] for t in ran],
            error_kw={"lw": 0.8, "ecolor": "#333333"},
            height=0.65,
        )
        axis.axvline(1, color="#333333", lw=0.8, ls="--")
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlim(values.min() / 2, values.max() * 5)
        for row, (timing, ratio) in enumerate(zip(ran, ratios, strict=True)):
            words = f"{ratio.value:.2f}× · {milliseconds(timing.minimum)} ms"
            axis.text(ratio.high * 1.1, row, words, va="center", fontsize=7.5)
        axis.set_title(case)
        axis.set_xlabel(f"time relative to {base.label}")
    groups = {timing.group for timings in cases.values() for timing in timings}
    colours = {group: colour for group, colour in COLOURS.items() if group in groups}
    handles = [Patch(color=colour) for colour in colours.values()]
    figure.legend(
        handles, list(colours), ncol=len(colours), loc="lower center", bbox_to_anchor=(0.5, -0.06), frameon=False
    )
    figure.tight_layout()
    yield Picture(f"{name}.png", "Time of each contestant against the fastest torch peer", figure)


def lines(axis: Axes, timings: list[Timing], label: str, title: str) -> None:
    """Best times against size on logarithmic axes, shaded up to the medians."""
    for name in dict.fromkeys(t.label for t in timings if t.rounds):
        colour, marker = LINES.get(name, OTHER_LINE)
        mine = sorted((t for t in timings if t.label == name and t.rounds), key=size_of)
        sizes = [size_of(t) for t in mine]
        axis.plot(sizes, [t.minimum * 1e3 for t in mine], color=colour, marker=marker, ms=4, label=name)
        axis.fill_between(
            sizes, [t.minimum * 1e3 for t in mine], [t.median * 1e3 for t in mine], color=colour, alpha=0.2, lw=0
        )
    axis.set(xscale="log", yscale="log", xlabel=label, title=title)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
