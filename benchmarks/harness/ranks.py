"""Throughput of a training with one and with two processes, and what sampling takes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from harness.cases import dataset
from harness.contestants import BENCHMARKS, WorkerError
from harness.environments import single_threaded

RANKS = (1, 2)


@dataclass(frozen=True)
class Throughput:
    """The seconds of a hyperiteration and of drawing its episodes, for so many processes; `runs` has the best of each
    run."""

    ranks: int
    seconds: float
    sampling: float
    runs: list[float]


def measure_ranks(steps: int, repeats: int, tick: Callable[[str, float], None]) -> list[Throughput]:
    """By turns, like everything else."""
    answers: dict[int, list[dict[str, list[float]]]] = {ranks: [] for ranks in RANKS}
    for _ in range(repeats):
        for ranks in RANKS:
            answers[ranks].append(_probe(ranks, steps))
            tick(f"training with {ranks} process{'es' * (ranks > 1)}", 1 / (repeats * len(RANKS)))
    found = []
    for ranks, replies in answers.items():
        runs = [min(reply["seconds"]) for reply in replies]
        found.append(Throughput(ranks, min(runs), min(min(reply["sampling"]) for reply in replies), runs))
    return found


def _probe(ranks: int, steps: int) -> dict[str, list[float]]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *start, str(BENCHMARKS / "ranks_probe.py"), dataset(), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=single_threaded())
    if done.returncode:
        raise WorkerError(f"The training with {ranks} processes failed:\n{done.stderr[-3000:]}")
    reply: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return reply
