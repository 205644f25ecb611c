"""All contestants on the paper's ridge problem, with T = 50 and T = 250."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.cases import ridge
from harness.figures import Figures, baseline
from harness.pictures import Picture, ratio_bars
from harness.section import Bench
from harness.tables import Table, case_table
from harness.targets import Target, ratio

ORDER = 10
TITLE = "Ridge regression"
WHAT = """
The paper's Appendix C: 30 training points, a penalty for each of 30 features, T steps of gradient descent, float64. A
step is a product of a 30 × 30 matrix and a vector, so nearly all of the time is the overhead of calling small
operations. The figures show how much overhead the library adds to torch, and how much compilation (`bl.compile`, jax)
or a closed form (`Spectral`) saves. jaxopt's unrolled loop is compiled as a whole, so it is compared with our compiled
methods.
"""


def measure(bench: Bench) -> dict[str, Any]:
    return {"timings": bench.timed([ridge(50), ridge(250)])}


def targets(figures: Figures) -> Iterator[Target]:
    for case, timings in figures.by_case().items():
        named, peer = figures.named(case), baseline(timings)
        unrolled, reverse, jaxopt = (named.get(name) for name in ("bilevel_unrolled", "bilevel_reverse", "jaxopt"))
        compiled, spectral = named.get("bilevel_reverse_compiled"), named.get("bilevel_spectral_compiled")
        yield ratio("compiled Spectral as fast as jaxopt's compiled unroll", case, spectral, jaxopt, 1.0)
        yield ratio("compiled Reverse within 5 times jaxopt's compiled unroll", case, compiled, jaxopt, 5.0)
        for label, ours in (("Spectral", spectral), ("Reverse", compiled)):
            claim = f"compiled {label} at least 5 times faster than the fastest torch peer"
            yield ratio(claim, case, peer, ours, 5.0, at_least=True)
        yield ratio("Unrolled no slower than the fastest torch peer", case, unrolled, peer, 1.0)
        yield ratio("Reverse within 1.6 times Unrolled", case, reverse, unrolled, 1.6)


def tables(figures: Figures) -> Iterator[Table]:
    return (case_table(case, timings) for case, timings in figures.by_case().items())


def pictures(figures: Figures) -> Iterator[Picture]:
    return ratio_bars("ridge", figures.by_case())
