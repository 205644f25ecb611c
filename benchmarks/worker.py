"""The process of one contestant: `python worker.py contestants/NAME.py` answers requests, one JSON object per line.

    {"do": "hello", "packages": [...]}        → {"versions": {...}}
    {"do": "load", "case": "path.npz"}        → {"first": seconds, "warm": seconds}, or {"unavailable": "why"}
    {"do": "run", "case": "name", "times": k} → {"seconds": [...], "gradient": [...]}

`first` is the time of the first call, including preparation and compilation. `warm` is the time of a later call. The
answer to a failed request has the key "error".
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness.contract import Case, Run, Unavailable


def load_contestant(path: Path) -> Callable[[Case], Run]:
    """Load the contestant's `prepare` by path, because its file may have the same name as a package that it imports."""
    spec = importlib.util.spec_from_file_location(f"contestant_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prepare: Callable[[Case], Run] = module.prepare
    return prepare


def timed(run: Run, threads: int) -> tuple[float, Any]:
    """The seconds of a call and its result.

    With one thread this is processor time, which other programs do not change. With several it is wall-clock time.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    started = clock()
    result = run()
    return clock() - started, result


# The cores that this process may use.
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def use(cores: list[int]) -> None:
    """Run on these cores only.

    The kernel updates the processor time of a thread on another core only at intervals. Without this, the time of a
    library's own threads would be attributed to the wrong calls.
    """
    if cores:
        os.sched_setaffinity(0, cores)


class Answers:
    """The answers to requests, one method per kind of request."""

    def __init__(self, prepare: Callable[[Case], Run]) -> None:
        self.prepare = prepare
        self.runs: dict[str, tuple[Run, int]] = {}

    def hello(self, packages: list[str]) -> dict[str, Any]:
        return {"versions": {name: importlib.metadata.version(name) for name in packages}}

    def load(self, case: str) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            loaded = Case.load(Path(case))
            use(CORES[-loaded.threads :])
            run = self.prepare(loaded)
            run()
        except Unavailable as reason:
            return {"unavailable": str(reason)}
        first = time.perf_counter() - began
        self.runs[Path(case).stem] = run, loaded.threads
        return {"first": first, "warm": min(timed(run, loaded.threads)[0] for _ in range(3))}

    def run(self, case: str, times: int) -> dict[str, Any]:
        gc.collect()
        seconds = []
        for _ in range(times):
            elapsed, result = timed(*self.runs[case])
            seconds.append(elapsed)
        gradient = np.concatenate([np.asarray(leaf).ravel() for leaf in result])
        return {"seconds": seconds, "gradient": gradient.tolist()}


def main() -> None:
    # Redirect the output of libraries to stderr, so that stdout has answers only.
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    use(CORES[-1:])  # before a library starts its threads, because threads inherit the setting
    answers: Answers | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answers = answers or Answers(load_contestant(Path(sys.argv[1])))
            reply = getattr(answers, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=pipe, flush=True)


if __name__ == "__main__":
    main()
