"""Measurements that need a fresh process: memory, start-up, several ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from harness.contestants import BENCHMARKS, WorkerError
from harness.environments import single_threaded


def ask(section: str, *words: str | int, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the file of a section as a program with these arguments, and return the JSON object of its last line.

    Args:
        launcher: arguments of python that start the program, for example `("-m", "torch.distributed.run", …)`.
    """
    command = [sys.executable, *launcher, "-m", f"sections.{section}", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=single_threaded(), cwd=BENCHMARKS)
    if done.returncode:
        raise WorkerError(f"The probe {section} {' '.join(map(str, words))} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer
