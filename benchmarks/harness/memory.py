"""Peak memory against T, each figure from a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.cases import network
from harness.contestants import BENCHMARKS, WorkerError
from harness.environments import single_threaded
from harness.timing import TOLERANCE, Disagreement, distance

METHODS = ("Unrolled", "Reverse", "Reverse('sqrt')", "Forward", "Reversible")


@dataclass(frozen=True)
class Memory:
    """Bytes that a method needed at one T: `rss` as the operating system saw it (the smallest of `runs`), `stats` as
    the method counted its own."""

    method: str
    steps: int
    rss: int
    stats: int
    seconds: float
    runs: list[int]


def measure_memory(
    times: Sequence[int], repeats: int, folder: Path, tick: Callable[[str, float], None]
) -> list[Memory]:
    """Every method at every T, on the network with one hyperparameter for each layer, so that Forward can take part."""
    found = []
    for steps in times:
        path = network(steps, per_weight=False).save(folder)
        gradients: dict[str, np.ndarray] = {}
        for method in METHODS:
            answers = [_probe(path, method) for _ in range(repeats)]
            runs = [answer["rss"] for answer in answers]
            found.append(
                Memory(
                    method, steps, min(runs), answers[0]["stats"], min(answer["seconds"] for answer in answers), runs
                )
            )
            gradients[method] = np.array(answers[0]["gradient"])
            error = distance(gradients[method], gradients[METHODS[0]])
            if not error <= TOLERANCE:
                raise Disagreement(
                    f"{method} and {METHODS[0]} differ by {error:.2g} (relative) on the network at T = {steps}, "
                    f"allowed {TOLERANCE:g}."
                )
            tick(f"memory: {method}, T = {steps}", 1 / (len(times) * len(METHODS)))
    return found


def _probe(path: Path, method: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / "memory_probe.py"), str(path), method]
    done = subprocess.run(command, capture_output=True, text=True, env=single_threaded())
    if done.returncode:
        raise WorkerError(f"Measuring the memory of {method} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
