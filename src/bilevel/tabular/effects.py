"""The effects of an additive model of a table as plain data, for its record, its table and its charts."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

# Effects whose curves are kept, the most important first, and points of each.
MOST_EFFECTS, POINTS, PAIR_POINTS = 16, 60, 24


def effect_rows(model: Any) -> list[dict[str, Any]]:
    """Every term, the most important first: its importance and penalties; and, of the first, the effect itself.

    `shape` is "curve", "categories" or "pair". An effect has a `grid` (for a pair, of each column) and for each output
    the `mean` with the ends `low` and `high` of its band, and `missing`, the effect of a missing value, or None. Of two
    classes, effects are on the log-odds of the second; of more, there is an output for each.
    """
    found = []
    for place, name in enumerate(sorted(model.terms_, key=lambda name: -model.importance_[name])):
        row = {"term": name, "importance": model.importance_[name], "penalties": dict(model.penalties_[name])}
        if place < MOST_EFFECTS and model.importance_[name] > 0:
            row |= _effect(model, name)
        found.append(row)
    return found


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
    """The terms as CSV, a row for each part with its penalty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["term", "importance", "part", "penalty"])
    for row in rows:
        for part, penalty in row["penalties"].items() or [("", "")]:
            writer.writerow([row["term"], row["importance"], part, penalty])
    return out.getvalue()
