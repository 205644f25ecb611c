"""The picture of Figure 6: meta-validation accuracy against hyperiterations, a curve for each T."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bilevel.experiments._plotting import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, picture, titled

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


def draw(path: Path, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    """A panel for every data set; a cross marks where a training was stopped, a ring its best."""
    with picture(path, width=5.8 * len(numbers) + 0.4, height=4.6) as figure:
        panels = figure.subplots(1, len(numbers), squeeze=False)[0]
        for axes, (dataset, rows) in zip(panels, numbers.items(), strict=True):
            titled(axes, dataset, "hyperiterations", "meta-validation accuracy in per cent")
            for (steps, found), colour in zip(rows.items(), COLOURS, strict=False):
                at, scores = [point[0] for point in found["curve"]], [100 * point[1] for point in found["curve"]]
                axes.plot(at, scores, color=colour, label=f"T = {steps}")
                axes.plot(found["best after"], 100 * found["best"], "o", color=colour, markersize=9, fillstyle="none")
                if found["stopped early"]:
                    axes.plot(at[-1], scores[-1], "X", color=colour, markersize=9)
            axes.plot([], [], "o", color="black", fillstyle="none", label="best")
            if any(found["stopped early"] for found in rows.values()):
                axes.plot([], [], "X", color="black", label="stopped")
            if all(len(found["curve"]) > 2 for found in rows.values()):
                low = min(100 * point[1] for found in rows.values() for point in found["curve"][1:])
                top = max(100 * point[1] for found in rows.values() for point in found["curve"])
                axes.set_ylim(low - 0.12 * (top - low) - 0.1, top + 0.06 * (top - low) + 0.1)
            axes.legend(loc="lower right", ncols=2)
