"""A meta-batch of the hyper-representation, on one thread and on two."""

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
The paper's Section 5.2: λ is a network with four convolutions of 64 filters, and w is a linear classifier for each of
16 or 32 episodes (5-way 1-shot, 15 queries for each class). It is in float32, as in a training. The features are
computed once for any T, by the peers too, so the floor is one forward and one backward pass of the network h alone. It
is measured in three forms: a plain torch module, the same module with channels last, and the package's own
implementation. In the case with "cores" every contestant has two threads, and times are wall-clock times. The package
then runs episodes in parallel.
"""
ROUNDS = 10
# Milliseconds on the machine for which the target was set: a pass with channels last, and the target for our own pass.
SKETCH, FLOOR = 294.0, 240.0
PLAIN, CHANNELS_LAST, OWN = "hyper_floor", "hyper_sketch", "hyper_floor_bilevel"
ALONE = "hyper-16-T5", "hyper-32-T5", "hyper-16-T50"


def measure(bench: Bench) -> dict[str, Any]:
    cases = [hyper(5, 16, name="hyper-16"), hyper(5, 32, name="hyper-32"), hyper(50, 16, name="hyper-16")]
    alone = bench.share(0.9).timed(cases, most_rounds=ROUNDS)
    both = hyper(5, 16, threads=2, name="hyper-cores")
    peers = [contestant.name for contestant in bench.pool.contestants if contestant.enters(both)]
    named = [name for name in peers if name not in (PLAIN, CHANNELS_LAST, OWN)]
    return {"timings": alone + bench.share(0.1).timed([both], named, ROUNDS), "dataset": dataset()}


def targets(figures: Figures) -> Iterator[Target]:
    for case, timings in figures.by_case().items():
        named = figures.named(case)
        ours, own, sketch = (named.get(name) for name in ("hyper_bilevel", OWN, CHANNELS_LAST))
        peer = fastest(timings, lambda t: t.group == "torch peer")
        if case in ALONE[:2]:
            yield ratio("within 1.03 times the fastest known pass of the network", case, ours, own, 1.03)
            note = (
                f"The target was {FLOOR:.0f} ms on a machine where a pass with channels last takes {SKETCH:.0f} ms. "
                "The limit here is that ratio. The section on the roofline shows what this machine allows."
            )
            claim = "our pass of the network within 0.82 times a pass with channels last"
            yield ratio(claim, case, own, sketch, FLOOR / SKETCH, limit_note=note if case == ALONE[0] else "")
            yield ratio("at least 1.6 times faster than the fastest peer", case, peer, ours, 1.6, at_least=True)
        elif case in ALONE:
            yield ratio("T = 50 within 1.35 times a pass of the network", case, ours, own, 1.35)
        else:
            yield ratio("on both cores at least 2 times faster than the fastest peer", case, peer, ours, 2.0, True)


def tables(figures: Figures) -> Iterator[Table]:
    return (case_table(case, timings) for case, timings in figures.by_case().items())


def pictures(figures: Figures) -> Iterator[Picture]:
    return ratio_bars("hyper", figures.by_case())
