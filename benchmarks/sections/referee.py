"""An independent benchmark, the "referee": our solvers and those of benchmark_bilevel (benchopt) on its problems.

A full run takes about 20 minutes. Results are stored in `.bench/referee_runs.jsonl`, so a run can be interrupted. They
are used again while the package and `referee/` are unchanged. `--minutes 10` starts no solver after 10 minutes.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.environments import FOLDER, ROOT, NotInstalled, python_of, single_threaded
from harness.timing import TOLERANCE, Disagreement

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.pictures import Picture
    from harness.section import Bench
    from harness.tables import Table
    from harness.targets import Target

ORDER = 90
TITLE = "An independent benchmark: benchmark_bilevel"
WHAT = """
The problems, metrics and solvers of benchmark_bilevel (benchopt), here called the referee, and our solvers behind the
same interface. Its solvers have the best settings that it publishes, or else its defaults. There are three problems.
*quadratics* is its data set `simulated`. *logistic* is a logistic regression with one penalty per feature; its rows are
generated locally in the sizes of ijcnn1. *cleaning* is hyper-cleaning with 20,000 example weights, where half of the
labels are random. Seconds are processor time of the solver alone, with one thread and without compilation and checks,
until the metric reaches the target. The target is ‖∇h‖² ≤ 1e-6 or, for cleaning, the least validation error that any
of the referee's solvers reaches in the given time. Times are medians over seeds. A full run has three seeds: the first
with all solvers, the others with the five best single-loop solvers of ours and the five best of the referee's. The
tables show the number of seeds of each solver, and which of the referee's solvers were not measured. "Ours, single
loop" are our single-loop algorithms with the referee's settings. "Ours, structure" are methods that use the structure
of the problem. One of these minimises another outer objective, the cross-entropy of twice the scores, because the
referee's metric is the validation error and not its outer objective. Before the measurement, the objectives in torch
are compared with those of the referee.
"""
FETCH = (
    "Not measured: pass a checkout of github.com/benchopt/benchmark_bilevel with "
    "`python benchmarks/run.py --only referee --checkout PATH`."
)
MNIST = "Not measured: hyper-cleaning reads MNIST from the folder `mnist` of the data root; set BILEVEL_DATA."
REQUIREMENTS = ["benchopt", "jax", "jaxopt", "optax", "optuna", "scikit-learn", "pyyaml"]
REQUIREMENTS += ["torch", "optree", "scipy", "typing_extensions", "lazy_loader"]
THEIRS = (
    *("saba", "soba", "srba", "stocbio", "amigo", "mrbo", "vrbo", "fsla", "f2sa", "bsa", "ttsa", "sustain", "bome"),
    *("pzobo", "jaxopt_gd", "jaxopt_itd", "optuna"),
)
QUICK = ("saba", "srba")
LOOPS = tuple(
    f"bilevel_{name}" for name in ("saba", "soba", "srba", "stocbio", "amigo", "mrbo", "ttsa", "sustain", "bome")
)
SHARP = "bilevel_cleaning_sharp"
STRUCTURES = {
    "quadratics": ("bilevel_quadratic",),
    "logistic": ("bilevel_newton",),
    "cleaning": ("bilevel_cleaning", SHARP),
}
SECONDS = {"quadratics": 8.0, "logistic": 1.0, "cleaning": 5.0}
# How many of the referee's solvers, and of our single-loop solvers, run with the second and third seed.
BEST = 5
DIED = "its process ended without an answer"
GRADIENT = 1e-6


@dataclass(frozen=True)
class Run:
    """The result of one solver on one problem and seed.

    Attributes:
        values: [seconds, iterations, metric] for every evaluation at which the metric improved.
        losses: the same for the outer objective.
        per_iteration: seconds per iteration, measured from the first call of the callback.
        whole: seconds including compilation and the evaluations of the metric.
        error: the reason if the solver failed.
    """

    problem: str
    seed: int
    solver: str
    label: str
    published: bool = False
    values: list[list[float]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    iterations: int = 0
    per_iteration: float = 0.0
    whole: float = 0.0
    error: str = ""

    @property
    def group(self) -> str:
        if self.solver in THEIRS:
            return "benchmark_bilevel"
        return "ours, single loop" if self.solver in LOOPS else "ours, structure"


def measure(bench: Bench) -> dict[str, Any]:
    checkout = os.environ.get("REFEREE_CHECKOUT")
    if not checkout or not Path(checkout, "objective.py").exists():
        return {"missing": FETCH}
    try:
        interpreter = os.environ.get("REFEREE_PYTHON") or str(python_of("referee", REQUIREMENTS))
    except NotInstalled as error:
        return {"missing": f"Not measured: {error}"}
    end = time.monotonic() + 60 * float(os.environ.get("REFEREE_MINUTES", "inf"))
    problems = [problem for problem in STRUCTURES if problem != "cleaning" or os.environ.get("BILEVEL_DATA")]
    apart = compared(bench.folder / "compared", [interpreter, "-m", "referee.objectives", checkout, *problems])
    bench.tick("objectives compared", 0.1)
    seeds, share = bench.pick(quick=(1, 0.25), full=(3, 1.0))
    single, theirs = bench.pick(quick=(LOOPS[:1], QUICK), full=(LOOPS, THEIRS))
    store = RunStore(bench.folder / "runs.jsonl" if bench.quick else FOLDER / "referee_runs.jsonl", fingerprint())
    contest = Contest([interpreter, "-m", "referee.arena", checkout], bench.folder / "arena", store, share, end)
    # The first seed of all problems is measured before the second seed of any.
    for seed in range(seeds):
        for problem in problems:
            names = [*STRUCTURES[problem], *solvers(problem, seed, store, single, theirs)]
            for name in contest.measured(problem, seed, names):
                bench.tick(f"{problem}, seed {seed}: {name}", 0.9 / (seeds * len(problems) * len(names)))
    seconds = {problem: share * SECONDS[problem] for problem in problems}
    return {"apart": apart, "seeds": seeds, "seconds": seconds, "runs": [asdict(run) for run in store.runs]}


def solvers(problem: str, seed: int, store: RunStore, single: tuple[str, ...], theirs: tuple[str, ...]) -> list[str]:
    """Our single-loop solvers and the referee's, sorted so that counterparts are neighbours.

    After the first seed, only the best solvers of the first seed.
    """
    if seed:
        first = [run for run in store.runs if (run.problem, run.seed) == (problem, 0) and run.values]
        single, theirs = (best(first, names) for names in (single, theirs))
    return sorted((*single, *theirs), key=lambda name: THEIRS.index(name.removeprefix("bilevel_")))


def fingerprint() -> str:
    """A text that changes if the package or `benchmarks/referee` changes: their git trees and uncommitted changes."""
    places = ("src", "benchmarks/referee")

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout

    return " ".join(git("rev-parse", *(f"HEAD:{place}" for place in places)).split()) + git("diff", "HEAD", *places)


class RunStore:
    """The runs in a file that have the same fingerprint. `add` appends a run to the file at once."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        self.runs = [Run(**line["run"]) for line in found if line["fingerprint"] == fingerprint]

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"fingerprint": self.fingerprint, "run": asdict(run)}) + "\n")

    def has(self, problem: str, seed: int, solver: str) -> bool:
        return any((run.problem, run.seed, run.solver) == (problem, seed, solver) for run in self.runs)


