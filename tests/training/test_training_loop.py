"""The outer loop: what is written when, how it ends, and that a stopped run goes on as if it had not been stopped."""

import math
import shutil
import signal
import threading
import time

import pytest
import torch
from test_training_files import no_room

from bilevel import BilevelError, DivergenceError
from bilevel.training import stopping
from bilevel.training.files import read_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import read_metrics
from bilevel.training.loop import Run, Schedule
from bilevel.training.parts import JobStep, Metrics
from bilevel.training.stopping import EarlyStopping, Interrupted, stop_requests


def train(job, folder, schedule):
    return Run(job, folder, schedule).go()


class Walk:
    """x ← x·0.9 + k, whose score is a list; at given hyperiterations something happens."""

    def __init__(self, scores=(0.5,), size=4, step=None, look=None):
        self.x, self.scores = torch.zeros(size), scores
        self.happens = {"step": step or {}, "look": look or {}}
        self.looked = []

    def step(self, iteration, stop=False):
        self.happens["step"].get(iteration, lambda: None)()
        self.x = self.x * 0.9 + iteration
        return {"loss": float(self.x[0]), "images_per_second": 10.0}, bool(stop)

    def validate(self, iteration, stop):
        self.happens["look"].get(iteration, lambda: None)()
        if stop:
            raise Interrupted
        self.looked.append(iteration)
        return {"score": self.scores[iteration % len(self.scores)]}

    def state(self):
        return {"x": self.x}

    def restore(self, tensors):
        self.x = tensors["x"].clone()

    def weights(self):
        return {"x": self.x}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def plan(iterations, **changes):
    return Schedule(iterations, **{"validate_every": 4, "checkpoint_every": 3, "log_every": 5, **changes})


def numbers(folder):
    """The metrics, without the time that passed."""
    lines = [{key: value for key, value in line.items() if key != "minutes"} for line in read_metrics(folder.path)]
    assert len({tuple(line.items()) for line in lines}) == len(lines)  # nothing is logged twice
    return lines


def same_files(one, other):
    assert numbers(one) == numbers(other)
    for name in ("last", "best"):
        (a, _), (b, _) = read_tensors(getattr(one, name)), read_tensors(getattr(other, name))
        assert torch.equal(a["x"], b["x"])


def test_a_whole_run(folder):
    job = Walk(scores=[0.1, 0.2, 0.3, 0.4, 0.9, 0.5])
    ending = train(job, folder, plan(11))
    assert ending.outcome == "Ran all 11 hyperiterations." and ending.exit_code == 0
    assert (ending.iteration, ending.best, ending.best_iteration) == (11, 0.9, 4) and ending.seconds > 0
    assert job.looked == [0, 4, 8, 11]
    assert [file.stem for file in folder.checkpoints.files()] == ["000000009", "000000011"]
    lines = numbers(folder)
    assert [line["iteration"] for line in lines if "score" in line] == [0, 4, 8, 11]
    means = {line["iteration"]: line["loss"] for line in lines if "loss" in line}
    x, found = 0.0, {}
    for k in range(1, 12):
        x = x * 0.9 + k
        found[k] = x
    assert means == {
        5: pytest.approx(sum(found[k] for k in range(1, 6)) / 5),
        10: pytest.approx(sum(found[k] for k in range(6, 11)) / 5),
        11: pytest.approx(found[11]),
    }
    assert read_tensors(folder.last)[0]["x"][0] == pytest.approx(found[11])
    best, facts = read_tensors(folder.best)
    assert best["x"][0] == pytest.approx(found[4]) and facts == {"iteration": 4, "score": 0.9}


