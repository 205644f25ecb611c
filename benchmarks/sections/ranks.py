"""A training by one and by two processes.

As a program: `torchrun … -m sections.ranks DATASET ITERATIONS`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from harness import probe
from harness.cases import EPISODES, QUERIES, SHOTS, WAYS, dataset

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.section import Bench
    from harness.tables import Table
    from harness.targets import Target

ORDER = 60
TITLE = "Training by several processes"
WHAT = """
`torchrun -m bilevel train` with one process and with two. The processes share the same 16 episodes per hyperiteration.
Each process has its own core and one thread. The times include the update of λ, the exchange of hypergradients and the
sampling of episodes, so two processes cannot be quite twice as fast.
"""

RANKS = (1, 2)
WARM_UP = 2


@dataclass(frozen=True)
class Throughput:
    """The best times of a training with `ranks` processes.

    Attributes:
        seconds: wall-clock time of a hyperiteration.
        sampling: wall-clock time of sampling its episodes.
        runs: the best `seconds` of each run.
        busy: processor time of a hyperiteration in the first process. Other programs do not change it.
    """

    ranks: int
    seconds: float
    sampling: float
    runs: list[float]
    busy: float | None = None


def measure(bench: Bench) -> dict[str, Any]:
    iterations, repeats = bench.pick(quick=(5, 1), full=(20, 3))
    answers: dict[int, list[dict[str, list[float]]]] = {ranks: [] for ranks in RANKS}
    for _ in range(repeats):
        for ranks in RANKS:
            launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
            answers[ranks].append(probe.ask("ranks", dataset(), iterations, launcher=launcher))
            bench.tick(f"training with {ranks} process{'es' * (ranks > 1)}", 1 / (repeats * len(RANKS)))
    found = []
    for ranks, replies in answers.items():
        runs, sampling, busy = ([min(reply[key]) for reply in replies] for key in ("seconds", "sampling", "busy"))
        found.append(Throughput(ranks, min(runs), min(sampling), runs, min(busy)))
    return {"ranks": [asdict(row) for row in found], "dataset": dataset()}


def targets(figures: Figures) -> Iterator[Target]:
    from harness.targets import Target

    found = {row.ranks: row for row in figures.rows(Throughput, "ranks")}
    alone, two = found[1], found[2]
    speedup = alone.seconds / two.seconds
    words = f"{speedup:.2f}: {alone.seconds * 1e3:.0f} and {two.seconds * 1e3:.0f} ms"
    note = ""
    if two.busy is not None and two.seconds > 1.1 * two.busy:
        note = (
            f"With two processes, the first one was busy for {two.busy * 1e3:.0f} of the {two.seconds * 1e3:.0f} ms. "
            f"For the rest it waited for the other process, or for a core that another program used. In processor "
            f"time, two processes are {(alone.busy or alone.seconds) / two.busy:.2f} times faster."
        )
    claim = "two processes at least 1.7 times faster"
    yield Target(claim, "ranks", speedup, 1.7, words, at_least=True, limit_note=note)
    words = f"{alone.sampling * 1e3:.2f} of {alone.seconds * 1e3:.0f} ms"
    yield Target("sampling under 3 % of a hyperiteration", "ranks", alone.sampling / alone.seconds, 0.03, words)


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table, milliseconds

    found = figures.rows(Throughput, "ranks")
    images = EPISODES * WAYS * (SHOTS + QUERIES)
    rows = [
        [
            str(f.ranks),
            milliseconds(f.seconds),
            milliseconds(f.busy) if f.busy else "–",
            f"{images / f.seconds:,.0f}",
            f"{found[0].seconds / f.seconds:.2f}",
        ]
        for f in found
    ]
    note = f"{EPISODES} episodes of {figures['dataset']} per hyperiteration in total, T = 5 (torchrun, gloo)."
    columns = ["processes", "hyperiteration, ms", "busy, ms", "images per second", "speed-up"]
    yield Table("Throughput", columns, rows, note)


def main() -> None:
    import torch

    from bilevel.distributed import world
    from bilevel.learners.settings import TrainingSettings
    from bilevel.learners.streams import open_data
    from bilevel.learners.training import FewShotTraining

    if hasattr(os, "sched_setaffinity"):
        # Each process gets its own core. Otherwise the scheduler may place two processes on one core for a while.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    iterations = int(sys.argv[2])
    settings = TrainingSettings(dataset=sys.argv[1], meta_batch=EPISODES, step_bound=0.0)
    with world() as processes:
        training = FewShotTraining(settings, open_data(settings), processes)
        seconds, busy, sampling = [], [], []
        for iteration in range(1, iterations + WARM_UP + 1):
            began, worked = time.perf_counter(), time.process_time()
            training.step(iteration)
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
        size = training.learner.group_size(EPISODES)
        for iteration in range(1, iterations + 1):
            began = time.perf_counter()
            for group in processes.share(training.stream.groups(iteration, size)):
                training.stream.draw(group)
            sampling.append(time.perf_counter() - began)
        if processes.writes:
            print(json.dumps({"seconds": seconds[WARM_UP:], "busy": busy[WARM_UP:], "sampling": sampling}))


if __name__ == "__main__":
    main()
