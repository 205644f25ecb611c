"""Files of a run: whole or not at all, checked when read, and written by one run at a time."""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from bilevel import BilevelError, BilevelWarning
from bilevel.errors import differences
from bilevel.files import read_json, write_bytes, write_json
from bilevel.training.checkpoints import Checkpoints
from bilevel.training.files import read_tensors, write_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.log import read_metrics

TENSORS = {
    "float": torch.linspace(0, 1, 7, dtype=torch.float32),
    "double": torch.randn(3, 2, dtype=torch.float64).t(),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "number": torch.tensor(3),
    "nothing": torch.zeros(0, 4),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@contextmanager
def no_room(size):
    """As on a full disk: no file of this process can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_tensors_and_facts_come_back_as_they_were(tmp_path):
    write_tensors(tmp_path / "a.safetensors", TENSORS, {"iteration": 3, "score": 0.1 + 0.2, "text": "λ"})
    tensors, facts = read_tensors(tmp_path / "a.safetensors")
    assert tensors.keys() == TENSORS.keys() and facts == {"iteration": 3, "score": 0.1 + 0.2, "text": "λ"}
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)
    write_tensors(
        tmp_path / "b.safetensors", dict(reversed(TENSORS.items())), {"text": "λ", "score": 0.1 + 0.2, "iteration": 3}
    )
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_every_kind_of_damage_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, TENSORS, {"iteration": 3})
    good = path.read_bytes()
    # Cut anywhere, or with any one byte changed: in the length, in the header, in the numbers.
    damaged = [good[:cut] for cut in (0, 4, 8, 40, len(good) // 2, len(good) - 1)]
    damaged += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in (0, 9, len(good) - 3, len(good) - 100)]
    damaged += [good.replace(b'iteration\\": 3', b'iteration\\": 4')]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(BilevelError, match=r"a\.safetensors is damaged"):
            read_tensors(path)
    path.unlink()
    with pytest.raises(BilevelError, match="does not exist"):
        read_tensors(path)


def test_a_full_disk_leaves_the_old_content(tmp_path):
    path = tmp_path / "a.bin"
    write_bytes(path, b"old")
    with no_room(1000), pytest.raises(BilevelError, match=r"a\.bin could not be written: File too large.*unchanged"):
        write_bytes(path, bytes(2000))
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a.bin"]
    with pytest.raises(BilevelError, match="could not be written: No such file or directory"):
        write_json(tmp_path / "missing" / "a.json", {})


def test_new_files_have_the_rights_that_the_user_set(tmp_path):
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_json_that_cannot_be_read(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(BilevelError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")
    with pytest.raises(BilevelError, match=r"b\.json cannot be read: No such file"):
        read_json(tmp_path / "b.json")


# ------------------------------------------------------------------------------------------------- checkpoints


def state(k):
    return {"x": torch.tensor([float(k)])}


def filled(tmp_path, *iterations):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for k in iterations:
        checkpoints.write(k, state(k), {"seconds": k})
    return checkpoints


def test_the_last_two_checkpoints_are_kept_and_the_newest_is_read(tmp_path):
    checkpoints, said = filled(tmp_path, 5, 10, 15), []
    assert names(checkpoints.folder) == ["000000010.safetensors", "000000015.safetensors"]
    tensors, facts = checkpoints.newest(said.append)
    assert torch.equal(tensors["x"], torch.tensor([15.0])) and facts == {"iteration": 15, "seconds": 15} and not said
    assert Checkpoints(tmp_path / "nothing").newest(said.append) is None


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(tmp_path):
    checkpoints, said = filled(tmp_path, 5, 10), []
    newest = checkpoints.files()[-1]
    newest.write_bytes(newest.read_bytes()[:-4])
    assert checkpoints.newest(said.append)[1]["iteration"] == 5
    assert len(said) == 1 and "000000010.safetensors is damaged" in said[0] and "before it" in said[0]
    # Going on from 5 with other distances must not keep the damaged one instead of a good one.
    checkpoints.write(7, state(7), {})
    assert names(checkpoints.folder) == ["000000005.safetensors", "000000007.safetensors"]
    for file in checkpoints.files():
        file.write_bytes(b"")
    with pytest.raises(BilevelError, match=r"None of the 2 checkpoints.*start a new run"):
        checkpoints.newest(said.append)


def test_something_else_among_the_checkpoints_is_passed_over(tmp_path):
    checkpoints, said = filled(tmp_path, 5), []
    write_tensors(checkpoints.folder / "000000009.safetensors", state(9))
    assert checkpoints.newest(said.append)[1]["iteration"] == 5 and "is not a checkpoint" in said[0]


# ------------------------------------------------------------------------------------------------- the folder


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    script = (
        "import sys; from pathlib import Path; from bilevel.training.folder import RunFolder\n"
        f"with RunFolder(Path({str(folder.path)!r})).locked(): print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(BilevelError, match=r"Another run is writing to .*run.*--out DIR"), folder.locked():
            pass
    finally:
        other.kill()
        other.communicate()
    with folder.locked():  # a killed process holds nothing
        pass


def test_a_lock_sweeps_up_what_a_killed_process_left(tmp_path):
    folder = RunFolder(tmp_path)
    filled(tmp_path, 5)
    folder.begin({"settings": {}})
    (tmp_path / ".last.safetensors.x7k").write_bytes(b"half")
    (tmp_path / "checkpoints" / ".000000010.safetensors.abc").write_bytes(b"half")
    with folder.locked():
        assert names(tmp_path) == [".lock", "checkpoints", "config.json"]
        assert names(tmp_path / "checkpoints") == ["000000005.safetensors"]


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BilevelError, match=r"cannot be written to .*--out DIR"), RunFolder(tmp_path / "file").locked():
        pass
    with pytest.raises(BilevelError, match=r"holds no run: there is no config\.json"):
        RunFolder(tmp_path).config()
    for wrong in ("[]", "{}", '{"settings": 3}'):
        (tmp_path / "config.json").write_text(wrong)
        with pytest.raises(BilevelError, match="is not the configuration of a run"):
            RunFolder(tmp_path).config()
    with pytest.raises(BilevelError, match=r"holds a run already.*--resume"):
        RunFolder(tmp_path).begin({})


def test_metrics_after_the_checkpoint_are_forgotten_and_a_cut_line_is_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.forget_after(3)
    assert not folder.metrics.exists()
    lines = [{"iteration": k, "loss": 0.1 * k} for k in range(6)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 2, "lo')
    folder.forget_after(3)
    assert read_metrics(folder.path) == lines[:4]


@pytest.mark.parametrize(
    "line",
    [
        *("nonsense", '{"loss": 3}', '{"iteration": 1.5}', '{"iteration": null}', '{"iteration": 1, "loss": "x"}'),
        *("", "[]", "5", "null", '{"iteration": 3, "loss": \xff0}', '{"iteration": 1' + "0" * 400 + "}", "[" * 100_000),
    ],
)
def test_a_damaged_line_of_the_metrics_is_left_out_and_named_unless_it_is_the_last(tmp_path, line):
    good, said = b'{"iteration": 20, "loss": 1.0}', []
    bad = line.encode("latin-1")
    (tmp_path / "metrics.jsonl").write_bytes(good + b"\n" + bad)
    assert read_metrics(tmp_path) == [{"iteration": 20, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([good, bad, good, b""]))
    with pytest.warns(BilevelWarning, match=r"metrics\.jsonl: left out line 2 of 3"):
        assert read_metrics(tmp_path) == [{"iteration": 20, "loss": 1.0}] * 2
    assert len(read_metrics(tmp_path, said.append)) == 2 and len(said) == 1
    with pytest.warns(BilevelWarning, match="left out line 2"):
        RunFolder(tmp_path).forget_after(20)
    assert len(read_metrics(tmp_path)) == 2  # and without a warning


def test_differences_name_what_was_added_and_what_is_gone():
    found = differences({"ways": 5, "old": 1, "seed": 0}, {"ways": 20, "new": 2, "seed": 1}, free={"seed"})
    assert found == ["ways: 5 there, 20 here", "old: 1 there, not set here", "new: not set there, 2 here"]


def test_a_header_with_100_000_entries_is_refused_in_one_sentence(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {f"{number}": torch.zeros(1) for number in range(100_000)}, {})
    with pytest.raises(BilevelError) as refused:
        read_tensors(tmp_path / "a.safetensors")
    assert str(refused.value).endswith("is damaged: it holds 100,000 tensors, and at most 20,000 are read.")
