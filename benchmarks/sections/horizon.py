"""The cost of more inner steps with many classes and examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.cases import hyper
from harness.figures import Figures
from harness.section import Bench
from harness.tables import Table, scaling_table
from harness.targets import Target, ratio

ORDER = 53
TITLE = "More steps, 20-way 5-shot"
WHAT = """
Four episodes with 20 classes of 5 examples each: the largest heads of the paper's Omniglot experiments. The iterates
stay in the span of the support set's features, so a step and its adjoint are products with a 100 × 100 matrix. Ten
times as many steps should therefore add little to the time of the network.
"""
SHORT, LONG = "20-way-5-shot-T5", "20-way-5-shot-T50"


def measure(bench: Bench) -> dict[str, Any]:
    cases = [hyper(steps, 4, ways=20, shots=5, name="20-way-5-shot") for steps in (5, 50)]
    return {"timings": bench.timed(cases, ["hyper_bilevel"], most_rounds=12)}


def targets(figures: Figures) -> Iterator[Target]:
    short, long = (figures.named(case).get("hyper_bilevel") for case in (SHORT, LONG))
    yield ratio("T = 50 within 1.15 times T = 5", "20-way 5-shot", long, short, 1.15)


def tables(figures: Figures) -> Iterator[Table]:
    yield scaling_table("A hypergradient of four episodes", "T =", figures.timings())
