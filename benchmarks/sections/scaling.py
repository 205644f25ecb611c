"""Time against T and against the size of λ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt

from harness.cases import ridge, shared_ridge
from harness.figures import Figures
from harness.pictures import Picture, lines
from harness.section import Bench
from harness.tables import Table, scaling_table
from harness.targets import Target, exponent, points_of, ratio

ORDER = 40
TITLE = "Time against T and against the size of λ"
WHAT = """
How the time grows. Against T, on the ridge problem: reverse modes are linear (exponent 1). `Spectral` uses powers of
eigenvalues and is constant (exponent 0). Against the size of λ, with w of 4,096 numbers and T = 10: reverse modes are
constant. `Forward` computes one derivative for each hyperparameter, so its time is linear for large λ.
"""


def measure(bench: Bench) -> dict[str, Any]:
    times = bench.pick(quick=(10, 50, 250), full=(10, 50, 250, 1000, 4000))
    sizes = bench.pick(quick=(1, 8, 64), full=(1, 8, 64, 512))
    half = bench.share(0.5)
    return {
        "steps": half.timed(
            [ridge(steps) for steps in times], ["bilevel_unrolled", "bilevel_reverse", "bilevel_spectral", "jaxopt"]
        ),
        "lam": half.timed([shared_ridge(size, 10) for size in sizes], ["bilevel_reverse", "bilevel_forward"]),
    }


def targets(figures: Figures) -> Iterator[Target]:
    steps, lam = figures.timings("steps"), figures.timings("lam")
    peer = next((t for t in steps if t.contestant == "jaxopt" and t.steps == 50), None)
    spectral = [t for t in steps if t.contestant == "bilevel_spectral" and t.rounds]
    slowest = max(spectral, key=lambda t: t.minimum, default=None)
    where = f"T = {slowest.steps}" if slowest else "any T"
    yield ratio(f"Spectral at its slowest ({where}) within 3 times jaxopt at T = 50", "scaling", slowest, peer, 3.0)
    for claim, timings, contestant, limit in (
        ("Spectral constant in T: exponent", steps, "bilevel_spectral", 0.1),
        ("Reverse linear in T: exponent", steps, "bilevel_reverse", 1.1),
        ("Reverse constant in the size of λ: exponent", lam, "bilevel_reverse", 0.1),
        ("Forward at most linear in the size of λ: exponent", lam, "bilevel_forward", 1.1),
    ):
        yield exponent(claim, "scaling", points_of(timings, contestant), limit)


def tables(figures: Figures) -> Iterator[Table]:
    yield scaling_table("Time against T (ridge)", "T =", figures.timings("steps"))
    title = "Time against the size of λ (w has 4,096 numbers, T = 10)"
    yield scaling_table(title, "λ:", figures.timings("lam"))


def pictures(figures: Figures) -> Iterator[Picture]:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    lines(axes[0], figures.timings("steps"), "T", "ridge, 30 hyperparameters")
    lines(axes[1], figures.timings("lam"), "size of λ", "shared ridge, T = 10")
    axes[0].set_ylabel("ms")
    figure.tight_layout()
    yield Picture("scaling.png", "Time against T and against the size of λ", figure)
