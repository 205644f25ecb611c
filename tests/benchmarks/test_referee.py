"""The outside referee, as far as it can be run without its checkout."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("harness", "sections", "referee", "benchopt"):
            del sys.modules[name]


@pytest.fixture
def interface(monkeypatch):
    """benchopt's base class and jax.numpy, as far as our solvers use them."""

    class BaseSolver:
        @classmethod
        def get_instance(cls, **settings):
            solver = cls()
            defaults = {name: values[0] for name, values in cls.parameters.items()}
            for name, value in {**defaults, **settings}.items():
                setattr(solver, name, value)
            return solver

        def run_once(self, stop_val):
            calls = iter(range(stop_val))
            self.run(lambda: next(calls, None) is not None)

    benchopt, criteria, jax = types.ModuleType("benchopt"), types.ModuleType("criteria"), types.ModuleType("jax")
    benchopt.BaseSolver, criteria.SufficientProgressCriterion = BaseSolver, lambda **settings: settings
    jax.numpy = types.ModuleType("jax.numpy")
    jax.numpy.asarray = np.asarray
    modules = {"benchopt": benchopt, "benchopt.stopping_criterion": criteria, "jax": jax, "jax.numpy": jax.numpy}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def jitted(function):
    """What jax.jit leaves: the function in `__wrapped__`."""
    return types.SimpleNamespace(__wrapped__=function)


def quadratics(samples=32, size=4):
    rng = np.random.default_rng(0)

    def level():
        roots = rng.normal(size=(2, samples, size, size)).astype("float32")
        hess_inner, hess_outer = roots @ roots.transpose(0, 1, 3, 2) / size + np.eye(size, dtype="float32")
        cross = 0.1 * rng.normal(size=(samples, size, size)).astype("float32")
        linear_inner, linear_outer = rng.normal(size=(2, samples, size)).astype("float32")

        def f(inner_var, outer_var):
            return hess_inner, hess_outer, cross, linear_inner, linear_outer

        return jitted(f), (hess_inner, hess_outer, cross, linear_inner, linear_outer)

    (f_inner, train), (f_outer, val) = level(), level()
    A, _, C, a, _ = (part.mean(0).astype(float) for part in train)
    D, B, F, d, b = (part.mean(0).astype(float) for part in val)

    def squared_slope(lam):
        """‖∇h‖² in closed form."""
        w = -np.linalg.solve(A, a + C.T @ lam)
        v = -np.linalg.solve(A, D @ w + F.T @ lam + d)
        return float(np.sum((B @ lam + F @ w + b + C @ v) ** 2))

    return objective(f_inner, f_outer, samples, samples, np.zeros(size), np.full(size, -2.0)), squared_slope


