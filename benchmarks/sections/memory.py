"""Peak memory against T. As a program: `python -m sections.memory case.npz METHOD` makes one measurement."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import cases, probe
from harness.contract import Case
from harness.memory import growth
from harness.timing import TOLERANCE, Disagreement, distance

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.pictures import Picture
    from harness.section import Bench
    from harness.tables import Table
    from harness.targets import Target

ORDER = 30
TITLE = "Memory against T"
WHAT = """
How much memory the methods need as T grows, for the small network with heavy ball and one hyperparameter for each
layer. Every figure is from a fresh process. `Unrolled` keeps all graphs, `Reverse` all iterates, `Reverse("sqrt")`
about 2 √T iterates, `Forward` one derivative for each hyperparameter, and `Reversible` the bits that the
multiplication by the momentum drops. Steps are replayed one at a time here (`group_bytes=0`), so that the memory of
the iterates is measured and not that of recorded steps.
"""

METHODS = ("Unrolled", "Reverse", "Reverse('sqrt')", "Forward", "Reversible")


@dataclass(frozen=True)
class Memory:
    """Bytes that a method needed at one T.

    Attributes:
        rss: the growth of the resident memory, the smallest of `runs`.
        stats: the bytes of the method's own tensors, from `stats.peak_memory`.
    """

    method: str
    steps: int
    rss: int
    stats: int
    seconds: float
    runs: list[int]


def measure(bench: Bench) -> dict[str, Any]:
    times, repeats = bench.pick(quick=((300,), 1), full=((10, 100, 1000), 3))
    found = []
    for steps in times:
        path = cases.network(steps, per_weight=False).save(bench.folder)
        gradients: dict[str, np.ndarray] = {}
        for method in METHODS:
            answers = [probe.ask("memory", str(path), method) for _ in range(repeats)]
            runs, seconds = [answer["rss"] for answer in answers], min(answer["seconds"] for answer in answers)
            found.append(Memory(method, steps, min(runs), answers[0]["stats"], seconds, runs))
            gradients[method] = np.array(answers[0]["gradient"])
            error = distance(gradients[method], gradients[METHODS[0]])
            if not error <= TOLERANCE:
                raise Disagreement(
                    f"{method} and {METHODS[0]} differ by {error:.2g} (relative) on the network at T = {steps}, "
                    f"allowed {TOLERANCE:g}."
                )
            bench.tick(f"memory: {method}, T = {steps}", 1 / (len(times) * len(METHODS)))
    return {"memory": [asdict(row) for row in found]}


def targets(figures: Figures) -> Iterator[Target]:
    from harness.targets import Target

    at = {row.method: row for row in figures.rows(Memory, "memory") if row.steps == 1000}

    def share(claim: str, one: str, other: str, field: str, limit: float) -> Target:
        if one not in at or other not in at:
            return Target(claim, "memory", None, limit, "needs T = 1000, a full run")
        a, b = getattr(at[one], field), getattr(at[other], field)
        return Target(claim, "memory", a / b, limit, f"{a / 1e6:.2f} of {b / 1e6:.1f} MB: 1/{b / max(a, 1):.0f}")

    yield share("Reverse('sqrt') at most 1/8 of Unrolled's peak, T = 1000", "Reverse('sqrt')", "Unrolled", "rss", 1 / 8)
    yield share("Reversible at most 1/20 of Reverse's iterates, T = 1000", "Reversible", "Reverse", "stats", 1 / 20)
    claim = "Reversible at most 1/20 of Reverse's resident memory, T = 1000"
    yield share(claim, "Reversible", "Reverse", "rss", 1 / 20)


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table

    found = figures.rows(Memory, "memory")
    times = sorted({row.steps for row in found})
    rows = []
    for method in dict.fromkeys(row.method for row in found):
        mine = {row.steps: row for row in found if row.method == method}
        cells = [f"{mine[t].rss / 1e6:.1f} / {mine[t].stats / 1e6:.2f}" if t in mine else "–" for t in times]
        rows.append([method, *cells, f"{mine[times[-1]].seconds:.2f} s" if times[-1] in mine else "–"])
    note = (
        "MB: growth of the resident memory compared with a run with T = 3 / tensors that the method kept "
        "(`stats.peak_memory`). Heavy ball, one hyperparameter for each layer."
    )
    columns = ["method", *(f"T = {t}" for t in times), f"time at T = {times[-1]}"]
    yield Table("Peak memory against T (network)", columns, rows, note)


def pictures(figures: Figures) -> Iterator[Picture]:
    import matplotlib.pyplot as plt

    from harness.pictures import LINES, Picture

    found = figures.rows(Memory, "memory")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, field, title in (
        (axes[0], "rss", "resident memory above a run with T = 3"),
        (axes[1], "stats", "what the method keeps (stats.peak_memory)"),
    ):
        for method in dict.fromkeys(row.method for row in found):
            colour, marker = LINES[method]
            mine = sorted((row.steps, getattr(row, field) / 1e6) for row in found if row.method == method)
            # A run that fits into the memory freed by the warm-up shows no growth. A logarithmic axis has no zero.
            axis.plot(
                [t for t, _ in mine], [max(mb, 1e-2) for _, mb in mine], color=colour, marker=marker, ms=4, label=method
            )
        axis.set(xscale="log", yscale="log", xlabel="T", title=title)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("MB")
    axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    yield Picture("memory.png", "Peak memory against T", figure)


def main() -> None:
    import bilevel as bl
    from problems.in_bilevel import problem_of

    methods: dict[str, bl.Method] = {
        "Unrolled": bl.Unrolled(),
        "Reverse": bl.Reverse(group_bytes=0),
        "Reverse('sqrt')": bl.Reverse("sqrt", group_bytes=0),
        "Forward": bl.Forward(),
        "Reversible": bl.Reversible(),
    }
    case, method = Case.load(Path(sys.argv[1])), methods[sys.argv[2]]
    problem, lam, task = problem_of(case)

    def run(steps: int) -> bl.Hypergradient:
        # All methods use heavy ball, because Reversible needs dynamics with momentum.
        dynamics = bl.HeavyBall(case.lr / 10, 0.9)
        return bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=steps, method=method)

    # Three steps, so that one is replayed: torch imports more modules at the first backward pass.
    rss, seconds, hg = growth(lambda: [run(3) for _ in range(2)], lambda: run(case.steps))
    gradient = np.concatenate([leaf.numpy().ravel() for leaf in hg.grad]).tolist()
    print(json.dumps({"rss": rss, "stats": hg.stats.peak_memory, "seconds": seconds, "gradient": gradient}))


if __name__ == "__main__":
    main()
