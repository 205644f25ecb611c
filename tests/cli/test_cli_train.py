"""`bilevel train`: what it says and writes, stopping and going on in real processes, and what it refuses."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from bilevel.learners.presets import PRESETS
from bilevel.learners.settings import TrainingSettings
from bilevel.training.folder import RunFolder
from bilevel.training.log import read_metrics
from training.processes import ENVIRONMENT, TINY, finish, here, start, wait_for, weights, words


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of six hyperiterations, and what was printed."""
    folder = tmp_path_factory.mktemp("train") / "run"
    return folder, here(*words(folder, "--iterations", 6, "--seed", 3))


def config(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def losses(folder):
    return [(line["iteration"], line["loss"]) for line in read_metrics(folder) if "loss" in line]


def test_everything_is_said_before_the_first_step(run):
    _, done = run
    assert done.exit_code == 0 and done.stderr == ""
    said = done.stdout
    for name in TrainingSettings().plain():
        # The precision is a setting of pretraining, which this learner does not have.
        assert bool(re.search(rf"^  {name} = ", said, re.M)) == (name != "precision"), name
    for text in (
        "glyphs: 22,580 images 28×28×1",
        "ways = 3   (not 5)",
        "iterations = 6   (not 2000)",
        "seed = 3   (not 0)",
        "λ has 111,424 numbers",
        "batch norm: episode, each set by its own statistics",
        "MB of memory",
        "stops early after 40 validations",
    ):
        assert text in said
    assert re.search(r"Estimate: about [\d.]+ s a hyperiteration and [\d.]+ s a validation, .* for 6 hyperit", said)
    assert said.index("Estimate") < said.index("Ran all 6 hyperiterations.")
    assert re.search(r"Best meta-validation accuracy [\d.]+% after hyperiteration \d \(2 episodes, T = 2", said)


def test_the_folder_holds_the_whole_run(run):
    folder, _ = run
    expected = {
        ".lock",
        "best.safetensors",
        "checkpoints",
        "config.json",
        "events",
        "last.safetensors",
        "metrics.jsonl",
    }
    assert {file.name for file in folder.iterdir()} == expected
    assert [file.stem for file in RunFolder(folder).checkpoints.files()] == ["000000004", "000000006"]
    written = config(folder)
    assert written["preset"] == "glyphs-5way-1shot" and written["settings"]["seed"] == 3
    assert TrainingSettings.of(written["settings"]).iterations == 6 and written["data"]["fingerprint"]
    last = load_file(folder / "last.safetensors")
    assert sum(tensor.numel() for tensor in last.values()) == 111_424 and "0.weight" in last
    assert last.keys() == load_file(folder / "best.safetensors").keys()
    scores = [line["iteration"] for line in read_metrics(folder) if "score" in line]
    assert scores == [0, 6] and [k for k, _ in losses(folder)] == [6]


def test_a_run_is_a_function_of_its_seed(run, tmp_path):
    folder, _ = run
    for seed in (3, 4):
        assert here(*words(tmp_path / str(seed), "--iterations", 6, "--seed", seed)).exit_code == 0
    assert weights(tmp_path / "3") == weights(folder) and weights(tmp_path / "3", "best") == weights(folder, "best")
    assert weights(tmp_path / "4") != weights(folder) and losses(tmp_path / "3") == losses(folder)


@pytest.mark.parametrize("damage", [lambda content: content[:1000], lambda content: content[:-1] + b"\x00"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(run, tmp_path, damage):
    folder, _ = run
    assert here(*words(tmp_path, "--iterations", 5, "--seed", 3)).exit_code == 0
    newest = tmp_path / "checkpoints" / "000000005.safetensors"
    newest.write_bytes(damage(newest.read_bytes()))
    done = here("train", "--resume", "--out", tmp_path, "--iterations", 6)
    assert done.exit_code == 0
    assert "000000005.safetensors is damaged" in done.stderr and "Continuing after hyperiteration 4." in done.stdout
    assert weights(tmp_path) == weights(folder)


def test_signals_save_and_resume_goes_on_bit_for_bit(tmp_path):
    folder = tmp_path / "run"
    # Somebody looks at standard error, so there is a bar.
    terminal, end = pty.openpty()
    process = start(
        *words(folder, "--iterations", 100_000), stderr=end, environment={"COLUMNS": "200", "TERM": "xterm"}
    )
    os.close(end)
    wait_for(folder / "checkpoints" / "000000004.safetensors", process)
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    shown = b""
    while chunk := _read(terminal):
        shown += chunk
    os.close(terminal)
    first = int(RunFolder(folder).checkpoints.files()[-1].stem)
    assert code == 130 and f"Stopped by Ctrl-C after hyperiteration {first}." in out
    assert f"Everything is saved. Continue with: bilevel train --resume --out {folder}" in out
    bar = shown.decode()
    assert "Traceback" not in bar
    for text in (
        "hyperiterations",
        r"/100000",
        r"loss \d\.\d{4}",
        r"validation \d+\.\d\d%",
        r"\d+ images/s",
        r"\d:\d\d",
    ):
        assert re.search(text, bar), text

    process = start("train", "--resume", "--out", folder, "--iterations", 100_000)
    wait_for(folder / "checkpoints" / f"{first // 4 * 4 + 4:09d}.safetensors", process)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    second = int(RunFolder(folder).checkpoints.files()[-1].stem)
    assert code == 143 and f"Stopped by SIGTERM after hyperiteration {second}." in out and err == ""
    assert f"Continuing after hyperiteration {first}." in out and second > first

    assert here("train", "--resume", "--out", folder, "--iterations", second + 3).exit_code == 0
    assert here(*words(tmp_path / "whole", "--iterations", second + 3)).exit_code == 0
    assert weights(folder) == weights(tmp_path / "whole") and losses(folder) == losses(tmp_path / "whole")


def test_a_closed_terminal_and_a_time_budget_save(tmp_path):
    folder = tmp_path / "run"
    terminal, end = pty.openpty()
    # A session of its own, whose terminal this is; the kernel sends SIGHUP when the other end is closed.
    # Under nohup these tests would ignore that signal, and so would everything they start.
    code = "import fcntl, runpy, signal, sys, termios; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    code += "fcntl.ioctl(0, termios.TIOCSCTTY, 0); sys.argv = ['bilevel', *sys.argv[1:]]; "
    code += "runpy.run_module('bilevel', run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words(folder, "--iterations", 100_000)],
        **dict.fromkeys(("stdin", "stdout", "stderr"), end),
        env={**ENVIRONMENT, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(end)
    while not (folder / "checkpoints" / "000000004.safetensors").exists():
        assert process.poll() is None
        if select.select([terminal], [], [], 0.05)[0]:
            _read(terminal)
    os.close(terminal)
    try:
        assert process.wait(120) == 128 + signal.SIGHUP
    finally:
        process.kill()
    first = int(RunFolder(folder).checkpoints.files()[-1].stem)
    done = here("train", "--resume", "--out", folder, "--iterations", first + 3, "--hours", 1e-9)
    assert done.exit_code == 75 and f"Stopped by its time budget after hyperiteration {first}." in done.output
    assert here("train", "--resume", "--out", folder, "--iterations", first + 3, "--hours", 1).exit_code == 0
    assert here(*words(tmp_path / "whole", "--iterations", first + 3)).exit_code == 0
    assert weights(folder) == weights(tmp_path / "whole") and losses(folder) == losses(tmp_path / "whole")
    refused(here("train", "--resume", "--out", folder, "--hours", 0), "--hours 0.0 leaves no time to train")


def _read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


def test_what_is_free_on_resume_is_written_down(run, tmp_path):
    assert here(*words(tmp_path, "--iterations", 1)).exit_code == 0
    done = here(*words(tmp_path, "--iterations", 2, "--resume", "--validate-every", 1, "--threads", 1))
    assert done.exit_code == 0 and config(tmp_path)["settings"]["validate_every"] == 1
    again = here("train", "--resume", "--out", tmp_path)
    assert again.exit_code == 0 and "Ran all 2 hyperiterations." in again.stdout


def refused(done, *messages):
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("Error: ") and "Traceback" not in done.output
    for message in messages:
        assert message in done.stderr, done.stderr


def test_a_folder_of_another_configuration(run, tmp_path):
    folder, _ = run
    before = weights(folder)
    refused(here(*words(folder)), f"{folder} holds a run already", "--resume", "--out DIR")
    refused(
        here(*words(folder, "--resume", "--seed", 3, "--ways", 4, "--lr", 0.5, "--iterations", 9)),
        "has another configuration",
        "  ways: 3 there, 4 here\n",
        "  lr: 0.001 there, 0.5 here\n",
    )
    refused(here("train", "--resume", "--out", folder, "--seed", 4), "seed: 3 there, 4 here")
    assert weights(folder) == before and config(folder)["settings"]["iterations"] == 6
    for name in (["glyphs-5way-1shot"], []):
        refused(here("train", *name, "--resume", "--out", tmp_path / "none"), "has no run that --resume could continue")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_run_writes_to(run):
    folder, _ = run
    script = (
        "import sys; from pathlib import Path; from bilevel.training.folder import RunFolder\n"
        f"with RunFolder(Path({str(folder)!r})).locked(): print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "locked\n"
        refused(here("train", "--resume", "--out", folder), "Another run is writing to", "--out DIR")
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["omniglot-5way"], "no preset 'omniglot-5way'. The presets are omniglot-5way-1shot"),
        (["glyphs-5way-1shot", "--network", "resnet"], "no network 'resnet'; pass one of c4l, c4l-64, omniglot-net"),
        (["glyphs-5way-1shot", "--ways", "2000"], "ways=2000 needs 2000 classes and there are 775"),
        (["glyphs-5way-1shot", "--ways", "200"], "ways=200 needs 200 classes and there are 104"),
        (["glyphs-5way-1shot", "--shots", "10"], "shots=10 with queries=15 needs 25 different ones"),
        (["glyphs-5way-1shot", "--ways", "1"], "ways=1 must be at least 2"),
        (["glyphs-5way-1shot", "--inner-lr", "-1"], "inner_lr=-1.0 must be above 0"),
        (["glyphs-5way-1shot", "--lr", "nan"], "lr=nan is not finite"),
        (["glyphs-5way-1shot", "--seed", "-1"], "seed=-1 must be at least 0"),
        (["glyphs-5way-1shot", "--method", "backward"], "method='backward' is unknown"),
        (["glyphs-5way-1shot", "--batch-norm", "none"], "batch_norm='none' is unknown"),
        (["glyphs-5way-1shot", "--image-size", "9"], "image_size=9 is for folders"),
        (["glyphs-5way-1shot", "--validation-episodes", "1"], "validation_episodes=1 must be at least 2"),
        (["--dataset", "omniglott"], "'omniglott' is neither a data set nor a folder"),
        (["miniimagenet-c4l-1shot", "--data-root", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_trained(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    refused(here("train", *options, "--iterations", 1), message)
    assert list(tmp_path.iterdir()) == []


def test_nothing_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(here("train"), "Pass a preset, or describe the training with options", "  omniglot-5way-1shot\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--ways", "five"], ["--threads", "0"], ["--way", "5"]])
def test_what_is_no_option_at_all(tmp_path, options):
    failed = here("train", "glyphs-5way-1shot", "--out", tmp_path / "run", *options)
    assert failed.exit_code == 2 and options[0] in failed.stderr and not list(tmp_path.iterdir())


def test_a_folder_of_pictures_is_trained_on_and_not_written_to(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setenv("BILEVEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for k in range(15):
        (tmp_path / "birds" / f"class {k}").mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (20, 20), (16 * k, 80 * i, 0)).save(tmp_path / "birds" / f"class {k}" / f"{i}.png")
    options = ["--dataset", tmp_path / "birds", "--image-size", 16, *TINY, "--ways", 2, "--iterations", 1]
    done = here("train", *options)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs" / "birds" / "last.safetensors").exists()
    assert len(list((tmp_path / "birds").iterdir())) == 15
    refused(
        here("train", *options, "--image-size", 4, "--network", "c4l", "--out", tmp_path / "small"),
        "cannot process images of 4×4 pixels",
    )


def test_options_are_the_settings():
    shown = here("train", "--help").stdout
    for name in TrainingSettings().plain():
        assert f"--{name.replace('_', '-')}" in shown
    for option in ("--out", "--resume", "--data-root", "--threads"):
        assert option in shown


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("-paper")])
def test_every_preset_runs_on_its_data(tmp_path, monkeypatch, name):
    settings = PRESETS[name]
    root = os.environ.get("BILEVEL_DATA")
    if settings.dataset != "glyphs" and not (root and os.path.isdir(os.path.join(root, settings.dataset))):
        pytest.skip(f"BILEVEL_DATA names no folder with {settings.dataset}")
    options = ["--iterations", 1, "--meta-batch", 1, "--validation-episodes", 2, "--queries", 2, "--seed", 7]
    ways = settings.ways
    if settings.network == "rn":  # seconds for every ten images
        ways = 2
        options += ["--ways", ways, "--queries", 1, "--shots", min(settings.shots, 2), "--image-size", 42]
    if name != next(one for one, others in PRESETS.items() if others.network == settings.network):
        # That the derivatives of this network pass is seen with the first preset that has it.
        monkeypatch.setattr("bilevel.engine.checks._check_derivatives", lambda *arguments: None)
    done = here("train", name, *options, "--out", tmp_path / "run", "--threads", 1)
    assert done.exit_code == 0, done.output
    written = TrainingSettings.of(config(tmp_path / "run")["settings"])
    assert (written.iterations, written.seed, written.ways, written.network) == (1, 7, ways, settings.network)
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "run" / "last.safetensors").values())
    assert torch.get_num_threads() == 1
