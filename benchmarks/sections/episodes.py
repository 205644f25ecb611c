"""The time of a hypergradient of the hyper-representation against the number of episodes in the meta-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt

from harness.cases import hyper
from harness.contract import Case
from harness.figures import Figures
from harness.pictures import Picture, lines
from harness.section import Bench
from harness.tables import Table, scaling_table
from harness.targets import Target, exponent, points_of

ORDER = 55
TITLE = "Time against the number of episodes"
WHAT = """
Meta-batches of different sizes for the hyper-representation (5-way 1-shot, T = 5). The network h runs once for each
episode, and the classifiers of all episodes take their steps in one batch. So the time should be proportional to the
number of episodes.
"""


def measure(bench: Bench) -> dict[str, Any]:
    whole = hyper(5, episodes=32)
    sizes = bench.pick(quick=(4, 16), full=(4, 8, 16, 32))
    return {"timings": bench.timed([_first(whole, size) for size in sizes], ["hyper_bilevel"])}


def _first(case: Case, count: int) -> Case:
    """The case with its first episodes only."""
    start, train, val = ([array[:count] for array in group] for group in (case.start, case.train, case.val))
    return replace(case, name=f"hyper-episodes-{count}", start=start, train=train, val=val)


def targets(figures: Figures) -> Iterator[Target]:
    points = points_of(figures.timings(), "hyper_bilevel")
    yield exponent("linear in the number of episodes: exponent", "episodes", points, 1.1)


def tables(figures: Figures) -> Iterator[Table]:
    yield scaling_table("A hypergradient of a meta-batch", "episodes:", figures.timings())


def pictures(figures: Figures) -> Iterator[Picture]:
    figure, axis = plt.subplots(figsize=(4.5, 3.4))
    lines(axis, figures.timings(), "episodes", "hyper-representation, T = 5")
    axis.set_ylabel("ms")
    figure.tight_layout()
    yield Picture("episodes.png", "Time of a hypergradient against the number of episodes", figure)
