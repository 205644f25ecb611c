"""A small network with 7,040 hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.cases import network
from harness.figures import Figures, baseline
from harness.pictures import Picture, ratio_bars
from harness.section import Bench
from harness.tables import Table, case_table
from harness.targets import Target, ratio

ORDER = 20
TITLE = "A small network"
WHAT = """
A 100 → 64 → 10 tanh network on a batch of 128, with an L2 coefficient for each of its 7,040 weights, float64. A step
takes longer here than the overhead of its calls, so the figures show the cost of replayed steps: `Reverse` keeps
iterates instead of graphs, and therefore runs every step twice.
"""


def measure(bench: Bench) -> dict[str, Any]:
    return {"timings": bench.timed([network(bench.pick(quick=10, full=50))])}


def targets(figures: Figures) -> Iterator[Target]:
    for case, timings in figures.by_case().items():
        named = figures.named(case)
        unrolled, reverse = named.get("bilevel_unrolled"), named.get("bilevel_reverse")
        yield ratio("Unrolled no slower than the fastest torch peer", case, unrolled, baseline(timings), 1.0)
        yield ratio("Reverse within 1.6 times Unrolled", case, reverse, unrolled, 1.6)


def tables(figures: Figures) -> Iterator[Table]:
    return (case_table(case, timings) for case, timings in figures.by_case().items())


def pictures(figures: Figures) -> Iterator[Picture]:
    return ratio_bars("network", figures.by_case())
