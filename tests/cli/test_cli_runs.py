"""`bilevel runs`."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from bilevel.cli import build, runs
from bilevel.learners.settings import TrainingSettings
from bilevel.training.files import write_tensors
from bilevel.training.folder import RunFolder


def call(*arguments):
    return CliRunner().invoke(build(), ["runs", *map(str, arguments)])


def states(folder):
    return {run["run"].removeprefix(f"{folder}/"): run for run in json.loads(call(folder, "--json").stdout)["runs"]}


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "ZOO", tmp_path / "zoo")

    def one(name, done=100, preset=None, scores=((0, 0.2), (50, 0.8), (100, 0.7)), **settings):
        folder = RunFolder(tmp_path / "runs" / name)
        folder.path.mkdir(parents=True)
        folder.begin({"preset": preset, "settings": TrainingSettings(**{"iterations": 100, **settings}).plain()})
        lines = [{"iteration": i, "score": s, "interval": 0.01, "minutes": i / 10} for i, s in scores]
        lines.append({"iteration": done, "loss": 1.0})
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 9')
        for file in (folder.best, folder.last):
            write_tensors(file, {"w": torch.zeros(3)})
        return folder

    return one


def test_a_table_of_runs_and_their_scores(make, tmp_path):
    make("a/first", preset="omniglot-5way-1shot", steps=7, batch_norm="support")
    make("b", ways=20, shots=5, dataset="glyphs")
    done = call(tmp_path / "runs")
    assert done.exit_code == 0, done.output
    header, first, second, *_ = done.stdout.splitlines()
    assert "meta-validation" in header and "batch norm" in header
    for text in ("runs/a/first", "omniglot-5way-1shot", "100 of 100", "80.00% ± 1.00%", "support", " 7 ", "finished"):
        assert text in first
    for text in ("runs/b", "glyphs 20-way 5-shot", "episode", "10.0"):
        assert text in second
    assert states(tmp_path / "runs")["b"]["best_iteration"] == 50


def test_states(make, tmp_path):
    make("stopped", done=70, scores=((0, 0.2), (50, 0.8)))
    make("patient", done=70, scores=((0, 0.9), (30, 0.8), (60, 0.9)), patience=2)
    make("waiting", done=70, scores=((0, 0.9), (30, 0.8), (60, 0.9)), patience=3)
    fresh = make("fresh", done=0, scores=())
    for file in (fresh.best, fresh.last):
        file.unlink()
    running = make("running", done=70)
    with running.locked():
        found = states(tmp_path / "runs")
    assert {name: run["state"] for name, run in found.items()} == {
        "stopped": "stopped",
        "patient": "finished early",
        "waiting": "stopped",
        "fresh": "stopped, no weights yet",
        "running": "running",
    }
    assert "none yet" in call(tmp_path / "runs").stdout
    assert states(tmp_path / "runs")["running"]["state"] == "finished"
    with running.locked():  # looking did not keep the lock
        pass
    assert not (tmp_path / "runs" / "stopped" / ".lock").exists()


def test_a_damaged_folder_is_listed_with_what_is_wrong(make, tmp_path):
    make("sound")
    (make("text").config_file).write_text("{not json")
    (make("other").config_file).write_text('{"model_type": "bert"}')
    (make("old").config_file).write_text('{"settings": {"dataset": "omniglot"}}')
    cut = make("cut")
    cut.best.write_bytes(cut.best.read_bytes()[:-4])
    (make("strange").metrics).write_text('{"iteration": 3, "score": "high"}\n{"iteration": 4, "score": 0.5}\n')
    found = {name: run["state"] for name, run in states(tmp_path / "runs").items()}
    assert found.pop("sound") == "finished" and not found.pop("strange").startswith("damaged")
    assert all(state.startswith("damaged: ") for state in found.values()) and len(found) == 4
    assert "config.json is not valid JSON" in found["text"] and "not the configuration of a run" in found["other"]
    assert "no 'ways'" in found["old"] and "best.safetensors cannot be read" in found["cut"]
    shown = call(tmp_path / "runs")
    assert shown.exit_code == 0 and shown.stdout.count("damaged: ") == 4
    assert "metrics.jsonl: left out line 1 of 2" in shown.stderr


def test_the_zoo_is_listed_with_its_test_scores(make, tmp_path):
    (tmp_path / "zoo").mkdir()
    score = {"test": {"accuracy": 0.975, "interval": 0.002, "steps": 6}}
    card = {"settings": TrainingSettings(batch_norm="support").plain(), "score": score}
    (tmp_path / "zoo" / "good.json").write_text(json.dumps(card))
    (tmp_path / "zoo" / "unjudged.json").write_text(json.dumps({"settings": TrainingSettings().plain()}))
    (tmp_path / "zoo" / "wrong.json").write_text("[]")
    shown = call(tmp_path / "nothing").stdout
    lines = {line.split()[0]: line for line in shown.splitlines() if line.startswith("zoo:")}
    assert "97.50% ± 0.20%" in lines["zoo:good"] and "support" in lines["zoo:good"] and lines["zoo:good"].endswith("6")
    assert "none yet" in lines["zoo:unjudged"] and "damaged" in lines["zoo:wrong"]
    assert len(json.loads(call(tmp_path / "nothing", "--json").stdout)["zoo"]) == 3


def test_no_runs_say_how_to_start_one_without_torch(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "bilevel", "runs", str(tmp_path)], capture_output=True, text=True
    )
    assert shown.returncode == 0 and "Start one: bilevel train glyphs-5way-1shot" in shown.stdout
    assert not {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()} & {"torch", "numpy", "rich"}
    (tmp_path / "file").write_text("")
    failed = call(tmp_path / "file")
    assert failed.exit_code == 2 and "is a file" in failed.stderr
