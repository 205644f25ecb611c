"""A meta-batch of photographs: the paper's C4L on 84 × 84 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.cases import hyper
from harness.figures import Figures, fastest
from harness.pictures import Picture, ratio_bars
from harness.section import Bench
from harness.tables import Table, case_table
from harness.targets import Target, ratio

ORDER = 52
TITLE = "Hyper-representation of photographs"
WHAT = """
The paper's C4L, four convolutions of 32 filters with max-pooling, on four 5-way 1-shot episodes of 84 × 84 pixels,
T = 5. The output of the first layer is 72 MB per episode, so the speed depends on memory traffic. The package pools
before it normalises, and processes as many images at a time as fit into the cache.
"""


def measure(bench: Bench) -> dict[str, Any]:
    return {"timings": bench.timed([hyper(5, 4, network="c4l", name="c4l-4")], most_rounds=8)}


def targets(figures: Figures) -> Iterator[Target]:
    for case, timings in figures.by_case().items():
        ours = figures.named(case).get("hyper_bilevel")
        peer = fastest(timings, lambda t: t.group == "torch peer")
        yield ratio("at least 1.5 times faster than the fastest peer", case, peer, ours, 1.5, at_least=True)


def tables(figures: Figures) -> Iterator[Table]:
    return (case_table(case, timings) for case, timings in figures.by_case().items())


def pictures(figures: Figures) -> Iterator[Picture]:
    return ratio_bars("photographs", figures.by_case())
