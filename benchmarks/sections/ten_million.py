"""One hypergradient of a network with ten million weights within a memory budget.

As a program: `python -m sections.ten_million MEMORY STEPS`, with `none` for no budget.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
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

ORDER = 36
TITLE = "Ten million weights in 2 GB"
WHAT = """
A 784 → 3000 → 2550 → 10 tanh network (10,033,060 weights, float32), T = 100 steps of gradient descent, each on its own
minibatch of 64, and a penalty for each layer. Its 100 iterates take 4 GB. `Reverse(memory="2GB")` keeps those that fit
and computes the others again. Resident memory is the growth that the operating system reports, compared with the same
process when it has the data and the initial weights. It includes the workspace of a step. The column "predicted" is the
memory that the plan of `Reverse` predicted before the run.
"""

BUDGETS = {"none": None, "2GB": 2_000_000_000}
STEPS = 100


@dataclass(frozen=True)
class BudgetedRun:
    """The memory and the time of one hypergradient within a memory budget, each the smallest of `runs`.

    Attributes:
        horizon: T.
        plan: what was kept and recorded.
        predicted: the memory that the plan predicted, in bytes.
        steps: how many steps were run, including replayed ones.
    """

    budget: str
    horizon: int
    rss: int
    plan: str
    predicted: int
    steps: int
    seconds: float
    runs: list[list[float]]


def measure(bench: Bench) -> dict[str, Any]:
    steps, repeats = bench.pick(quick=(10, 1), full=(STEPS, 1))
    budgets = tuple(BUDGETS)
    answers: dict[str, list[dict[str, Any]]] = {budget: [] for budget in budgets}
    for budget in budgets * repeats:
        answers[budget].append(probe.ask("ten_million", budget, steps))
        bench.tick(f"memory={budget}, T = {steps}", 1 / (repeats * len(budgets)))
    found = []
    for budget, replies in answers.items():
        error = distance(np.array(replies[0]["gradient"]), np.array(answers["none"][0]["gradient"]))
        if not error <= FLOAT32_TOLERANCE:
            raise Disagreement(
                f"memory={budget} and no budget differ by {error:.2g} (relative), allowed {FLOAT32_TOLERANCE:g}."
            )
        runs = [[reply["rss"], reply["seconds"]] for reply in replies]
        rss, seconds = (min(column) for column in zip(*runs, strict=True))
        facts = {name: replies[0][name] for name in ("plan", "predicted", "steps")}
        found.append(BudgetedRun(budget, steps, rss, seconds=seconds, runs=runs, **facts))
    return {"budgeted": [asdict(row) for row in found]}


def targets(figures: Figures) -> Iterator[Target]:
    from harness.targets import Target

    found = {row.budget: row for row in figures.rows(BudgetedRun, "budgeted")}
    claims = ("Reverse(memory='2GB') stays within 2 GB", "Reverse(memory='2GB') within 2.5 times Reverse()")
    if found["2GB"].horizon < STEPS:
        for claim, limit in zip(claims, (1, 2.5), strict=True):
            yield Target(claim, "ten_million", None, limit, "needs a full run")
        return
    ours, free = found["2GB"], found["none"]
    share, ratio = ours.rss / BUDGETS["2GB"], ours.seconds / free.seconds
    yield Target(claims[0], "ten_million", share, 1, f"{ours.rss / 1e6:,.0f} MB resident")
    yield Target(claims[1], "ten_million", ratio, 2.5, f"{ratio:.2f}: {ours.seconds:.0f} and {free.seconds:.0f} s")


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table

    found = {row.budget: row for row in figures.rows(BudgetedRun, "budgeted")}
    columns = ["budget", "resident, MB", "predicted, MB", "plan", "steps run", "seconds", "seconds / no budget"]
    rows = [
        [
            row.budget,
            f"{row.rss / 1e6:,.0f}",
            f"{row.predicted / 1e6:,.0f}" if row.predicted else "–",
            row.plan,
            str(row.steps),
            f"{row.seconds:.1f}",
            f"{row.seconds / found['none'].seconds:.2f}",
        ]
        for row in found.values()
    ]
    note = "Processor time, one thread, each in a fresh process. *steps run* counts steps with and without a graph."
    yield Table("One hypergradient within a memory budget", columns, rows, note)


def main() -> None:
    import torch
    from torch import Tensor
    from torch.nn.functional import cross_entropy, linear

    import bilevel as bl

    torch.set_num_threads(1)
    budget, steps = BUDGETS[sys.argv[1]], int(sys.argv[2])
    source = torch.Generator().manual_seed(0)

    def network(*sizes: int) -> list[Tensor]:
        layers = [(torch.randn(n, m, generator=source) / m**0.5, torch.zeros(n)) for m, n in pairwise(sizes)]
        return [part for layer in layers for part in layer]

    images, labels = torch.randn(2048, 784, generator=source), torch.randint(10, (2048,), generator=source)

    def batch(t: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(t))
        return images[chosen], labels[chosen]

    def error(w: list[Tensor], lam: list[Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        hidden = torch.tanh(linear(torch.tanh(linear(data[0], w[0], w[1])), w[2], w[3]))
        return cross_entropy(linear(hidden, w[4], w[5]), data[1])

    def penalised(w: list[Tensor], lam: list[Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        return error(w, lam, data) + sum(log.exp() * W.square().sum() for log, W in zip(lam, w[::2], strict=True))

    task, lam = bl.Task(batch, (images[:128], labels[:128])), [torch.tensor(-6.0)] * 3

    def run(start: list[Tensor], steps: int, memory: int | None) -> bl.Hypergradient:
        problem = bl.Problem(penalised, error, init=lambda lam: list(start))
        method, dynamics = bl.Reverse(memory=memory), bl.GradientDescent(0.05)
        return bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=steps, method=method)

    # The warm-up uses a small network, so that the workspace of a step of the large network is counted.
    small, large = network(784, 30, 20, 10), network(784, 3000, 2550, 10)
    rss, seconds, hg = growth(lambda: [run(small, 3, None) for _ in range(2)], lambda: run(large, steps, budget))
    plan, gradient = hg.stats.plan, [float(leaf) for leaf in hg.grad]
    words = "all iterates" if plan is None else f"{plan.kind}: {plan.kept} kept, {plan.group} recorded together"
    answer = {"rss": rss, "seconds": seconds, "gradient": gradient, "plan": words}
    answer |= {"predicted": plan.memory if plan else 0, "steps": hg.stats.steps + hg.stats.replayed}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