def test_tensorboard_has_the_same_numbers(folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(Walk(), folder, plan(5))
    train(Walk(), folder, plan(10))
    events = reader.EventAccumulator(str(folder.events)).Reload()
    for name in ("loss", "score"):
        expected = {line["iteration"]: line[name] for line in numbers(folder) if name in line}
        assert {event.step: pytest.approx(event.value) for event in events.Scalars(name)} == expected
        assert len(expected) >= 2


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("where", [("step", 1), ("step", 7), ("look", 0), ("look", 4), ("look", 8), ("step", 10)])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, where, sent):
    kind, k = where
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.path.mkdir()
    scores = [0.3, 0.1, 0.2, 0.25, 0.4]
    train(Walk(scores), whole, plan(12))
    before = signal.getsignal(sent)
    ending = train(Walk(scores, **{kind: {k: lambda: signal.raise_signal(sent)}}), parts, plan(12))
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP (a closed terminal)"}[sent]
    assert ending.outcome == f"Stopped by {name} after hyperiteration {k}." and ending.exit_code == 128 + sent
    assert ending.outcome.kind == "interrupted" and signal.getsignal(sent) == before
    assert int(parts.checkpoints.files()[-1].stem) == k
    assert train(Walk(scores), parts, plan(12)).outcome.kind == "finished"
    same_files(whole, parts)


class HalvedWalk(Walk):
    """A hyperiteration that gives up halfway when it is asked to stop."""

    def step(self, iteration, stop=False):
        self.happens["step"].pop(iteration, lambda: None)()
        if stop:
            raise Interrupted
        return super().step(iteration, stop)


@pytest.mark.parametrize("k", [1, 4, 7])
def test_a_hyperiteration_that_is_given_up_is_run_again(tmp_path, k):
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.path.mkdir()
    train(Walk(), whole, plan(12))
    ending = train(HalvedWalk(step={k: lambda: signal.raise_signal(signal.SIGTERM)}), parts, plan(12))
    assert ending.outcome == f"Stopped by SIGTERM after hyperiteration {k - 1}." and ending.exit_code == 143
    assert int(parts.checkpoints.files()[-1].stem) == k - 1
    assert train(HalvedWalk(), parts, plan(12)).outcome.kind == "finished"
    same_files(whole, parts)


def test_a_time_budget_saves_and_leaves(tmp_path):
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.path.mkdir()
    train(Walk(), whole, plan(12))
    assert Run(HalvedWalk(), parts, plan(5)).go(deadline=time.monotonic() + 3600).exit_code == 0
    ending = Run(HalvedWalk(), parts, plan(12)).go(deadline=time.monotonic())
    assert ending.outcome == "Stopped by its time budget after hyperiteration 5." and ending.exit_code == 75
    train(Walk(), parts, plan(12))
    assert torch.equal(read_tensors(whole.last)[0]["x"], read_tensors(parts.last)[0]["x"])


def test_a_signal_that_nohup_ignores_stays_ignored(folder):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ending = train(Walk(step={2: lambda: signal.raise_signal(signal.SIGHUP)}), folder, plan(4))
        assert ending.outcome.kind == "finished" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path):
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.path.mkdir()
    train(Walk(), whole, plan(12))

    class Killed(BaseException):
        pass

    def killed():
        raise Killed

    for at in (2, 8, 9):  # before the first checkpoint, after 6, after 6 again
        with pytest.raises(Killed):
            train(Walk(step={at: killed}), parts, plan(12))
    run = Run(Walk(), parts, plan(12))
    assert run.iteration == 6
    run.go()
    same_files(whole, parts)


