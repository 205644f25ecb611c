"""`solve`, `tune` and `fit` by one and by two processes.

As a program: `torchrun … -m sections.solve_ranks CASE SIZE REPEATS`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from harness import probe

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.section import Bench
    from harness.tables import Table
    from harness.targets import Target

ORDER = 61
TITLE = "solve, tune and fit by several processes"
WHAT = """
`torchrun script.py`: the same call by one process and by two. Each process has its own core and one thread. Four cases
are large enough for several processes. *minibatches*: 50 iterations of SOBA including the set-up, on a network with
101,632 weights; each level has 16,384 examples in four shards and batches of 4,096. *tasks*: `Descent` through 20 steps
on a list of four tasks. *trainings*: `tune(runs=4)` with trainings of 60 steps and batches of 512. *folds*:
`BilevelLogisticRegression.fit` with 8 folds of a table of 20,000 rows and 400 features. Two more cases have no target,
because they are too small for several processes: *small minibatches* of 1,024 examples, and a *small table* of 400 rows
and 40 features. The results of one and of two processes must be the same, bit for bit. Seconds are wall-clock time, the
better of two runs, so this section needs an idle machine.
"""

# The cases that should be 1.7 times faster with two processes, and the cases that are too small for that.
CASES = ("minibatches", "tasks", "trainings", "folds")
SMALL = ("small minibatches", "small table")
RANKS = (1, 2)


@dataclass(frozen=True)
class CallTime:
    """The best times of a call by `ranks` processes: wall-clock time, and in `busy` the first process's processor
    time."""

    case: str
    ranks: int
    seconds: float
    busy: float
    runs: list[float]


def measure(bench: Bench) -> dict[str, Any]:
    size, repeats = bench.pick(quick=(2, 1), full=(5, 2))
    answers: dict[tuple[str, int], dict[str, Any]] = {}
    pairs = [(case, ranks) for case in (*CASES, *SMALL) for ranks in RANKS]
    for case, ranks in pairs:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        answers[case, ranks] = probe.ask("solve_ranks", case, size, repeats, launcher=launcher)
        bench.tick(f"{case} with {ranks} process{'es' * (ranks > 1)}", 1 / len(pairs))
    found = []
    for (case, ranks), reply in answers.items():
        if reply["digits"] != answers[case, 1]["digits"]:
            raise probe.WorkerError(f"{case}: {ranks} processes and one process returned different numbers.")
        found.append(CallTime(case, ranks, min(reply["seconds"]), min(reply["busy"]), reply["seconds"]))
    return {"shared": [asdict(row) for row in found]}


def targets(figures: Figures) -> Iterator[Target]:
    from harness.targets import Target

    found = {(row.case, row.ranks): row for row in figures.rows(CallTime, "shared")}
    for case in CASES:
        one, two = found[case, 1], found[case, 2]
        words = f"{one.seconds / two.seconds:.2f}: {one.seconds:.2f} and {two.seconds:.2f} s"
        note = ""
        if two.seconds > 1.1 * two.busy:
            note = (
                f"With two processes, the first one was busy for {two.busy:.2f} of the {two.seconds:.2f} s and waited "
                f"for the rest. In processor time, two processes are {one.busy / two.busy:.2f} times faster."
            )
        claim = f"{case}: two processes at least 1.7 times faster"
        yield Target(claim, "solve_ranks", one.seconds / two.seconds, 1.7, words, at_least=True, limit_note=note)


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table

    found = {(row.case, row.ranks): row for row in figures.rows(CallTime, "shared")}
    columns = ["case", "processes", "seconds", "busy, s", "speed-up", "speed-up in processor time"]
    rows = [
        [
            case,
            str(ranks),
            f"{row.seconds:.2f}",
            f"{row.busy:.2f}",
            f"{found[case, 1].seconds / row.seconds:.2f}",
            f"{found[case, 1].busy / row.busy:.2f}",
        ]
        for (case, ranks), row in found.items()
    ]
    note = "Both return the same bits (torchrun, gloo)."
    yield Table("solve, tune and fit by one and two processes", columns, rows, note)


def prepare(case: str, size: int) -> Callable[[], list[float]]:
    """The call to be timed. It returns some of the resulting numbers, for the comparison."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    import bilevel as bl

    source = torch.Generator().manual_seed(0)
    count = 32768 if case == "minibatches" else 8192
    x, y = torch.randn(count, 784, generator=source), torch.randint(10, (count,), generator=source)
    if case in ("folds", "small table"):
        from bilevel.estimators import BilevelLogisticRegression

        # The warm-up call has size 1 and uses a small table.
        rows, features = (20_000, 400) if case == "folds" and size > 1 else (400, 40)
        X = torch.randn(rows, features, generator=source, dtype=torch.float64)
        labels = (X[:, :5].sum(1) + torch.randn(rows, generator=source) > 0).long().numpy()
        model = BilevelLogisticRegression(cv=8, tether=1.0, max_iter=size)
        return lambda: [float(number) for number in (*model.fit(X.numpy(), labels).alpha_, *model.coef_[0])]
    if case == "trainings":
        from torch.utils.data import DataLoader, TensorDataset

        from bilevel.tuning import LearningRate, WeightDecay

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
        data = DataLoader(TensorDataset(x[:4096], y[:4096]), batch_size=512, shuffle=True)
        declared, val = [LearningRate(0.1, per="step"), WeightDecay(per="layer")], (x[4096:5120], y[4096:5120])
        call = {"steps": 60, "iterations": -(-size // 2), "runs": 4, "progress": False}
        return lambda: [float(r) for r in bl.tune(net, F.cross_entropy, declared, data, val, **call).values["lr"]]

    def error(w: list[Tensor], lam: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(F.linear(torch.tanh(F.linear(data[0], w[0])), w[1]), data[1])

    def penalised(w: list[Tensor], lam: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
        return error(w, lam, data) + (lam.exp() * torch.stack([part.square().sum() for part in w])).sum()

    width = 128 if case == "minibatches" else 64
    start = [torch.randn(width, 784, generator=source) / 28, torch.randn(10, width, generator=source) / width**0.5]
    problem, lam = bl.Problem(penalised, error, init=lambda lam: list(start)), torch.full((2,), -2.0)
    if case in ("minibatches", "small minibatches"):
        half, batch, iterations = (16384, 4096, 10 * size) if case == "minibatches" else (4096, 1024, 20 * size)
        train, val = (bl.Minibatches((x[rows], y[rows]), batch) for rows in (slice(half), slice(half, 2 * half)))
        task = bl.Task(bl.shards(train, 4), bl.shards(val, 4))
        algorithm = bl.SOBA(inner_lr=0.05, outer_lr=0.01)
        return lambda: bl.solve(problem, lam, task, algorithm=algorithm, iterations=iterations).outer.tolist()
    tasks = [bl.Task((x[i::8], y[i::8]), (x[i + 4 :: 8], y[i + 4 :: 8])) for i in range(4)]
    run = {"dynamics": bl.GradientDescent(0.05), "steps": 20, "method": bl.Reverse()}
    return lambda: bl.solve(problem, lam, tasks, iterations=size, **run).outer.tolist()


def main() -> None:
    import torch

    from bilevel.distributed import world

    if hasattr(os, "sched_setaffinity"):
        # Each process gets its own core. Otherwise the scheduler may place two processes on one core for a while.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    with world() as processes:
        prepare(sys.argv[1], 1)()
        seconds, busy, found = [], [], []
        for _ in range(int(sys.argv[3])):
            call = prepare(sys.argv[1], int(sys.argv[2]))
            # A barrier: all processes start at the same time.
            processes.any(False)
            began, worked = time.perf_counter(), time.process_time()
            found += call()
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
        if processes.writes:
            print(json.dumps({"seconds": seconds, "busy": busy, "digits": [number.hex() for number in found]}))


if __name__ == "__main__":
    main()
