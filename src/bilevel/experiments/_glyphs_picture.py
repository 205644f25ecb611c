"""The picture of the few-shot demonstration: an episode with its predictions, and the accuracies."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, cast

from numpy.typing import NDArray

from bilevel.plotting import BLUE, GREEN, GREY, ORANGE, RED, Axes, picture, titled

COLOURS = (BLUE, ORANGE, GREEN, GREY)
# Queries of each class that are shown.
ROOM = 7
# In sides of a picture: from one to the next, between examples and queries, from row to row, and for a class's name.
APART, GAP, BELOW, NAMED = 1.12, 0.45, 1.5, 3.9


@dataclass(frozen=True)
class Shown:
    """A test episode: pictures classes × examples × height × width with ink 1, and the predicted class numbers."""

    number: int
    classes: list[str]
    support: NDArray[Any]
    query: NDArray[Any]
    predicted: list[list[int]]

    @property
    def right(self) -> int:
        return sum(answer == row for row, answers in enumerate(self.predicted) for answer in answers)

    @property
    def queries(self) -> int:
        return sum(map(len, self.predicted))


def draw(
    path: Path,
    shown: Shown,
    curves: Mapping[str, Mapping[int, float]],
    accuracy: Mapping[str, Mapping[str, Any]],
    kind: str,
) -> None:
    """Save the episode on the left, final accuracies and learning on the right.

    `curves` are accuracies on meta-validation by name and hyperiteration.
    """
    rows, columns = len(shown.classes), shown.support.shape[1] + min(ROOM, shown.query.shape[1])
    wide = 0.56 * (NAMED + GAP + columns * APART)
    with picture(path, width=wide + 4.4, height=max(4.8, 0.56 * (rows * BELOW + 1.3))) as figure:
        left, right = cast(Any, figure.subfigures(1, 2, width_ratios=(wide, 4.4)))
        _episode(left.subplots(), shown, kind)
        above, below = right.subplots(2, 1)
        _bars(above, accuracy, 1 / rows)
        _learning(below, curves, accuracy)


def letter(number: int) -> str:
    """A short name for a class: A, B, …, Z, A2, …"""
    return ascii_uppercase[number % 26] + (str(number // 26 + 1) if number >= 26 else "")


def _episode(axes: Axes, shown: Shown, kind: str) -> None:
    from matplotlib.patches import Rectangle

    shots, every = shown.support.shape[1], shown.query.shape[1]
    each = min(ROOM, every)
    start = shots * APART + GAP
    for row, name in enumerate(shown.classes):
        y = row * BELOW
        axes.text(-0.25, y + 0.5, letter(row), ha="right", va="center", fontsize=13, fontweight="bold")
        label = textwrap.fill(textwrap.shorten(name, 44, placeholder="…"), 15)
        axes.text(-0.8, y + 0.5, label, ha="right", va="center", fontsize=9.5, linespacing=1.15)
        for column in range(shots):
            _image(axes, shown.support[row, column], column * APART, y)
            axes.add_patch(Rectangle((column * APART, y), 1, 1, fill=False, edgecolor=GREY, linewidth=0.8))
        # There is room for some of the queries only, so those with a wrong prediction come first.
        order = sorted(range(every), key=lambda query: shown.predicted[row][query] == row)
        for column, query in enumerate(order[:each]):
            x, answer = start + column * APART, shown.predicted[row][query]
            good = answer == row
            _image(axes, shown.query[row, query], x, y)
            axes.add_patch(
                Rectangle((x, y), 1, 1, fill=False, edgecolor=BLUE if good else RED, linewidth=1.2 if good else 3)
            )
            axes.text(
                x + 0.5,
                y + 1.07,
                letter(answer) if good else f"{letter(answer)} ✗",
                ha="center",
                va="top",
                fontsize=9,
                color=BLUE if good else RED,
                fontweight="normal" if good else "bold",
            )
    heading = "1 example" if shots == 1 else f"{shots} examples"
    axes.text(shots * APART / 2 - 0.06, -0.2, heading, ha="center", va="bottom", fontsize=9.5)
    some = "" if each == every else f" ({each} of {every}, mistakes first)"
    axes.text(start, -0.2, f"new drawings and answers{some}", ha="left", va="bottom", fontsize=9.5)
    which = "the first" if shown.right == shown.queries else "the first with a mistake"
    axes.set_title(f"{kind} test episode {shown.number}, {which}: {shown.right} of {shown.queries} right", loc="left")
    axes.set_xlim(-NAMED, start + each * APART)
    axes.set_ylim(len(shown.classes) * BELOW - 0.05, -0.65)
    axes.set_aspect("equal", anchor="NW")
    axes.axis("off")


def _image(axes: Axes, image: NDArray[Any], x: float, y: float) -> None:
    axes.imshow(1 - image, cmap="gray", vmin=0, vmax=1, extent=(x, x + 1, y + 1, y), interpolation="nearest")


def _bars(axes: Axes, accuracy: Mapping[str, Mapping[str, Any]], chance: float) -> None:
    titled(axes, "Unseen scripts", "accuracy (per cent)", "")
    names = list(accuracy)
    values = [100 * accuracy[name]["accuracy"] for name in names]
    errors = [100 * accuracy[name]["interval"] for name in names]
    axes.barh(range(len(names)), values, xerr=errors, color=COLOURS[: len(names)], height=0.66, capsize=3)
    for row, (value, error) in enumerate(zip(values, errors, strict=True)):
        axes.text(value + error + 1.5, row, f"{value:.1f} ± {error:.1f}", va="center", fontsize=9.5)
    axes.axvline(100 * chance, color="white", linestyle=":", linewidth=1.6)
    axes.text(100 * chance + 1, len(names) - 0.5, "chance", ha="left", va="center", fontsize=8.5, color=GREY)
    axes.plot([100 * chance] * 2, [len(names) - 0.67, len(names) - 0.3], color=GREY, linestyle=":", linewidth=1.6)
    axes.set_yticks(range(len(names)), [name.replace(" with ", "\nwith ") for name in names], fontsize=9.5)
    axes.set_ylim(len(names) - 0.3, -0.5)
    axes.set_xlim(0, 128)
    axes.set_xticks(range(0, 101, 20))
    axes.grid(axis="y", visible=False)


def _learning(axes: Axes, curves: Mapping[str, Mapping[int, float]], accuracy: Mapping[str, Mapping[str, Any]]) -> None:
    """Curves in the colours of the bars, whose labels name them."""
    titled(axes, "Meta-validation while learning", "hyperiterations", "accuracy (per cent)")
    last = max(k for curve in curves.values() for k in curve)
    for colour, marker, (name, one) in zip(COLOURS, "os--", accuracy.items(), strict=True):
        if name in curves:
            values = [100 * value for value in curves[name].values()]
            axes.plot(list(curves[name]), values, color=colour, marker=marker, markersize=4.5)
        else:
            level = 100 * one["validation"]
            axes.axhline(level, color=colour, linestyle="--", linewidth=1.4)
            axes.text(last, level + 1, name, ha="right", va="bottom", fontsize=9, color=colour)
    axes.set_ylim(top=101)
