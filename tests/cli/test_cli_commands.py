"""The command line: what it prints, how it fails, and that it starts without torch."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import bilevel
from bilevel.cli import build
from bilevel.experiments import glyphs, ridge
from bilevel.learners import library
from bilevel.learners.presets import PRESETS, RECIPES

RUNNER = CliRunner()
TINY = ["--set", "seeds=1", "--set", "iterations=2", "--set", "steps=10"]


def call(*arguments, **options):
    return RUNNER.invoke(build(), [str(argument) for argument in arguments], **options)


def python(*arguments):
    environment = {key: value for key, value in os.environ.items() if key != "BILEVEL_DEBUG"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONIOENCODING": "utf-8"},
    )


def test_version_and_help():
    assert call("--version").stdout == f"bilevel {bilevel.__version__}\n"
    shown = call("--help")
    assert shown.exit_code == 0
    for command in ("run", "list", "demo"):
        assert f"  {command} " in shown.stdout
    for option in ("--quick", "--set", "--seed", "--out"):
        assert option in call("run", "--help").stdout


def test_list_names_the_experiments_and_their_place_in_the_paper():
    lines = call("list").stdout.splitlines()
    assert any(
        line.startswith("ridge") and "Table 5 (Appendix C)" in line and "Ridge regression" in line for line in lines
    )
    assert any(line.startswith("figure-1") and "Figure 1" in line for line in lines)
    assert any(line.startswith("figure-2") and "Figure 2" in line for line in lines)


@pytest.mark.parametrize(
    ("room", "names"),
    [
        ("dynamics", ["GradientDescent", "HeavyBall"]),
        ("methods", ["Reverse", "Spectral"]),
        ("solvers", ["CG"]),
        ("constraints", ["Box"]),
        ("algorithms", ["Descent", "LBFGSB"]),
    ],
)
def test_list_of_a_room_is_what_discovery_finds(room, names):
    lines = call("list", room).stdout.splitlines()
    for name in names:
        assert any(line.split()[0] == name and len(line.split()) > 2 for line in lines)


def test_list_of_an_experiment_shows_its_settings():
    shown = call("list", "ridge").stdout
    assert "iterations" in shown and "10,50,100,250" in shown and "whole number" in shown


def test_list_of_presets_has_those_in_stages_too():
    lines = {line.split()[0]: line for line in call("list", "presets").stdout.splitlines()}
    assert set(lines) == {*PRESETS, *RECIPES}
    assert lines["miniimagenet-c4l-staged"].endswith("6,000 + 3,000 + 3,000 hyperiterations")


def test_list_of_models_shows_the_scores_in_their_cards():
    lines = {line.split()[0]: line for line in call("list", "models").stdout.splitlines()}
    for name, card in library.zoo().items():
        assert f"{100 * card['score']['test']['accuracy']:.2f} ± " in lines[f"zoo:{name}"]


def test_list_of_something_unknown():
    failed = call("list", "method")
    assert failed.exit_code == 2 and "Did you mean 'methods'?" in failed.stderr


def test_run_prints_the_table_and_where_everything_is(tmp_path):
    done = call("run", "ridge", *TINY, "--seed", 3, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    for text in ("43.49", "exact", "What the paper leaves open", "Adam", str(tmp_path / "ridge" / "ridge.png")):
        assert text.lower() in done.stdout.lower()
    written = json.loads((tmp_path / "ridge" / "result.json").read_text(encoding="utf-8"))
    assert written["seed"] == 3 and written["settings"]["steps"] == [10]
    assert written["command"] == "bilevel run ridge --set seeds=1 --set iterations=2 --set steps=10 --seed 3"


def test_the_command_in_the_record_gives_the_same_numbers(tmp_path):
    call("run", "figure-2", "--quick", "--seed", 5, "--out", tmp_path / "a")
    first = json.loads((tmp_path / "a" / "figure-2" / "result.json").read_text(encoding="utf-8"))
    again = call(*first["command"].split()[1:], "--out", tmp_path / "b")
    assert again.exit_code == 0
    assert (
        json.loads((tmp_path / "b" / "figure-2" / "result.json").read_text(encoding="utf-8"))["numbers"]
        == first["numbers"]
    )


@pytest.fixture
def tiny_demo(monkeypatch):
    """The demo with hardly any learning, on 15 classes of noise instead of Glyphs."""
    from bilevel.cli import demo
    from bilevel.data import ImageDataset
    from bilevel.report import models

    noise = np.random.default_rng(0).integers(0, 256, (15 * 20, 28, 28, 1), np.uint8)
    names = tuple(f"class {number}" for number in range(15))
    parts = {"train": range(5), "val": range(5, 10), "test": range(10, 15)}
    data = ImageDataset("noise", noise, np.repeat(np.arange(15), 20), names, parts)
    monkeypatch.setattr(glyphs, "load", lambda *arguments, **options: data)
    monkeypatch.setattr(models, "open_data", lambda *arguments: data)
    monkeypatch.setattr(demo, "MODEL", "zoo:omniglot-5way-5shot")  # whose card knows that the noise is not Omniglot
    monkeypatch.setattr(demo, "RIDGE", {"seeds": "1", "iterations": "2"})
    few = ("iterations", "looks", "look_episodes", "validation_episodes", "test_episodes", "meta_batch")
    monkeypatch.setattr(demo, "GLYPHS", dict.fromkeys(few, "2"))


def test_demo_writes_beside_and_not_over_the_full_results(tmp_path, tiny_demo):
    done = call("demo", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    for picture in (tmp_path / "demo" / "ridge" / "ridge.png", tmp_path / "demo" / "glyphs" / "glyphs.png"):
        assert str(picture) in done.stdout and picture.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["demo"]
    for text in ("11.35", "learned with Reverse", "learned with FirstOrder", "raw pixels", "Batch norm: episode"):
        assert text in done.stdout
    path = tmp_path / "demo" / "report.html"
    page, last = path.read_text(encoding="utf-8"), done.stdout.splitlines()[-1]
    assert done.stdout.splitlines()[-2].endswith(f": {path}")
    for text in ("11.35", "learned with FirstOrder", "glyphs 5-way 1-shot", "Test episode 2", "omniglot 5-way 5-shot"):
        assert text in page
    assert "are not those that zoo:omniglot-5way-5shot was trained on" in page
    assert "bilevel train glyphs-5way-1shot" in last and "bilevel evaluate zoo:omniglot-5way-1shot" in last


def test_ctrl_c_in_the_demo_keeps_what_is_complete(tmp_path, tiny_demo, monkeypatch):
    earlier = tmp_path / "demo" / "glyphs" / "result.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("from another day")

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(glyphs, "learn", interrupted)
    stopped = call("demo", "--out", tmp_path)
    assert stopped.exit_code == 130 and "Interrupted" in stopped.stderr and "Traceback" not in stopped.output
    assert str(tmp_path / "demo" / "ridge") in stopped.stderr
    assert (tmp_path / "demo" / "ridge" / "result.json").exists()
    assert [file.name for file in earlier.parent.iterdir()] == ["result.json"]
    assert earlier.read_text() == "from another day"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["run", "rigde"], ["no experiment 'rigde'", "Did you mean 'ridge'?", "figure-1"]),
        (
            ["run", "ridge", "--set", "iteration=3"],
            ["no setting 'iteration'", "Did you mean 'iterations'?", "outer_lr=1.0"],
        ),
        (["run", "ridge", "--set", "iterations=many"], ["iterations is a whole number (int)", "iterations=300"]),
        (["run", "ridge", "--set", "iterations"], ["key=value"]),
        (["run", "ridge", "--set", "step_scale=3"], ["0 < η < 2/ν"]),
    ],
)
def test_what_the_user_can_mend_is_one_message_and_exit_code_2(tmp_path, arguments, messages):
    failed = call(*arguments, "--out", tmp_path)
    assert failed.exit_code == 2
    assert failed.stderr.startswith("Error: ") and "Traceback" not in failed.output and failed.stdout == ""
    for message in messages:
        assert message in failed.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_out_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    failed = call("run", "ridge", "--out", tmp_path / "file")
    assert failed.exit_code == 2 and "cannot be written" in failed.stderr and "--out DIR" in failed.stderr


@pytest.mark.parametrize(("before", "environment"), [(["--debug"], {}), ([], {"BILEVEL_DEBUG": "1"})])
def test_debug_shows_where_it_happened(before, environment):
    failed = call(*before, "run", "rigde", env=environment)
    assert isinstance(failed.exception, bilevel.BilevelError)


def test_ctrl_c_ends_with_130_and_keeps_earlier_results(tmp_path, monkeypatch):
    assert call("run", "ridge", *TINY, "--out", tmp_path).exit_code == 0
    before = (tmp_path / "ridge" / "result.json").read_bytes()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(ridge, "fit", interrupted)
    stopped = call("run", "ridge", "--out", tmp_path)
    assert stopped.exit_code == 130 and "Interrupted" in stopped.stderr and "Traceback" not in stopped.output
    assert (tmp_path / "ridge" / "result.json").read_bytes() == before
    assert not [file for file in (tmp_path / "ridge").iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"], ["run", "--help"], ["run", "rigde"]])
def test_torch_is_not_imported_to_answer(arguments):
    shown = python("-X", "importtime", "-m", "bilevel", *arguments)
    imported = {
        line.rpartition("|")[2].strip() for line in shown.stderr.splitlines() if line.startswith("import time:")
    }
    assert "bilevel.cli" in imported, shown.stderr[-2000:]
    assert not imported & {"torch", "numpy", "matplotlib", "sklearn"}


def test_the_entry_point_and_the_module_are_one_command(tmp_path):
    script = os.path.join(os.path.dirname(sys.executable), "bilevel")
    if not os.path.exists(script):
        pytest.skip("the package is on the path but not installed, so there is no script")
    done = subprocess.run(
        [script, "run", "figure-2", "--quick", "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figure-2" / "figure-2.png").exists() and "E(w1)" in done.stdout
    failed = python("-m", "bilevel", "run", "figure-3")
    assert (
        failed.returncode == 2
        and failed.stderr.startswith("Error: There is no experiment 'figure-3'")
        and "Traceback" not in failed.stderr
    )
