"""The effects of an additive model as JSON data, for its record, its table and its charts."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

# The number of effects whose curves are stored, and the number of points of each.
MAX_EFFECTS, POINTS, PAIR_POINTS = 16, 60, 24


def effect_rows(model: Any) -> list[dict[str, Any]]:
    """Every term with its importance and penalties, the most important first, and the effects of the first 16.

    `shape` is "curve", "categories" or "pair". An effect has a `grid` (for a pair, one per column). For each output it
    has the `mean`, the ends `low` and `high` of its band (not for a pair), and `missing`, the effect of a missing value
    or None. With two classes, effects are on the log-odds of the second. With more, there is an output for each.
    """
    rows = []
    for place, name in enumerate(sorted(model.terms_, key=lambda name: -model.importance_[name])):
        row = {"term": name, "importance": model.importance_[name], "penalties": dict(model.penalties_[name])}
        if place < MAX_EFFECTS and model.importance_[name] > 0:
            row |= _effect(model, name)
        rows.append(row)
    return rows


def _effect(model: Any, name: str) -> dict[str, Any]:
    outputs = []
    effect = model.effect(name, 2)
    pair = isinstance(effect.grid, tuple)
    for output in range(len(model._coef)):
        effect = model.effect(name, PAIR_POINTS if pair else POINTS, output)
        low, high = effect.band()
        missing = None if effect.missing is None else effect.missing[0]
        outputs.append(
            {"mean": effect.mean.tolist(), "missing": missing}
            | ({} if pair else {"low": low.tolist(), "high": high.tolist()})
        )
    grids = [grid.tolist() for grid in (effect.grid if pair else (effect.grid,))]
    texts = np.asarray(effect.grid[0] if pair else effect.grid).dtype.kind == "O"
    shape = "pair" if pair else "categories" if texts else "curve"
    return {"shape": shape, "grid": grids if pair else grids[0], "outputs": outputs}


def effects_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The terms as CSV, one row for each part of a term, with its penalty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["term", "importance", "part", "penalty"])
    for row in rows:
        for part, penalty in row["penalties"].items() or [("", "")]:
            writer.writerow([row["term"], row["importance"], part, penalty])
    return out.getvalue()
