"""What was tuned, as a table that can be read."""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevel import trees
from bilevel.trees import Tree
from bilevel.tuning.space import Space

HEADER = ("hyperparameter", "values", "start", "tuned", "range", "at a bound")


def rows(space: Space, lam: dict[str, Tree]) -> list[tuple[str, ...]]:
    """One row per hyperparameter; those with a few named entries have a row for each."""
    before, after, bounds = space.plain(space.lam), space.plain(lam), space.at_bounds(lam)
    found: list[tuple[str, ...]] = []
    for one in space.declared:
        low, high = space.kinds[one.name].ends()
        limits = f"{number(low)} … {number(high)}" if np.isfinite([low, high]).any() else "free"
        at, count = bounds[one.name]
        word = ("yes" if at else "no") if count == 1 else f"{at:,} of {count:,}"
        found.append((one.name, f"{count:,}", summary(before[one.name]), summary(after[one.name]), limits, word))
        labels = one.labels(space.setup)
        if labels is not None and len(labels) <= 30:
            found += [
                (f"· {label}", "", number(before[one.name][label]), number(after[one.name][label]), "", "")
                for label in labels
            ]
    return found


def markdown(space: Space, lam: dict[str, Tree]) -> str:
    """The rows as a table in Markdown, its columns aligned for those who read it as text."""
    lines = [HEADER, *rows(space, lam)]
    lines = [tuple(cell.replace("|", "\\|") for cell in line) for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    numeric = (False, True, True, True, True, True)

    def put(cells: tuple[str, ...]) -> str:
        padded = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, numeric, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * (w - 1) + ":") if right else "-" * w for w, right in zip(widths, numeric, strict=True)]
    return "\n".join([put(lines[0]), f"| {' | '.join(rule)} |", *map(put, lines[1:])])


def summary(value: Any) -> str:
    """One number as it is, many by their least, median and largest.

    >>> summary(np.array([1.0, 2.0, 4.0]))
    '1 … 2 … 4'
    """
    if isinstance(value, float):
        return number(value)
    entries = np.concatenate([np.ravel(leaf) for leaf in trees.leaves(value)])
    low, middle, high = np.quantile(entries, [0, 0.5, 1])
    return number(low) if low == high else f"{number(low)} … {number(middle)} … {number(high)}"


def number(value: float) -> str:
    return f"{value:.3g}"
