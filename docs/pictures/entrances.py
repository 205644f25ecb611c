"""Where λ can enter a bilevel problem, and which methods see it there."""

from __future__ import annotations

from pathlib import Path

from _canvas import BLUE, GREY, ORANGE, arrow, box, canvas, save

ENTRANCES = [
    "data,\nby encode",
    "the start\nΦ₀(λ)",
    "the inner\nobjective L",
    "the dynamics\nη, momentum",
    "the outer\nobjective E",
]
# True: seen. The data enter through encode into the objectives, so whoever sees one of these sees them.
SEES = {
    "Unrolled, Reverse, Forward,\nReversible": [1, 1, 1, 1, 1],
    "Spectral": [1, 1, 1, 1, 1],
    "Truncated(k)": [1, 0, 1, 1, 1],
    "Implicit": [1, 0, 1, 0, 1],
    "FirstOrder": [1, 0, 0, 0, 1],
}


def draw(path: Path) -> None:
    figure, axes = canvas(8.1, 5.2)
    left, gap, top = 2.85, 1.15, 4.85
    columns = [left + gap * i for i in range(len(ENTRANCES))]
    box(axes, 1.85, top, "λ", size=(0.6, 0.5), colour=ORANGE, filled=True)
    axes.plot([2.15, columns[-1]], [top, top], color=ORANGE, linewidth=1.4)
    for x, name in zip(columns, ENTRANCES, strict=True):
        arrow(axes, (x, top), (x, top - 0.42), colour=ORANGE)
        box(axes, x, top - 0.74, name, size=(1.07, 0.6), colour=GREY, filled=False)
    for i, (method, seen) in enumerate(SEES.items()):
        y = top - 1.6 - 0.62 * i
        axes.plot([0.1, columns[-1] + 0.55], [y + 0.31] * 2, color="#dddddd", linewidth=0.8)
        axes.text(2.2, y, method, ha="right", va="center", fontsize=9.5)
        for x, yes in zip(columns, seen, strict=True):
            if yes:
                axes.plot([x], [y], "o", color=BLUE, markersize=11)
            else:
                axes.plot([x], [y], "x", color="#bbbbbb", markersize=8)
    y = top - 1.6 - 0.62 * len(SEES) + 0.05
    axes.plot([2.2], [y], "o", color=BLUE, markersize=9)
    axes.text(2.35, y, "seen", va="center", fontsize=9, color=GREY)
    axes.plot([3.1], [y], "x", color="#bbbbbb", markersize=8)
    axes.text(3.25, y, "not seen: a λ that enters here only is refused", va="center", fontsize=9, color=GREY)
    save(figure, path)