@dataclass(frozen=True)
class Contest:
    """Runs solvers in processes of `referee.arena`.

    Attributes:
        words: the command, without the problem and the solvers.
        folder: the working directory of the processes.
        store: the stored runs.
        share: the share of `SECONDS` that a solver has.
        end: no solver is started after this time of `time.monotonic`.
    """

    words: list[str]
    folder: Path
    store: RunStore
    share: float = 1.0
    end: float = math.inf

    def measured(self, problem: str, seed: int, names: list[str]) -> Iterator[str]:
        """Run the solvers that have no stored run. Yields the name of every solver whose run is stored."""
        open_names = [name for name in names if not self.store.has(problem, seed, name)]
        yield from (name for name in names if name not in open_names)
        target = 0.0 if problem == "cleaning" else GRADIENT
        first = [*self.words, problem, str(seed), str(self.share * SECONDS[problem]), str(target)]
        while open_names and time.monotonic() < self.end:
            for found in ask(self.folder, [*first, *open_names]):
                open_names.remove(found["solver"])
                yield self._keep(problem, seed, found)
                if time.monotonic() >= self.end:
                    return
            if open_names:
                name = open_names.pop(0)
                yield self._keep(problem, seed, {"solver": name, "label": name, "error": DIED})

    def _keep(self, problem: str, seed: int, found: dict[str, Any]) -> str:
        self.store.add(Run(problem, seed, **found))
        return str(found["solver"])


def best(runs: list[Run], names: tuple[str, ...]) -> tuple[str, ...]:
    """The solvers with the best values. Among equal values, the faster ones come first."""
    found = sorted((run for run in runs if run.solver in names), key=lambda run: (run.values[-1][2], run.values[-1][0]))
    return tuple(run.solver for run in found[:BEST])


