"""The memory of one method at one T, measured in this fresh process: `python memory_probe.py case.npz METHOD`.

The peak of the resident memory during the run is held against what is resident after a warm-up with T = 3, so that the
interpreter, torch, the data and a single step's workspace do not count. Prints one JSON object.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch

import bilevel as bl
from harness.contract import Case
from problems.in_bilevel import problem_of

METHODS: dict[str, bl.Method] = {
    "Unrolled": bl.Unrolled(),
    # Every iterate is kept and every step replayed by itself: small steps are not recorded together here, because it is
    # the memory of the iterates that is asked about.
    "Reverse": bl.Reverse(group_bytes=0),
    "Reverse('sqrt')": bl.Reverse("sqrt", group_bytes=0),
    "Forward": bl.Forward(),
    "Reversible": bl.Reversible(),
}


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (its peak) in bytes; where there is no /proc, the peak since the process began for both."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Let the kernel's peak start again from the present, so that importing torch is not in it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak includes what was resident before the run", file=sys.stderr)


def main() -> None:
    torch.set_num_threads(1)
    case, method = Case.load(Path(sys.argv[1])), METHODS[sys.argv[2]]
    problem, lam, task = problem_of(case)
    # Heavy ball for all of them, because Reversible can undo nothing else.
    dynamics = bl.HeavyBall(case.lr / 10, 0.9)
    # Three steps, so that one is replayed: torch imports more of itself when a gradient is first pulled back.
    for _ in range(2):
        bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=3, method=method)
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    began = time.perf_counter()
    hg = bl.hypergradient(problem, lam, task, dynamics=dynamics, steps=case.steps, method=method)
    seconds = time.perf_counter() - began
    peak = resident("VmHWM") - before
    gradient = np.concatenate([leaf.numpy().ravel() for leaf in hg.grad]).tolist()
    print(json.dumps({"rss": max(peak, 0), "stats": hg.stats.peak_memory, "seconds": seconds, "gradient": gradient}))


if __name__ == "__main__":
    main()
