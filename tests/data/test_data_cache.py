"""Decoded once, written all at once, and never inside the data root."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from bilevel import BilevelError
from bilevel.data import cache, places
from bilevel.data.cache import DecodedImages, cached, fingerprint


def made(value=7, count=6):
    images = np.full((count, 4, 4, 1), value, np.uint8)
    return DecodedImages(images, np.arange(count, dtype=np.int64), {"classes": ["a"]})


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "source.zip"
    file.write_bytes(b"contents")
    return file


def test_the_second_load_does_not_decode_and_is_memory_mapped(source, own_cache):
    first = cached("x", {}, [source], lambda work: made())
    again = cached("x", {}, [source], lambda work: pytest.fail("decoded twice"))
    assert isinstance(again.images, np.memmap) and not again.images.flags.writeable
    assert np.array_equal(first.images, again.images) and again.meta == {"classes": ["a"]}
    assert Path(again.images.filename).is_relative_to(own_cache)


@pytest.mark.parametrize("change", ["contents", "time", "key"])
def test_another_source_or_setting_is_decoded_again(source, change):
    cached("x", {"version": 1}, [source], lambda work: made(1))
    if change == "contents":
        source.write_bytes(b"other contents")
    elif change == "time":
        os.utime(source, ns=(1, 1))
    key = {"version": 2 if change == "key" else 1}
    assert cached("x", key, [source], lambda work: made(2)).images[0, 0, 0, 0] == 2


def test_a_folder_is_another_one_when_any_file_below_it_changes(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.png").write_bytes(b"1")
    before = fingerprint(tmp_path / "a")
    assert fingerprint(tmp_path / "a") == before
    (tmp_path / "a" / "b" / "c.png").write_bytes(b"22")
    assert fingerprint(tmp_path / "a") != before


@pytest.mark.parametrize("error", [KeyboardInterrupt, BilevelError])
def test_an_interrupted_preparation_leaves_nothing(source, own_cache, error):
    def decode(work):
        work.empty((3, 4, 4, 1))[:] = 1
        raise error("stop")

    with pytest.raises(error):
        cached("x", {}, [source], decode)
    assert list(own_cache.iterdir()) == []
    assert len(cached("x", {}, [source], lambda work: made()).images) == 6


def test_an_interrupted_write_leaves_nothing(source, own_cache, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(BilevelError, match=r"No space left on device.*BILEVEL_CACHE"):
        cached("x", {}, [source], lambda work: made())
    assert list(own_cache.iterdir()) == []


def test_a_killed_process_leaves_nothing_that_is_read(source, own_cache):
    def killed():
        def decode(work):
            work.empty((3, 4, 4, 1))[:] = 1
            os._exit(9)

        cached("x", {}, [source], decode)

    process = multiprocessing.get_context("fork").Process(target=killed) if sys.platform == "linux" else None
    if process is None:
        pytest.skip("needs fork")
    process.start()
    process.join()
    assert process.exitcode == 9 and len(list(own_cache.iterdir())) == 1
    assert len(cached("x", {}, [source], lambda work: made()).images) == 6
    # What it left goes when it is old enough to belong to nobody.
    left = next(path for path in own_cache.iterdir() if path.name.startswith("."))
    os.utime(left, (1, 1))
    cached("x", {"other": 1}, [source], lambda work: made())
    assert not left.exists()


@pytest.mark.parametrize("file", ["images.npy", "labels.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_a_damaged_entry_is_made_again(source, own_cache, file, damage):
    cached("x", {}, [source], lambda work: made())
    (entry,) = own_cache.iterdir()
    if damage == "removed":
        (entry / file).unlink()
    else:
        (entry / file).write_bytes((entry / file).read_bytes()[:20])
    again = cached("x", {}, [source], lambda work: made())
    assert len(again.images) == 6 and int(again.images.sum()) == 6 * 16 * 7


def test_of_two_processes_one_wins_and_both_read_the_same(source, own_cache):
    if sys.platform != "linux":
        pytest.skip("needs fork")
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(3), context.Queue()

    def work():
        def decode(desk):
            barrier.wait(30)  # all of them are decoding now
            return made(5, count=500)

        found = cached("x", {}, [source], decode)
        answers.put((found.images.shape, int(found.images.sum())))

    processes = [context.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found == [((500, 4, 4, 1), 500 * 16 * 5)] * 3
    assert len(list(own_cache.iterdir())) == 1


def test_nothing_is_written_beside_the_sources(source, own_cache):
    before = sorted(source.parent.iterdir())
    cached("x", {}, [source], lambda work: made())
    assert sorted(set(source.parent.iterdir()) - {own_cache}) == sorted(set(before) - {own_cache})


def test_a_cache_that_cannot_be_written(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BILEVEL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BilevelError, match=r"cannot be written to .*BILEVEL_CACHE"):
        cached("x", {}, [source], lambda work: made())


def test_no_pickle_is_loaded(source, own_cache):
    cached("x", {}, [source], lambda work: made())
    (entry,) = own_cache.iterdir()
    np.save(entry / "labels.npy", np.array([{"a": 1}] * 6, dtype=object), allow_pickle=True)
    assert cached("x", {}, [source], lambda work: made()).labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_where_data_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "environment"))
    assert places.data_root() == tmp_path / "environment"
    assert places.data_root(tmp_path / "option") == tmp_path / "option"
    monkeypatch.delenv("BILEVEL_DATA")
    monkeypatch.delenv("BILEVEL_CACHE")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert places.data_root() == tmp_path / "xdg" / "bilevel" / "data"
        assert places.cache_root() == tmp_path / "xdg" / "bilevel" / "images"


def test_the_bar_shows_progress_on_standard_error(source, capfd):
    def decode(work):
        work.report(1, 2)
        work.report(2, 2)
        return made()

    cached("x", {}, [source], decode, progress=True)
    shown = capfd.readouterr()
    assert "preparing x" in shown.err and "2/2" in shown.err and shown.out == ""


def test_meta_is_plain_json(source, own_cache):
    cached("x", {}, [source], lambda work: made())
    (entry,) = own_cache.iterdir()
    assert json.loads((entry / "meta.json").read_text())["shape"] == [6, 4, 4, 1]
