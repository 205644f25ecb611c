"""A meta-batch of the hyper-representation at a short and a long horizon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.cases import dataset, hyper
from harness.figures import Figures, fastest
from harness.pictures import Picture, ratio_bars
from harness.section import Bench
from harness.tables import Table, case_table
from harness.targets import Target, ratio

ORDER = 50
TITLE = "Hyper-representation"
WHAT = """
The paper's Section 5.2: λ is a network with four convolutions of 64 filters, w a linear classifier for each of 16
episodes (5-way 1-shot, 15 queries for each class), float32 as one trains it. The features are computed once whatever
T is, so the floor is one forward and one backward pass of the network alone; the plain module is what a user of torch
would write.
"""


def measure(bench: Bench) -> dict[str, Any]:
    return {"timings": bench.timed([hyper(5), hyper(50)]), "dataset": dataset()}


def targets(figures: Figures) -> Iterator[Target]:
    for case, timings in figures.by_case().items():
        named = figures.named(case)
        ours, limit = named.get("hyper_bilevel"), {5: 1.15, 50: 1.35}[timings[0].steps]
        for floor, whose in (("hyper_floor", "the plain module"), ("hyper_floor_bilevel", "our own h")):
            yield ratio(f"within {limit} times a pass of {whose}", case, ours, named.get(floor), limit)
        if case == "hyper-T5":
            peer = fastest(timings, lambda t: t.group == "torch peer")
            yield ratio("at least 1.3 times faster than the fastest torch peer", case, peer, ours, 1.3, at_least=True)


def tables(figures: Figures) -> Iterator[Table]:
    return (case_table(case, timings) for case, timings in figures.by_case().items())


def pictures(figures: Figures) -> Iterator[Picture]:
    return ratio_bars("hyper", figures.by_case())
