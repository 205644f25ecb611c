"""Time solvers on one problem of benchmark_bilevel, each until it reaches a target.

As a program: `python -m referee.arena CHECKOUT PROBLEM SEED SECONDS TARGET SOLVER …` prints a JSON object for each
solver. Our solvers and those of benchmark_bilevel have the same interface, that of benchopt: `set_objective`
(compilation, not timed), `run(callback)` and `get_result`. The evaluations in the callback are not timed, as in
benchopt.
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
# The prefix of the file names of our solvers.
OURS = "bilevel_"
# Seconds that a solver may take in addition to its own, for compilation, checks and evaluations.
EXTRA_SECONDS = 25.0


@dataclass(frozen=True)
class ProblemSettings:
    """A problem of benchmark_bilevel.

    Attributes:
        dataset: the file of its data set.
        settings: the settings of the data set that differ from its defaults.
        configs: files with the best settings of its solvers. Later files override earlier ones.
        frequency: the setting for the number of iterations between two calls of the callback.
    """

    dataset: str
    settings: dict[str, Any]
    configs: tuple[str, ...]
    frequency: dict[str, int]


PROBLEMS = {
    "quadratics": ProblemSettings("simulated", {}, ("quadratics_021424_best_params",), {"eval_freq": 16}),
    "logistic": ProblemSettings("ijcnn1", {}, ("ijcnn1_best_params", "ijcnn1_021424_best_params"), {"eval_freq": 512}),
    "cleaning": ProblemSettings("mnist", {"ratio": 0.5}, ("datacleaning0_5_best_params",), {"eval_freq": 64}),
}


def module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


def solver_file(checkout: Path, name: str) -> Path:
    """The file in `referee/solvers` if there is one, and otherwise the file of the checkout."""
    ours = HERE / "solvers" / f"{name}.py"
    return ours if ours.exists() else checkout / "solvers" / f"{name}.py"


def objective(checkout: Path, problem: str, seed: int) -> Any:
    """The `Objective` of benchmark_bilevel with the data of the problem. It evaluates results."""
    for path in (HERE.parent, HERE / "data", checkout):
        sys.path.insert(0, str(path))
    os.environ["REFEREE_SEED"] = str(seed)
    kind, settings = module(checkout / "datasets" / f"{PROBLEMS[problem].dataset}.py", "data").Dataset, {}
    if "random_state" in kind.parameters:
        settings = {"random_state": 2442 + seed}
    if problem == "cleaning":
        _write_mnist()
    data = kind.get_instance(**PROBLEMS[problem].settings, **settings).get_data()
    evaluator = module(checkout / "objective.py", "objective").Objective.get_instance(random_state=2442 + seed)
    evaluator.set_data(**data)
    return evaluator


def _write_mnist() -> None:
    """Write the file that the data set would download, from the files in BILEVEL_DATA."""
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


class TimedCallback:
    """The callback of a solver. It measures the processor time of the solver alone and evaluates its results.

    Attributes:
        values: [seconds, iterations, metric] for every evaluation at which the metric improved.
        losses: the same for the outer objective.
    """

    def __init__(self, evaluator: Any, solver: Any, seconds: float, target: float) -> None:
        self.evaluator, self.solver, self.seconds, self.target = evaluator, solver, seconds, target
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
        result = result or {"inner_var": self.evaluator.inner_var0, "outer_var": self.evaluator.outer_var0}
        value = float(self.evaluator.evaluate_result(**result)["value"])
        loss = float(self.evaluator.f_outer(**result, start=0, batch_size=self.evaluator.n_samples_outer))
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
    """The best settings that benchmark_bilevel publishes for its solvers on this problem, by the solver's file name."""
    import yaml

    found: dict[str, dict[str, Any]] = {}
    for config in PROBLEMS[problem].configs:
        for line in yaml.safe_load((checkout / "config" / f"{config}.yml").read_text())["solver"]:
            name, _, words = line.partition("[")
            pairs = re.findall(r"(\w+)=([\w.+-]+)(?=[,\]])", words)
            # These are settings of older versions, which also had solvers without JAX.
            kept = {key: _number(value) for key, value in pairs if key not in ("framework", "init_memory", "eval_freq")}
            found[name.lower()] = {key: value for key, value in kept.items() if key != "random_state"}
    return found


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(checkout: Path, problem: str, evaluator: Any, name: str, seed: int, seconds: float, target: float) -> Any:
    """The values that one solver reached and their times, or the reason if it cannot run."""
    kind = module(solver_file(checkout, name), "solver").Solver
    settings = published(checkout, problem).get(name.removeprefix(OURS), {})
    given = {**settings, "random_state": 1 + seed, **PROBLEMS[problem].frequency}
    solver = kind.get_instance(**{key: value for key, value in given.items() if key in kind.parameters})
    callback = TimedCallback(evaluator, solver, seconds, target)
    found = {"solver": name, "label": kind.name, "published": bool(settings)}
    skipped, reason = solver.skip(**evaluator.get_objective())
    if skipped:
        return {**found, "error": reason}
    began = time.process_time()
    # A time limit, because some solvers do not call the callback for minutes. It includes compilation and evaluations.
    signal.setitimer(signal.ITIMER_PROF, 3 * seconds + EXTRA_SECONDS)
    try:
        solver.set_objective(**evaluator.get_objective())
        callback.began = time.process_time()
        solver.run(callback)
    except Exception as error:  # a solver may fail on this problem or with this version of JAX
        words = str(error).splitlines()
        # The objective raises a ValueError without a message if λ is NaN.
        found["error"] = f"{type(error).__name__}: {words[0][:200]}" if words else "λ became NaN"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {**found, **callback.report(), "whole": round(time.process_time() - began, 2)}


def _time_out(number: int, frame: Any) -> None:
    raise TimeoutError(f"not finished within 3 times the given time plus {EXTRA_SECONDS:g} s")


if __name__ == "__main__":
    place, problem, seed, seconds, target, *names = sys.argv[1:]
    evaluator = objective(Path(place), problem, int(seed))
    signal.signal(signal.SIGPROF, _time_out)
    for name in names:
        answer = run(Path(place), problem, evaluator, name, int(seed), float(seconds), float(target))
        print(json.dumps(answer), flush=True)