def test_a_damaged_newest_checkpoint_costs_only_time(tmp_path):
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.path.mkdir()
    train(Walk(), whole, plan(12))
    train(Walk(), parts, plan(7))
    newest = parts.checkpoints.files()[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    said = []
    run = Run(Walk(), parts, plan(12), report=said.append)
    assert run.iteration == 6 and "000000007.safetensors is damaged" in said[0]
    run.go()
    # The validation at the end of the shorter run is the one thing the longer one does not have.
    assert numbers(whole) == [line for line in numbers(parts) if line["iteration"] != 7]


def test_a_run_without_its_checkpoints_is_not_begun_again(folder):
    train(Walk(), folder, plan(7))
    before = {file.name: file.read_bytes() for file in folder.path.iterdir() if file.is_file()}
    shutil.rmtree(folder.checkpoints.folder)
    with pytest.raises(BilevelError, match=r"whose checkpoints are gone.*--out DIR"):
        Run(Walk(), folder, plan(12))
    assert {file.name: file.read_bytes() for file in folder.path.iterdir() if file.is_file()} == before


def test_early_stopping(folder):
    scores = [0.5, 0.0, 0.0, 0.0, 0.6, 0.0, 0.0, 0.0, 0.6] + [0.1] * 20
    ending = train(Walk(scores), folder, plan(100, patience=3))
    assert ending.outcome == "Stopped early: no better validation score in 3 validations."
    assert (ending.iteration, ending.best, ending.best_iteration, ending.exit_code) == (16, 0.6, 4, 0)
    again = train(Walk(scores), folder, plan(100, patience=3))
    assert again.iteration == 16 and again.outcome.kind == "stopped early"
    assert train(Walk(scores), folder, plan(100, patience=5)).iteration == 24
    never = EarlyStopping(0)
    assert not any(never.update(k, math.nan) or never.stop for k in range(100))


def test_a_validation_that_is_repeated_is_logged_once(tmp_path):
    """It was interrupted after a checkpoint; when it was repeated, the run was killed before the next checkpoint."""
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.path.mkdir()
    train(Walk(), whole, plan(12))
    stopped = Run(Walk(look={4: lambda: signal.raise_signal(signal.SIGTERM)}), parts, plan(12)).go()
    assert stopped.iteration == 4 and stopped.exit_code == 128 + signal.SIGTERM

    def kill():
        raise MemoryError

    with pytest.raises(MemoryError):
        train(Walk(step={5: kill}), parts, plan(12))
    train(Walk(), parts, plan(12))
    same_files(whole, parts)


def test_divergence_saves_the_last_finite_state(folder):
    def diverge():
        raise DivergenceError("The inner loss is not finite.")

    ending = train(Walk(step={6: diverge}), folder, plan(12))
    assert ending.outcome == "Stopped in hyperiteration 6: The inner loss is not finite."
    assert ending.exit_code == 1 and ending.iteration == 5 and not ending.outcome.ok
    assert read_tensors(folder.last)[1]["iteration"] == 5


def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint_before(tmp_path):
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.path.mkdir()
    big = 5000
    train(Walk(size=big), whole, plan(12))
    train(Walk(size=big), parts, plan(3))
    with no_room(4 * big), pytest.raises(BilevelError) as failed:
        train(Walk(size=big), parts, plan(12))
    for words in ("could not be written: File too large", "after hyperiteration 6", "checkpoint is valid", "--resume"):
        assert words in str(failed.value)
    assert not [file for file in parts.path.rglob(".*") if file.name != ".lock"]
    run = Run(Walk(size=big), parts, plan(12))
    assert run.iteration == 3
    run.go()
    assert torch.equal(read_tensors(whole.last)[0]["x"], read_tensors(parts.last)[0]["x"])


def test_no_room_for_the_metrics(folder):
    rarely = plan(1000, log_every=1, checkpoint_every=1000, validate_every=1000)
    with no_room(5000), pytest.raises(BilevelError, match=r"metrics\.jsonl could not be written.*--resume"):
        train(Walk(), folder, rarely)


def test_only_a_second_signal_ends_it_at_once(folder, monkeypatch, ctrl_c):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # as torchrun passes a Ctrl-C on

    assert train(Walk(step={2: twice}), folder, plan(12)).exit_code == 130
    monkeypatch.setattr(stopping, "ECHO_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        train(Walk(step={5: twice}), folder, plan(12))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_of_the_main_thread_signals_are_left_alone(folder):
    found = []

    def work():
        with stop_requests() as stop:
            found.append(bool(stop))
        found.append(train(Walk(), folder, plan(2)).iteration)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, 2]


def test_no_hyperiterations_at_all(folder):
    ending = train(Walk(), folder, plan(0))
    assert ending.outcome == "Ran all 0 hyperiterations." and folder.best.exists() and folder.last.exists()
    assert train(Walk(), folder, plan(2)).iteration == 2


def test_numbers_that_an_earlier_version_did_not_log():
    written = []
    metrics = Metrics(2, 10, lambda k, means: written.append(means), losses=[{"loss": 1.0, "images_per_second": 5.0}])
    metrics(2, JobStep({"loss": 3.0, "images_per_second": 7.0, "processor_seconds": 0.5}))
    assert written == [{"loss": 2.0, "images_per_second": 6.0, "processor_seconds": 0.5}]
