"""The short form of the campaign, and a proof that it finds what it looks for."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bilevel
from bilevel.errors import BilevelError
from bilevel.training import files
from faults import brought, judging, learned
from faults.__main__ import inputs
from faults.judging import Attack


@pytest.fixture(autouse=True)
def single():
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_broken_inputs_end_in_a_right_load_or_a_sentence(tmp_path):
    lines = []
    found = inputs(80, 10_000, tmp_path, lines.append)
    assert not any(counts["faults"] for counts in found.values()), lines
    assert sum(counts["refused"] for counts in found.values()) > 30
    assert sum(counts["right"] for counts in found.values()) > 15


@pytest.mark.slow
def test_killed_trainings_end_like_one_that_was_left_alone():
    roots = [Path(bilevel.__file__).parents[1], Path(__file__).parents[1]]
    done = subprocess.run(
        [sys.executable, "-m", "faults", "--kills", "4", "--iterations", "12", "--inputs", "0"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "0 faults." in done.stdout, done.stdout + done.stderr


def attack(use, right=lambda found, healthy: found == healthy):
    def make(folder):
        (folder / "x").write_bytes(b"healthy")
        return folder / "x"

    return Attack("a file", make, use, right)


def ends(use, tmp_path, **options):
    said = []
    counts = judging.run(attack(use, **options), tmp_path / "a", 5, 0, said.append)
    return counts["faults"], said


def healthy(file):
    return file.read_bytes() == b"healthy"


def test_a_traceback_is_found(tmp_path):
    count, said = ends(lambda file: healthy(file) or {}["x"], tmp_path)
    assert count == 5 and "KeyError" in said[0]


def test_a_hang_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "LIMIT", 0.05)
    count, said = ends(lambda file: healthy(file) or time.sleep(10), tmp_path)
    assert count == 5 and "hung" in said[0]


def test_a_silent_error_is_found(tmp_path):
    count, said = ends(lambda file: file.read_bytes(), tmp_path)
    assert count == 5 and "silent" in said[0]


def test_a_bomb_is_found(tmp_path):
    count, said = ends(lambda file: healthy(file) or bytearray(2**36), tmp_path)
    assert count == 5 and "MemoryError" in said[0]


def test_a_sentence_without_words_is_found(tmp_path):
    def use(file):
        if not healthy(file):
            raise BilevelError(" ")

    assert ends(use, tmp_path)[0] == 5


def test_a_checksum_that_is_not_compared_is_found(tmp_path, monkeypatch):
    whole = next(attack for attack in learned.attacks() if attack.name == "weights of a model, damaged")
    assert not judging.run(whole, tmp_path / "a", 10, 0, print)["faults"]
    monkeypatch.setattr(files, "digest", lambda tensors, facts: facts.get("checksum"))
    monkeypatch.setattr(files, "DIGEST", "nothing")
    said = []
    assert judging.run(whole, tmp_path / "b", 60, 0, said.append)["faults"] and any("silent" in line for line in said)


def test_every_format_of_pictures_is_attacked():
    from bilevel.data.pictures import FORMATS

    assert set(brought.KINDS) == set(FORMATS)
