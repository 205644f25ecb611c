"""The long form of the search."""

import argparse
import collections
import time

import hypothesis
import torch
from hypothesis import HealthCheck, Phase

from search.drawing import cases
from search.judging import Defect, judge

AT_ONCE = 500
# Defects after which there is no point in going on.
MOST = 20


def search(problems: int, seed: int, report=print) -> collections.Counter:
    """Draw that many different problems; a defect is shrunk, reported and counted."""
    counts: collections.Counter = collections.Counter()
    seen = set()
    while len(seen) < problems and counts["wrong"] < MOST:
        try:
            # The first draw of every round is the same: the simplest one.
            _draw(min(AT_ONCE, problems - len(seen) + 1), seed, seen, counts)
        except Defect as error:
            counts["wrong"] += 1
            report(f"defect {counts['wrong']}: {error}")
        seed += 1
        report(f"{len(seen)} problems: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    return counts


def _draw(problems, seed, seen, counts):
    """Up to the first defect, whose shortest form is raised."""
    shrinking = False

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=problems,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @hypothesis.given(cases())
    def some(case):
        nonlocal shrinking
        torch.manual_seed(case.seed)
        try:
            outcome = judge(case)
        except Defect:
            shrinking = True
            raise
        if not shrinking and case not in seen:
            seen.add(case)
            counts[outcome] += 1

    some()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="search", description=__doc__)
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    counts = search(options.problems, options.seed, lambda line: print(line, flush=True))
    minutes = (time.perf_counter() - began) / 60
    print(f"{sum(counts.values()):,} problems in {minutes:.0f} minutes, {counts['wrong']} wrong")
