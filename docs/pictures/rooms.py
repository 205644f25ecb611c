"""The rooms of the package: each imports itself and the rooms below it."""

from __future__ import annotations

from pathlib import Path

from _canvas import BLUE, GREEN, GREY, ORANGE, arrow, box, canvas, save

LAYERS = [
    (["cli"], GREY),
    (["app"], GREY),
    (["experiments", "report"], GREY),
    (["tabular"], GREEN),
    (["testing"], BLUE),
    (["estimators", "tuning", "learners"], GREEN),
    (["outer_loop", "outer_ranks", "outer_checkpoints", "outer_record", "outer_sources"], BLUE),
    (["training"], BLUE),
    (["algorithms"], BLUE),
    (["hyperiterations"], BLUE),
    (["certificate", "compilation", "smoothness", "solutions"], BLUE),
    (["hypergradients"], BLUE),
    (["methods"], BLUE),
    (["engine"], BLUE),
    (["dynamics", "linear_solvers", "constraints", "tasks", "data", "models"], ORANGE),
    (["problem", "modules", "structures"], ORANGE),
    (["plotting"], GREY),
    (["files", "distributed"], GREY),
    (["errors", "trees", "discovery", "extras", "progress", "source_commit", "thread_pool"], GREY),
]


def draw(path: Path) -> None:
    step, width = 0.52, 9.0
    height = step * len(LAYERS) + 0.1
    figure, axes = canvas(width, height)
    for row, (rooms, colour) in enumerate(LAYERS):
        y = height - 0.3 - step * row
        each = (width - 0.5) / len(rooms)
        for column, room in enumerate(rooms):
            x = 0.45 + each * (column + 0.5)
            box(axes, x, y, room, size=(min(each - 0.08, 3.2), 0.36), colour=colour, filled=True)
    arrow(axes, (0.2, height - 0.15), (0.2, 0.15))
    axes.text(0.1, height / 2, "imports", rotation=90, fontsize=8.5, color=GREY, va="center", ha="center")
    save(figure, path)