def tables(kind, rows=48, features=5, classes=3):
    rng = np.random.default_rng(1)
    X_train, X_val = rng.normal(size=(2, rows, features)).astype("float32")
    true = rng.normal(size=(features, classes))
    if kind == "logistic":
        y_train, y_val = (np.where(X @ true[:, 0] + rng.logistic(size=rows) > 0, 1.0, -1.0) for X in (X_train, X_val))
        start = rng.normal(size=features), np.log(rng.uniform(size=features))
    else:
        y_train, y_val = (np.eye(classes)[(X @ true).argmax(1)] for X in (X_train, X_val))
        y_train[: rows // 2] = np.eye(classes)[rng.integers(classes, size=rows // 2)]
        start = np.zeros(features * classes), np.full(rows, -2.0)
    self = types.SimpleNamespace(reg=0.2)

    def f_inner(inner_var, outer_var):
        return X_train, y_train, self

    def f_outer(inner_var, outer_var):
        return X_val, y_val

    return objective(jitted(f_inner), jitted(f_outer), rows, rows, *start)


def objective(f_inner, f_outer, inner, outer, w, lam):
    counts = {"n_inner_samples": inner, "n_outer_samples": outer}
    start = {"inner_var0": w.astype("float32"), "outer_var0": lam.astype("float32")}
    return {"f_inner": f_inner, "f_outer": f_outer, **counts, **start}


def solver_names():
    return sorted(path.stem for path in (BENCHMARKS / "referee" / "solvers").glob("bilevel_*.py"))


def run(name, given, calls, **settings):
    """The results that a benchopt callback sees, the start first."""
    from referee import arena

    kind = arena.module(BENCHMARKS / "referee" / "solvers" / f"{name}.py", "solver").Solver
    solver = kind.get_instance(**{k: v for k, v in settings.items() if k in kind.parameters})
    skipped, _ = solver.skip(**given)
    if skipped:
        return []
    solver.set_objective(**given)
    seen = []

    def callback():
        seen.append(solver.get_result())
        return len(seen) < calls

    solver.run(callback)
    return seen


def test_every_solver_of_the_section_is_a_file():
    from sections import referee

    assert set(referee.LOOPS) | {n for names in referee.STRUCTURES.values() for n in names} == set(solver_names())


@pytest.mark.parametrize("name", [n for n in solver_names() if "newton" not in n and "cleaning" not in n])
def test_solvers_of_quadratics_approach_the_minimiser(name, interface):
    given, squared_slope = quadratics()
    settings = {
        "step_size": 0.1,
        "batch_size": 16,
        "eval_freq": 8,
        "outer_ratio": 1.0,
        "n_inner_steps": 3,
        "n_shia_steps": 5,
    }
    seen = run(name, given, 14, **settings)
    first, last = (squared_slope(result["outer_var"].astype(float)) for result in (seen[0], seen[-1]))
    assert len(seen) == 14 and last < (1e-6 if name == "bilevel_quadratic" else 0.5 * first)


@pytest.mark.parametrize("name", ["bilevel_newton", "bilevel_cleaning", "bilevel_cleaning_sharp"])
def test_structured_solvers_minimise_the_referees_own_objective(name, interface):
    """w is the minimiser of the inner objective at the λ that is returned, and the outer loss falls."""
    from referee.objectives import bridged

    kind = "logistic" if name == "bilevel_newton" else "cleaning"
    given, (other, _) = tables(kind), quadratics()
    assert run(name, other, 2) == [], "a solver of another problem's must be skipped"
    seen = run(name, given, 8)
    ours = bridged(given["f_inner"], given["f_outer"])
    assert ours.kind == kind
    losses = []
    for result in seen[1:]:
        w, lam = (torch.from_numpy(result[k].copy()) for k in ("inner_var", "outer_var"))
        w.requires_grad_()
        (slope,) = torch.autograd.grad(ours.inner(w, lam, ours.train), [w])
        assert float(slope.norm()) < 0.05 * float(w.detach().norm())
        losses.append(float(ours.outer(w, lam, ours.val).detach()))
    assert min(losses) < losses[0]


def test_without_the_checkout_the_section_says_what_to_fetch(tmp_path, monkeypatch):
    from harness import report, section
    from harness.pool import Pool
    from harness.results import Results

    monkeypatch.delenv("REFEREE_CHECKOUT", raising=False)
    found = section.find()
    results = Results(tmp_path)
    bench = section.Bench(Pool([], True), True, tmp_path, lambda what, amount: None)
    results.put("referee", found["referee"].measure(bench), quick=True)
    report.write(results, found)
    assert "github.com/benchopt/benchmark_bilevel" in (tmp_path / "RESULTS.md").read_text()
    assert not list(tmp_path.glob("*.png"))


def test_times_to_the_goal_are_medians_over_seeds():
    from harness.figures import Figures
    from sections import referee

    def one(solver, seed, values, losses, seconds=4.0):
        rest = {"values": values, "losses": losses, "seconds": seconds, "iterations": 8}
        return {"problem": "cleaning", "seed": seed, "solver": solver, "label": solver, **rest}

    runs = []
    for seed, late in enumerate((1.0, 2.0, 9.0)):
        runs.append(one("srba", seed, [[0, 0, 0.9], [late, 4, 0.13]], [[0, 0, 2.3], [late, 4, 0.9]]))
        runs.append(one("bilevel_cleaning", seed, [[0, 0, 0.9], [0.5, 1, 0.14]], [[0, 0, 2.3], [0.25, 1, 0.7]]))
        runs.append(one("bilevel_cleaning_sharp", seed, [[0, 0, 0.9], [late / 4, 1, 0.12]], [[0, 0, 2.3]]))
    figures = Figures({"runs": runs, "seconds": {"cleaning": 4.0}, "apart": {"cleaning": 1e-9}, "seeds": 3})
    found = referee.summaries(figures, "cleaning")
    assert list(found) == ["bilevel_cleaning_sharp", "srba", "bilevel_cleaning"]
    assert found["srba"].seconds == 2.0 and found["bilevel_cleaning_sharp"].seconds == 0.5
    error, loss = referee.targets(figures)
    assert error.value == 4.0 and error.reached == "yes" and loss.value == 8.0
    assert any("srba" in row for table in referee.tables(figures) for row in table.rows)
    (picture,) = referee.pictures(figures)
    assert picture.name == "referee.png"


def test_objectives_that_differ_end_the_run(tmp_path, monkeypatch):
    from harness.timing import Disagreement
    from sections import referee

    monkeypatch.setattr(referee, "ask", lambda folder, words: [{"problem": "logistic", "apart": 1e-3}])
    with pytest.raises(Disagreement, match=r"logistic in torch and the referee's differ: 0\.001"):
        referee.compared(tmp_path, ["python", "-m", "referee.objectives", "CHECKOUT", "logistic"])


def arena(tmp_path, dies_at=()):
    """A stand-in for the process that runs solvers: it answers, and ends at the solvers of `dies_at`."""
    script = tmp_path / "arena.py"
    script.write_text(
        "import json, sys\n"
        "problem, seed, seconds, target, *names = sys.argv[1:]\n"
        f"open({str(tmp_path / 'started')!r}, 'a').write(' '.join(names) + '\\n')\n"
        "for name in names:\n"
        f"    if name in {list(dies_at)!r}:\n"
        "        sys.exit(1)\n"
        "    values = [[0.1, 1, float(seed)]]\n"
        "    print('noise')\n"
        "    print(json.dumps({'solver': name, 'label': name, 'values': values}), flush=True)\n"
    )
    return [sys.executable, str(script)]


def started(tmp_path):
    return [line.split() for line in (tmp_path / "started").read_text().splitlines()]


def test_an_interrupted_measurement_goes_on_where_it_ended(tmp_path):
    from sections import referee

    def contest(fingerprint, **settings):
        store = referee.RunStore(tmp_path / "runs.jsonl", fingerprint)
        return referee.Contest(arena(tmp_path), tmp_path / "own", store, **settings)

    interrupted = contest("a").measured("logistic", 0, ["saba", "soba", "srba"])
    assert [next(interrupted), next(interrupted)] == ["saba", "soba"]
    interrupted.close()
    again = contest("a")
    assert list(again.measured("logistic", 0, ["saba", "soba", "srba"])) == ["saba", "soba", "srba"]
    assert started(tmp_path) == [["saba", "soba", "srba"], ["srba"]]
    assert [run.solver for run in again.store.runs] == ["saba", "soba", "srba"]
    assert list(contest("a", end=0.0).measured("logistic", 0, ["saba", "amigo"])) == ["saba"]
    assert list(contest("another package").measured("logistic", 0, ["saba"])) == ["saba"]
    assert started(tmp_path)[2:] == [["saba"]]


def test_a_solver_that_ends_the_process_is_reported_and_the_others_run(tmp_path):
    from sections import referee

    store = referee.RunStore(tmp_path / "runs.jsonl", "")
    contest = referee.Contest(arena(tmp_path, dies_at=["soba"]), tmp_path / "own", store)
    assert list(contest.measured("logistic", 2, ["saba", "soba", "srba"])) == ["saba", "soba", "srba"]
    assert [(run.solver, run.error, run.seed) for run in store.runs] == [
        ("saba", "", 2), ("soba", referee.DIED, 2), ("srba", "", 2),
    ]  # fmt: skip


def test_later_seeds_take_the_solvers_that_came_furthest(tmp_path):
    from sections import referee

    store = referee.RunStore(tmp_path / "runs.jsonl", "")
    for place, name in enumerate(referee.THEIRS):
        store.add(referee.Run("cleaning", 0, name, name, values=[[1.0, 1, 0.9 - place / 100]]))
    store.add(referee.Run("cleaning", 0, "bilevel_soba", "", values=[[1.0, 1, 0.5]]))
    all_of_them = referee.solvers("cleaning", 0, store, referee.LOOPS, referee.THEIRS)
    assert set(all_of_them) == {*referee.LOOPS, *referee.THEIRS}
    later = referee.solvers("cleaning", 1, store, referee.LOOPS, referee.THEIRS)
    assert set(later) == {"bilevel_soba", *referee.THEIRS[-5:]}
