"""One solver on one problem of benchmark_bilevel, timed until it reaches a target.

As a program: `python -m referee.arena CHECKOUT PROBLEM SEED SECONDS TARGET SOLVER …` prints a JSON object for
each. Ours and theirs go through the interface of benchopt: `set_objective` (compilation, not timed),
`run(callback)`, `get_result`. The clock stops while the callback evaluates, as in benchopt.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import pickle
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
# How the files of our solvers begin.
OURS = "bilevel_"
# Seconds besides those of the solver: for compilation, checks and evaluations.
PATIENCE = 25.0


@dataclass(frozen=True)
class Contest:
    """A problem of benchmark_bilevel.

    Attributes:
        dataset: the file of its data set.
        settings: those that differ from the data set's defaults.
        configs: files with the best settings of its solvers; later ones count.
        frequency: how many iterations of a solver pass between two calls of the callback.
    """

    dataset: str
    settings: dict[str, Any]
    configs: tuple[str, ...]
    frequency: dict[str, int]


PROBLEMS = {
    "quadratics": Contest("simulated", {}, ("quadratics_021424_best_params",), {"eval_freq": 16}),
    "logistic": Contest("ijcnn1", {}, ("ijcnn1_best_params", "ijcnn1_021424_best_params"), {"eval_freq": 512}),
    "cleaning": Contest("mnist", {"ratio": 0.5}, ("datacleaning0_5_best_params",), {"eval_freq": 64}),
}


def module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


def solver_file(checkout: Path, name: str) -> Path:
    """Ours if `referee/solvers` has it, and otherwise the file of the checkout."""
    ours = HERE / "solvers" / f"{name}.py"
    return ours if ours.exists() else checkout / "solvers" / f"{name}.py"


def objective(checkout: Path, problem: str, seed: int) -> Any:
    """The objective of benchmark_bilevel with the data of the problem."""
    for path in (HERE.parent, HERE / "data", checkout):
        sys.path.insert(0, str(path))
    os.environ["REFEREE_SEED"] = str(seed)
    kind, settings = module(checkout / "datasets" / f"{PROBLEMS[problem].dataset}.py", "data").Dataset, {}
    if "random_state" in kind.parameters:
        settings = {"random_state": 2442 + seed}
    if problem == "cleaning":
        _link_mnist()
    data = kind.get_instance(**PROBLEMS[problem].settings, **settings).get_data()
    judge = module(checkout / "objective.py", "objective").Objective.get_instance(random_state=2442 + seed)
    judge.set_data(**data)
    return judge


def _link_mnist() -> None:
    """Write the file that the data set reads instead of a download, from the files in BILEVEL_DATA."""
    import numpy as np

    if Path("mnist.pkl").exists():
        return
    root = Path(os.environ["BILEVEL_DATA"]) / "mnist"
    files = {"training": "train", "test": "t10k"}
    content = {}
    for key, name in files.items():
        with gzip.open(root / f"{name}-images-idx3-ubyte.gz") as file:
            content[f"{key}_images"] = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
        with gzip.open(root / f"{name}-labels-idx1-ubyte.gz") as file:
            content[f"{key}_labels"] = np.frombuffer(file.read(), np.uint8, offset=8)
    Path("mnist.pkl").write_bytes(pickle.dumps(content))


class Clock:
    """The callback: the processor time of the solver alone, and what the judge says at each call.

    Attributes:
        values: seconds, iterations and the metric, wherever the metric is better than before.
        losses: the same for the outer objective.
    """

    def __init__(self, judge: Any, solver: Any, seconds: float, target: float) -> None:
        self.judge, self.solver, self.seconds, self.target = judge, solver, seconds, target
        self.frequency = getattr(solver, "eval_freq", 1)
        self.values: list[list[float]] = []
        self.losses: list[list[float]] = []
        self.calls, self.spent, self.first, self.began = -1, 0.0, 0.0, time.process_time()

    def __call__(self) -> bool:
        import jax

        self.calls += 1
        result = jax.block_until_ready(self.solver.get_result()) if self.calls else None
        self.spent += time.process_time() - self.began
        if self.calls == 1:
            self.first = self.spent
        result = result or {"inner_var": self.judge.inner_var0, "outer_var": self.judge.outer_var0}
        value = float(self.judge.evaluate_result(**result)["value"])
        loss = float(self.judge.f_outer(**result, start=0, batch_size=self.judge.n_samples_outer))
        for best, found in ((self.values, value), (self.losses, loss)):
            rounded = float(f"{found:.6g}")
            if not best or rounded < best[-1][2]:
                best.append([round(self.spent, 5), self.iterations, rounded])
        going = self.spent < self.seconds and self.target < value < 1e6
        self.began = time.process_time()
        return going

    @property
    def iterations(self) -> int:
        return self.calls * self.frequency

    def report(self) -> dict[str, Any]:
        return {
            "values": self.values,
            "losses": self.losses,
            "seconds": round(self.spent, 4),
            "iterations": self.iterations,
            "per_iteration": (self.spent - self.first) / max(self.iterations - self.frequency, 1),
        }


def published(checkout: Path, problem: str) -> dict[str, dict[str, Any]]:
    """The best settings that benchmark_bilevel publishes for its solvers on this problem, by the file of the solver."""
    import yaml

    found: dict[str, dict[str, Any]] = {}
    for config in PROBLEMS[problem].configs:
        for line in yaml.safe_load((checkout / "config" / f"{config}.yml").read_text())["solver"]:
            name, _, words = line.partition("[")
            pairs = re.findall(r"(\w+)=([\w.+-]+)(?=[,\]])", words)
            # Settings of versions that had other solvers than JAX's.
            kept = {key: _number(value) for key, value in pairs if key not in ("framework", "init_memory", "eval_freq")}
            found[name.lower()] = {key: value for key, value in kept.items() if key != "random_state"}
    return found


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(checkout: Path, problem: str, judge: Any, name: str, seed: int, seconds: float, target: float) -> Any:
    """What one solver reached and when; the reason where it cannot run."""
    kind = module(solver_file(checkout, name), "solver").Solver
    settings = published(checkout, problem).get(name.removeprefix(OURS), {})
    given = {**settings, "random_state": 1 + seed, **PROBLEMS[problem].frequency}
    solver = kind.get_instance(**{key: value for key, value in given.items() if key in kind.parameters})
    clock = Clock(judge, solver, seconds, target)
    found = {"solver": name, "label": kind.name, "published": bool(settings)}
    skipped, reason = solver.skip(**judge.get_objective())
    if skipped:
        return {**found, "error": reason}
    began = time.process_time()
    # Some do not call back for minutes. This counts compilation and the judge's evaluations too.
    signal.setitimer(signal.ITIMER_PROF, 3 * seconds + PATIENCE)
    try:
        solver.set_objective(**judge.get_objective())
        clock.began = time.process_time()
        solver.run(clock)
    except Exception as error:  # a solver that this problem or version of JAX does not suit
        words = str(error).splitlines()
        # The judge raises a bare ValueError where λ is NaN.
        found["error"] = f"{type(error).__name__}: {words[0][:200]}" if words else "λ became NaN"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {**found, **clock.report(), "whole": round(time.process_time() - began, 2)}


def _give_up(number: int, frame: Any) -> None:
    raise TimeoutError(f"no answer within 3 times the time given and {PATIENCE:g} s")


if __name__ == "__main__":
    place, problem, seed, seconds, target, *names = sys.argv[1:]
    judge = objective(Path(place), problem, int(seed))
    signal.signal(signal.SIGPROF, _give_up)
    for name in names:
        answer = run(Path(place), problem, judge, name, int(seed), float(seconds), float(target))
        print(json.dumps(answer), flush=True)
