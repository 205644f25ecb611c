"""Every script of the gallery runs in its quick form, draws something, and says what is true.

The scripts of `interoperation` make no claims of their own: `make docs` runs them, and tests/interoperation tests what
they show.
"""

import ast
import importlib.util
import json
import numbers
import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from forking import PROCESSES

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("plot_*.py"))


def drive(script, folder):
    """Run a script in its quick form and write down what it printed, drew and computed."""
    os.chdir(folder)  # what a script writes by accident does not stay
    os.environ["BILEVEL_QUICK"] = "1"
    sys.stdout, sys.stderr = (open(name, "w", encoding="utf-8") for name in ("stdout", "stderr"))  # noqa: SIM115
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import torch

    import bilevel

    torch.set_num_threads(1)
    plt.show = lambda *args, **kwargs: None
    # Warnings that a script itself causes are errors; those of the libraries that it imports are theirs.
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("error", module="__main__")
    warnings.filterwarnings("error", category=bilevel.BilevelWarning)
    scope = runpy.run_path(str(script), run_name="__main__")
    figures = [plt.figure(number) for number in plt.get_fignums()]
    for figure in figures:
        figure.canvas.draw()
    report = {
        "numbers": {
            name: float(value.detach() if hasattr(value, "detach") else value)
            for name, value in scope.items()
            if isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
        },
        "drawn": [sum(axes.has_data() for axes in figure.axes) for figure in figures],
    }
    Path("report.json").write_text(json.dumps(report))


# What each script claims, as far as its quick form can show it: facts about its module-level numbers.
CLAIMS = {
    "plot_additive_effects": {
        "the error is near the noise": lambda n: n["error"] < 1.3,
        "the interval is as wide as the noise asks": lambda n: 2.5 < n["high"] - n["low"] < 5,
    },
    "plot_choose_t_with_certificate": {
        "the truth lies in every certified band": lambda n: n["covered"] == 1,
        "the T found for a gap keeps it": lambda n: abs(n["reached"] - n["truth"]) <= n["WANTED"],
        "T is not larger than needed": lambda n: abs(n["reached"] - n["truth"]) > 0.9 * n["WANTED"],
        "momentum needs fewer steps": lambda n: n["smallest_ball"] < n["smallest"] / 2,
        "a network gets no bound": lambda n: n["refused"] == 1,
    },
    "plot_deep_equilibrium": {
        "the layer learns": lambda n: n["test_accuracy"] > 50,
        "implicit gradients are those of recorded steps": lambda n: n["worst_error"] < 1e-8,
    },
    "plot_hyper_cleaning": {
        "corrupted examples are found": lambda n: n["f1"] > 0.8,
        "the scorer finds them among new examples": lambda n: n["new_rate"] > 0.75,
    },
    "plot_kfold_ridge": {
        "the descent finds the grid's minimum": lambda n: abs(n["descent_minimum"] / n["grid_minimum"] - 1) < 0.01,
        "two penalties beat RidgeCV's one among noise": lambda n: n["groups_gain"] > 0.02,
    },
    "plot_learned_schedule": {
        "the schedule beats the best constant on new seeds": lambda n: n["learned"] < n["best_constant"],
    },
    "plot_learned_step_sizes": {
        "learned steps beat constants tuned by hand": lambda n: n["learned_loss"] < 0.8 * n["hand_loss"],
    },
    "plot_methods_side_by_side": {
        "exact methods agree": lambda n: n["worst_exact_error"] < 1e-8,
        "truncation errs": lambda n: n["truncated_error"] > 1e-6,
    },
    "plot_multitask_shared_start": {
        "sharing beats learning alone": lambda n: max(n["start_error"], n["common_error"]) < n["alone_error"] / 3,
        "and beats one model for all": lambda n: max(n["start_error"], n["common_error"]) < 0.9 * n["pooled_error"],
    },
    "plot_per_feature_penalties": {
        "many penalties beat one among noise": lambda n: n["own_error"] < 0.7 * n["ridge_error"],
        "and cost little where every column counts": lambda n: n["loss_where_useless"] < 1.1,
    },
    "plot_sinusoid": {
        "the learned start beats a random one": lambda n: n["reverse_error"] < n["random_error"] / 2,
        "and the first-order one": lambda n: n["reverse_error"] < n["first_order_error"],
    },
}


def missing_packages(script):
    """Packages that the script imports at its top and that are not installed."""
    found = set()
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return sorted(name for name in found if importlib.util.find_spec(name) is None)


def run(script, tmp_path):
    """A process of its own for each script, so that no script's dtype, threads or style reaches another test."""
    process = PROCESSES.Process(target=drive, args=(script, tmp_path))
    process.start()
    process.join(300)
    process.kill()
    printed, errors = ((tmp_path / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    assert process.exitcode == 0, f"{script.name} failed:\n{printed[-2000:]}\n{errors[-4000:]}"
    return json.loads((tmp_path / "report.json").read_text()), printed


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.relative_to(EXAMPLES).with_suffix("").as_posix())
def test_script_runs_draws_and_holds_its_claims(script, tmp_path):
    if missing := missing_packages(script):
        pytest.skip(f"{script.name} needs {', '.join(missing)}")
    report, printed = run(script, tmp_path)
    assert report["drawn"] and all(report["drawn"]), "every figure has something in it, and there is one"
    assert any(character.isdigit() for character in printed), "a page prints its numbers"
    broken = [claim for claim, holds in CLAIMS[script.stem].items() if not holds(report["numbers"])]
    assert not broken, (broken, report["numbers"])


def test_claims_are_about_scripts_that_exist():
    assert set(CLAIMS) == {script.stem for script in SCRIPTS}


@pytest.mark.parametrize(
    "script",
    sorted(EXAMPLES.rglob("plot_*.py")),
    ids=lambda script: script.relative_to(EXAMPLES).with_suffix("").as_posix(),
)
def test_script_is_a_page(script):
    """A docstring with an underlined title, cells with text, and a quick form."""
    text = script.read_text(encoding="utf-8")
    title, line = (ast.get_docstring(ast.parse(text)) or "").strip().splitlines()[:2]
    assert set(line) == {"="} and len(line) >= len(title)
    assert text.count("\n# %%\n# ") >= 2
    assert 'QUICK = bool(os.environ.get("BILEVEL_QUICK"))' in text
    assert "plt.show()" in text
