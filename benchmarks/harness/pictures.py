"""The pictures."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from harness.report import milliseconds
from harness.results import Results, baseline
from harness.targets import size_of
from harness.timing import Ratio, Timing

COLOURS = {"bilevel": "#1f5fa8", "torch peer": "#b5543b", "by hand": "#7a7a7a", "jax": "#4f8a52"}
LINES = {
    "Unrolled": ("#d08a2e", "o"),
    "Reverse": ("#1f5fa8", "s"),
    "Reverse('sqrt')": ("#4aa3c7", "D"),
    "Forward": ("#8a4fa3", "^"),
    "Reversible": ("#2e8b57", "v"),
    "Spectral": ("#c0392b", "P"),
    "jaxopt": ("#4f8a52", "X"),
}


def draw(results: Results) -> None:
    with plt.rc_context(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.dpi": 140,
            "savefig.bbox": "tight",
        }
    ):
        cases = {case: timings for case, timings in results.by_case("ridge", "network").items() if baseline(timings)}
        if cases:
            _ratios(results, cases)
        if results.memory():
            _memory(results)
        if results.timings("scaling", "steps"):
            _time(results)


def _ratios(results: Results, cases: dict[str, list[Timing]]) -> None:
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
            axis.text(
                ratio.high * 1.1,
                row,
                f"{ratio.value:.2f}× · {milliseconds(timing.minimum)} ms",
                va="center",
                fontsize=7.5,
            )
        axis.set_title(case)
        axis.set_xlabel(f"time relative to {base.label}")
    handles = [Patch(color=colour) for colour in COLOURS.values()]
    figure.legend(
        handles, list(COLOURS), ncol=len(COLOURS), loc="lower center", bbox_to_anchor=(0.5, -0.06), frameon=False
    )
    figure.tight_layout()
    figure.savefig(results.folder / "ratios.png")
    plt.close(figure)


def _memory(results: Results) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    figures = results.memory()
    for axis, field, title in (
        (axes[0], "rss", "resident memory above a run with T = 3"),
        (axes[1], "stats", "what the method keeps (stats.peak_memory)"),
    ):
        for method in dict.fromkeys(row.method for row in figures):
            colour, marker = LINES[method]
            mine = sorted((row.steps, getattr(row, field) / 1e6) for row in figures if row.method == method)
            # A run that fits into what the warm-up left behind shows no growth at all; a logarithm needs a floor.
            axis.plot(
                [t for t, _ in mine], [max(mb, 1e-2) for _, mb in mine], color=colour, marker=marker, ms=4, label=method
            )
        axis.set(xscale="log", yscale="log", xlabel="T", title=title)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("MB")
    axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(results.folder / "memory.png")
    plt.close(figure)


def _time(results: Results) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    _lines(axes[0], results.timings("scaling", "steps"), "T", "ridge, 30 hyperparameters")
    _lines(axes[1], results.timings("scaling", "lam"), "size of λ", "shared ridge, T = 10")
    axes[0].set_ylabel("ms")
    figure.tight_layout()
    figure.savefig(results.folder / "time.png")
    plt.close(figure)


def _lines(axis: Axes, timings: list[Timing], label: str, title: str) -> None:
    for name in dict.fromkeys(t.label for t in timings if t.rounds):
        colour, marker = LINES[name]
        mine = sorted((t for t in timings if t.label == name and t.rounds), key=size_of)
        sizes = [size_of(t) for t in mine]
        axis.plot(sizes, [t.minimum * 1e3 for t in mine], color=colour, marker=marker, ms=4, label=name)
        axis.fill_between(
            sizes, [t.minimum * 1e3 for t in mine], [t.median * 1e3 for t in mine], color=colour, alpha=0.2, lw=0
        )
    axis.set(xscale="log", yscale="log", xlabel=label, title=title)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
