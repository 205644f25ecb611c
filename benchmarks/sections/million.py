"""A long inner run of a network with a million weights. As a program: `python -m sections.million METHOD STEPS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import probe
from harness.memory import growth
from harness.timing import FLOAT32_TOLERANCE, Disagreement, distance

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.section import Bench
    from harness.tables import Table
    from harness.targets import Target

ORDER = 35
TITLE = "A million weights, a thousand steps"
WHAT = """
A 784 → 1000 → 200 → 10 tanh network (987,210 weights, float32), T steps of gradient descent, each on its own
minibatch of 64, and a penalty for each layer. The graph of the whole run takes gigabytes. `Reverse("sqrt")` is made for
such runs: it runs every step twice and balances the memory of the kept iterates with that of the recorded steps. With
`group_bytes=0` it needs the least memory and runs every step three times. Resident memory is measured by the operating
system, as the growth compared with a run with T = 3. It is larger than the tensors that the method counts, because
malloc leaves gaps between them. On a machine with 24 GB, a step of `Unrolled` takes twice as long at T = 1000 as at
T = 100: a graph that fits into memory can still slow down a run.
"""

METHODS = ("Unrolled", "Reverse", "Reverse('sqrt')", "Reverse('sqrt', group_bytes=0)")
STEP_BYTES = 14e6  # resident memory of one recorded step of `Unrolled`


@dataclass(frozen=True)
class LongRun:
    """The memory and the time of a method for T steps, each the smallest of `runs`."""

    method: str
    steps: int
    rss: int
    stats: int
    seconds: float
    runs: list[list[float]]


def measure(bench: Bench) -> dict[str, Any]:
    longest = int(0.8 * _available() / STEP_BYTES)
    times = [min(steps, longest) for steps in bench.pick(quick=(100,), full=(100, 1000))]
    repeats = bench.pick(quick=1, full=2)
    asked = [(steps, method) for steps in times for method in METHODS]
    answers: dict[tuple[int, str], list[dict[str, Any]]] = {pair: [] for pair in asked}
    for steps, method in asked * repeats:
        answers[steps, method].append(probe.ask("million", method, steps))
        bench.tick(f"{method}, T = {steps}", 1 / (repeats * len(asked)))
    found = []
    for (steps, method), replies in answers.items():
        reference = np.array(answers[steps, "Unrolled"][0]["gradient"])
        error = distance(np.array(replies[0]["gradient"]), reference)
        if not error <= FLOAT32_TOLERANCE:
            raise Disagreement(
                f"{method} and Unrolled differ by {error:.2g} (relative), allowed {FLOAT32_TOLERANCE:g}."
            )
        runs = [[reply["rss"], reply["seconds"]] for reply in replies]
        rss, seconds = (min(column) for column in zip(*runs, strict=True))
        found.append(LongRun(method, steps, rss, replies[0]["stats"], seconds, runs))
    return {"long": [asdict(row) for row in found]}


def targets(figures: Figures) -> Iterator[Target]:
    from harness.targets import Target

    for steps, found in _by_steps(figures).items():
        ours, theirs = found["Reverse('sqrt')"], found["Unrolled"]
        if steps > 100:
            note = "" if steps == 1000 else "The graph of 1000 steps does not fit into the memory of this machine."
            words = f"{ours.rss / 1e6:.0f} of {theirs.rss / 1e6:,.0f} MB: 1/{theirs.rss / ours.rss:.0f}"
            claim = f"Reverse('sqrt') at most 1/12 of Unrolled's resident memory, T = {steps}"
            yield Target(claim, "million", ours.rss / theirs.rss, 1 / 12, words, limit_note=note)
        ratio = ours.seconds / theirs.seconds
        words = f"{ratio:.2f}: {ours.seconds:.1f} and {theirs.seconds:.1f} s"
        yield Target(f"Reverse('sqrt') within 1.5 times Unrolled, T = {steps}", "million", ratio, 1.5, words)


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table

    columns = ["method", "resident, MB", "tensors kept, MB", "resident / Unrolled", "seconds", "seconds / Unrolled"]
    for steps, found in _by_steps(figures).items():
        base = found["Unrolled"]
        rows = [
            [
                f"`{row.method}`",
                f"{row.rss / 1e6:,.0f}",
                f"{row.stats / 1e6:,.0f}",
                f"{row.rss / base.rss:.3f}",
                f"{row.seconds:.1f}",
                f"{row.seconds / base.seconds:.2f}",
            ]
            for row in found.values()
        ]
        note = f"The best of {len(base.runs)} runs, each in a fresh process. Processor time, one thread."
        yield Table(f"Memory and time at T = {steps:,}", columns, rows, note)


def _by_steps(figures: Figures) -> dict[int, dict[str, LongRun]]:
    found: dict[int, dict[str, LongRun]] = {}
    for row in figures.rows(LongRun, "long"):
        found.setdefault(row.steps, {})[row.method] = row
    return found


def _available() -> int:
    """Bytes of memory that are available without swapping. Without /proc/meminfo, a number that sets no limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**62
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def main() -> None:
    import torch
    from torch import Tensor
    from torch.nn.functional import cross_entropy, linear

    import bilevel as bl

    torch.set_num_threads(1)
    with_sqrt = bl.Reverse("sqrt"), bl.Reverse("sqrt", group_bytes=0)
    method = dict(zip(METHODS, (bl.Unrolled(), bl.Reverse(), *with_sqrt), strict=True))[sys.argv[1]]
    source = torch.Generator().manual_seed(0)
    start: list[Tensor] = []
    for inputs, outputs in ((784, 1000), (1000, 200), (200, 10)):
        start += [torch.randn(outputs, inputs, generator=source) / inputs**0.5, torch.zeros(outputs)]
    images, labels = torch.randn(2048, 784, generator=source), torch.randint(10, (2048,), generator=source)

    def batch(t: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(t))
        return images[chosen], labels[chosen]

    def error(w: list[Tensor], lam: list[Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        hidden = torch.tanh(linear(torch.tanh(linear(data[0], w[0], w[1])), w[2], w[3]))
        return cross_entropy(linear(hidden, w[4], w[5]), data[1])

    def penalised(w: list[Tensor], lam: list[Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        return error(w, lam, data) + sum(log.exp() * W.square().sum() for log, W in zip(lam, w[::2], strict=True))

    problem = bl.Problem(penalised, error, init=lambda lam: list(start))
    task, lam = bl.Task(batch, (images[:128], labels[:128])), [torch.tensor(-6.0)] * 3

    def run(steps: int) -> bl.Hypergradient:
        return bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(0.05), steps=steps, method=method)

    # Three steps, so that one is replayed: torch imports more modules at the first backward pass.
    rss, seconds, hg = growth(lambda: [run(3) for _ in range(2)], lambda: run(int(sys.argv[2])))
    gradient = [float(leaf) for leaf in hg.grad]
    print(json.dumps({"rss": rss, "stats": hg.stats.peak_memory, "seconds": seconds, "gradient": gradient}))


if __name__ == "__main__":
    main()
