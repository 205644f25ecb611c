"""The outside referee: our solvers and those of benchmark_bilevel (benchopt) on its own problems."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.environments import NotInstalled, python_of, single_threaded

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.section import Bench
    from harness.tables import Table

ORDER = 90
TITLE = "The outside referee"
WHAT = """
The problems, metrics and solvers of benchmark_bilevel (benchopt), with the best settings that it publishes for each
solver, beside ours behind the same interface. `simulated` are its quadratics; the logistic problem has a penalty per
feature and rows of ijcnn1's sizes that are made locally; hyper-cleaning has 20,000 weights and half of the labels at
random. Processor time of the solver alone, one thread, without compilation, until the metric reaches the target:
‖∇h‖² ≤ 1e-6, or the least validation error that any of their solvers reaches in the time given. Medians over seeds.
"""
FETCH = (
    "Not measured: pass a checkout of github.com/benchopt/benchmark_bilevel with "
    "`python benchmarks/run.py --only referee --checkout PATH`."
)
REQUIREMENTS = ["benchopt", "jax", "jaxopt", "optax", "optuna", "torch", "scikit-learn", "pyyaml", "scipy", "optree"]
THEIRS = (
    *("saba", "soba", "srba", "stocbio", "amigo", "mrbo", "vrbo", "fsla", "f2sa", "bsa", "ttsa", "sustain", "bome"),
    *("pzobo", "jaxopt_gd", "jaxopt_itd", "optuna"),
)
OURS = {"quadratics": "bilevel_quadratic", "logistic": "bilevel_newton", "cleaning": "bilevel_cleaning"}
# Optuna proposes each of the 20,000 weights by itself and does not come back.
LEFT_OUT = {"cleaning": {"optuna"}}


def measure(bench: Bench) -> dict[str, Any]:
    checkout = os.environ.get("REFEREE_CHECKOUT")
    if not checkout or not Path(checkout, "objective.py").exists():
        return {"missing": FETCH}
    try:
        interpreter = os.environ.get("REFEREE_PYTHON") or str(python_of("referee", REQUIREMENTS))
    except NotInstalled as error:
        return {"missing": f"Not measured: {error}"}
    seeds, seconds = bench.pick(quick=(1, 5.0), full=(3, 30.0))
    found: dict[str, Any] = {"seconds": seconds, "seeds": seeds}
    for problem, ours in OURS.items():
        target = 0.0 if problem == "cleaning" else 1e-6
        names = [ours, *(name for name in THEIRS if name not in LEFT_OUT.get(problem, ()))]
        found[problem] = []
        for seed in range(seeds):
            words = [interpreter, "-m", "referee.arena", checkout, problem, str(seed), str(seconds), str(target)]
            found[problem] += [{**curve, "seed": seed} for curve in ask(bench, [*words, *names])]
            bench.tick(f"{problem}, seed {seed}", 1 / (seeds * len(OURS)))
    return found


def ask(bench: Bench, words: list[str]) -> list[dict[str, Any]]:
    """The curve of each solver, one process for all of them. A process that dies gives what it has printed."""
    home = Path(__file__).resolve().parents[1]
    environment = {**single_threaded(), "PYTHONPATH": os.pathsep.join([str(home.parent / "src"), str(home)])}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=bench.folder)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def reached(curves: list[dict[str, Any]], problem: str) -> dict[str, tuple[float | None, float]]:
    """By solver: median seconds to the target, None where it was not reached, and the median of the best value."""
    goal: dict[int, float] = {}
    for seed in {curve["seed"] for curve in curves}:
        rivals = [min(c["values"]) for c in curves if c["seed"] == seed and c["solver"] in THEIRS and c["values"]]
        goal[seed] = min(rivals, default=0.0) if problem == "cleaning" else 1e-6
    found = {}
    for name in dict.fromkeys(curve["solver"] for curve in curves if curve["values"]):
        mine = [curve for curve in curves if curve["solver"] == name and curve["values"]]
        times = [
            next((t for t, v in zip(c["times"], c["values"], strict=True) if v <= goal[c["seed"]]), float("inf"))
            for c in mine
        ]
        middle = statistics.median(times)
        best = statistics.median(min(curve["values"]) for curve in mine)
        found[name] = (middle if middle < float("inf") else None, best)
    return found


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table

    if "missing" in figures.stored:
        yield Table("Solvers", ["what is missing"], [[figures["missing"]]])
        return
    note = f"At most {figures['seconds']:g} s a solver, {figures['seeds']} seeds; processor time, one thread."
    for problem in OURS:
        rows = sorted(reached(figures[problem], problem).items(), key=lambda row: (row[1][0] or 1e9, row[1][1]))
        body = [[name, "not reached" if time is None else f"{time:.2f}", f"{best:.3g}"] for name, (time, best) in rows]
        yield Table(problem, ["solver", "seconds to the target", "best value"], body, note)