def compared(folder: Path, words: list[str]) -> dict[str, float]:
    """For each problem, the largest relative difference between our objectives in torch and the referee's in JAX."""
    apart = {found["problem"]: found["apart"] for found in ask(folder, words)}
    for problem in words[4:]:
        if not apart.get(problem, math.inf) <= TOLERANCE:
            found = apart.get(problem, "not computed")
            raise Disagreement(
                f"The objectives of {problem} in torch and the referee's differ: {found}, allowed {TOLERANCE:g}. "
                f"To see the output of the comparison, run `{' '.join(words)}`."
            )
    return apart


def ask(folder: Path, words: list[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects that a process prints, one per line. If the process dies, those that it printed before."""
    home = Path(__file__).resolve().parents[1]
    environment = {**single_threaded(), "PYTHONPATH": os.pathsep.join([str(home.parent / "src"), str(home)])}
    folder.mkdir(exist_ok=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(words, env=environment, cwd=folder, **pipes) as process:
        assert process.stdout is not None
        try:
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
        finally:
            # The caller may stop before the process has ended.
            process.terminate()


@dataclass(frozen=True)
class Summary:
    """Medians over seeds of one solver on one problem. Times are infinite if the goal was not reached."""

    run: Run
    seconds: float
    iterations: float
    best: float
    loss_seconds: float
    loss: float
    per_iteration: float
    seeds: int

    @staticmethod
    def of(runs: list[Run], goals: dict[int, float], loss_goals: dict[int, float]) -> Summary:
        firsts = [first(run.values, goals[run.seed]) for run in runs]
        return Summary(
            runs[0],
            statistics.median(seconds for seconds, _ in firsts),
            statistics.median(iterations for _, iterations in firsts),
            statistics.median(run.values[-1][2] for run in runs),
            statistics.median(first(run.losses, loss_goals[run.seed])[0] for run in runs),
            statistics.median(run.losses[-1][2] for run in runs),
            statistics.median(run.per_iteration for run in runs),
            len(runs),
        )


def first(curve: list[list[float]], goal: float) -> tuple[float, float]:
    """The seconds and iterations after which the goal is reached, or infinity."""
    return next(((time, count) for time, count, value in curve if value <= goal), (math.inf, math.inf))


def summaries(figures: Figures, problem: str) -> dict[str, Summary]:
    """The summaries of a problem by solver, the fastest first."""
    runs = [run for run in figures.rows(Run, "runs") if run.problem == problem and run.values]
    seeds = {run.seed for run in runs}
    rivals = {seed: [run for run in runs if run.seed == seed and run.solver in THEIRS] for seed in seeds}
    least = {s: min((run.values[-1][2] for run in rivals[s]), default=math.inf) for s in seeds}
    goals = least if problem == "cleaning" else dict.fromkeys(seeds, GRADIENT)
    loss_goals = {s: min((run.losses[-1][2] for run in rivals[s]), default=math.inf) for s in seeds}
    by_solver: dict[str, list[Run]] = {}
    for run in runs:
        by_solver.setdefault(run.solver, []).append(run)
    found = [Summary.of(some, goals, loss_goals) for some in by_solver.values()]
    return {s.run.solver: s for s in sorted(found, key=lambda s: (s.seconds, s.best))}


def targets(figures: Figures) -> Iterator[Target]:
    from harness.targets import Target

    if "missing" in figures.stored:
        return

    def fastest(found: dict[str, Summary], names: tuple[str, ...], key: str = "seconds") -> float:
        return min((getattr(found[name], key) for name in names if name in found), default=math.inf)

    def of(found: dict[str, Summary]) -> str:
        return f"the referee's solvers ({len(set(found) & set(THEIRS))} of {len(THEIRS)} measured)"

    def ratio(claim: str, case: str, ours: float, theirs: float, limit: float, faster: bool = False) -> Target:
        """A target for the time ours / theirs, or for theirs / ours if `faster`. `theirs` may be infinite."""
        value = theirs / ours if faster else ours / theirs
        if math.isinf(ours):
            return Target(claim, case, None, limit, "ours did not reach the goal", at_least=faster)
        reached = f"{theirs:.3g} s" if math.isfinite(theirs) else "did not reach the goal"
        words = f"ours {ours:.3g} s, the referee's {reached}"
        return Target(claim, case, value, limit, words, at_least=faster)

    if found := summaries(figures, "logistic"):
        ours, theirs = fastest(found, STRUCTURES["logistic"]), fastest(found, THEIRS)
        claim = f"time to ‖∇h‖² ≤ 1e-6 at most that of the fastest of {of(found)}"
        yield ratio(claim, "logistic", ours, theirs, 1.0)
    if found := summaries(figures, "cleaning"):
        ours, theirs = fastest(found, STRUCTURES["cleaning"]), fastest(found, THEIRS)
        claim = f"least validation error at least 1.5 times faster than {of(found)}"
        yield ratio(claim, "cleaning", ours, theirs, 1.5, True)
        same = fastest(found, STRUCTURES["cleaning"][:1], "loss_seconds")
        theirs = fastest(found, THEIRS, "loss_seconds")
        claim = f"least validation loss at least 1.5 times faster than {of(found)}"
        yield ratio(claim, "cleaning", same, theirs, 1.5, True)
    if found := summaries(figures, "quadratics"):
        ours, theirs = fastest(found, STRUCTURES["quadratics"]), fastest(found, ("saba",))
        yield ratio("time to ‖∇h‖² ≤ 1e-6 at most that of the referee's SABA", "quadratics", ours, theirs, 1.0)
        one, other = (found.get(name) for name in ("bilevel_saba", "saba"))
        if one and other:
            times = one.per_iteration, other.per_iteration
            words = f"{times[0] * 1e3:.2f} and {times[1] * 1e3:.2f} ms"
            claim = "an iteration of SABA within 3 times the referee's in JAX"
            yield Target(claim, "quadratics", times[0] / times[1], 3.0, words)


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table

    if "missing" in figures.stored:
        yield Table("Solvers", ["what is missing"], [[figures["missing"]]])
        return
    rows = [[problem, f"{apart:.1e}"] for problem, apart in figures["apart"].items()]
    note = "The largest relative difference of values and gradients, float64."
    yield Table("Objectives in torch and in JAX", ["problem", "difference"], rows, note)
    for problem, seconds in figures["seconds"].items():
        found = summaries(figures, problem)
        cleaning = problem == "cleaning"
        columns = ["solver", "whose", "seeds", "seconds to the target", "iterations", "ms per iteration", "best value"]
        columns += ["seconds to the referee's least loss", "least loss"] if cleaning else []
        body = []
        for s in found.values():
            more = [number(s.loss_seconds), f"{s.loss:.4f}"] if cleaning else []
            # With only one call of the callback, the time of an iteration is not known.
            best, each = f"{s.best:.4g}", f"{s.per_iteration * 1e3:.3g}" if s.per_iteration else "–"
            body.append(
                [s.run.label, s.run.group, str(s.seeds), number(s.seconds), number(s.iterations), each, best, *more]
            )
        failed = [run for run in figures.rows(Run, "runs") if run.problem == problem and run.error and run.seed == 0]
        note = f"At most {seconds:g} s per solver. Processor time, one thread."
        note += "".join(f" {run.label}: {run.error}." for run in failed)
        missing = set(THEIRS) - {run.solver for run in figures.rows(Run, "runs") if run.problem == problem}
        note += f" Not measured: {', '.join(sorted(missing))}." if missing else ""
        yield Table(problem, columns, body, note)
    if "cleaning" not in figures["seconds"]:
        yield Table("cleaning", ["what is missing"], [[MNIST]])


def number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) and value < 1000 else f"{value:,.0f}" if math.isfinite(value) else "–"


def pictures(figures: Figures) -> Iterator[Picture]:
    if "missing" in figures.stored:
        return
    import matplotlib.pyplot as plt

    from harness.pictures import Picture

    colours = {"benchmark_bilevel": "#b8b8b8", "ours, single loop": "#4aa3c7", "ours, structure": "#1f5fa8"}
    problems = list(figures["seconds"])
    figure, axes = plt.subplots(1, len(problems), figsize=(4.6 * len(problems), 3.6), squeeze=False)
    for axis, problem in zip(axes[0], problems, strict=True):
        for run in figures.rows(Run, "runs"):
            if run.problem == problem and run.seed == 0 and len(run.values) > 1:
                # Without the value at the start, and extended to the end of the run.
                times, _, values = zip(*run.values[1:], [run.seconds, 0, run.values[-1][2]], strict=True)
                ours = run.group != "benchmark_bilevel"
                look = {"lw": 1.6, "zorder": 2, "marker": "o", "ms": 3} if ours else {"lw": 0.9, "zorder": 1}
                axis.step(times, values, where="post", color=colours[run.group], **look)
        error = problem == "cleaning"
        axis.set(xscale="log", yscale="linear" if error else "log", title=problem, xlabel="seconds of processor time")
        axis.set_ylabel("validation error" if error else "‖∇h‖²")
        axis.set_ylim(top=0.25) if error else None
    handles = [plt.Line2D([], [], color=colour, lw=1.6) for colour in colours.values()]
    figure.legend(handles, list(colours), ncol=3, loc="lower center", bbox_to_anchor=(0.5, -0.06), frameon=False)
    figure.tight_layout()
    yield Picture("referee.png", "The best value so far of each solver against its processor time", figure)
