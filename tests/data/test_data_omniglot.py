"""Omniglot: both layouts, the split, what is missing or wrong, and the downloader."""

import io
import urllib.error

import numpy as np
import pytest
from data_fixtures import png, small_omniglot, write_zip
from PIL import Image

from bilevel import BilevelError
from bilevel.data import download, load, omniglot


@pytest.fixture
def small(monkeypatch):
    """Five characters instead of 1,623."""
    monkeypatch.setattr(omniglot, "CHARACTERS", {"images_background": 3, "images_evaluation": 2})
    return small_omniglot()


def extract(root, members):
    for name, contents in members.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(contents)


def zipped(root, sets):
    for name, members in sets.items():
        write_zip(root / "omniglot" / f"{name}.zip", members)
    return root


def test_zips_and_folders_give_the_same(tmp_path, small):
    zipped(tmp_path / "zips", small)
    for members in small.values():
        extract(tmp_path / "folders" / "omniglot", members)
    one, two = load("omniglot", tmp_path / "zips"), load("omniglot", tmp_path / "folders")
    assert np.array_equal(one.images, two.images) and one.classes == two.classes
    assert one.classes == ("A/character01", "A/character02", "B/character01", "C/character01", "C/character02")
    assert one.images.shape == (100, 28, 28, 1) and one.labels.tolist() == [k // 20 for k in range(100)]
    # The folder itself may be the data root.
    assert load("omniglot", tmp_path / "zips" / "omniglot").classes == one.classes


def test_pixels_are_the_nearest_ones_and_ink_is_255(tmp_path, small):
    data = load("omniglot", zipped(tmp_path, small))
    paper = Image.open(io.BytesIO(small["images_background"]["images_background/A/character02/0002_07.png"]))
    expected = 255 - np.asarray(paper.convert("L").resize((28, 28), Image.Resampling.NEAREST))
    assert np.array_equal(data.images[26, :, :, 0], expected)
    assert set(np.unique(data.images)) == {0, 255} and data.images[26, 0, 0, 0] == 255


def test_what_is_missing_is_said_with_where_to_get_it(tmp_path, small):
    with pytest.raises(BilevelError) as error:
        load("omniglot", tmp_path)
    for text in (
        "images_background.zip",
        "images_evaluation.zip",
        str(tmp_path / "omniglot"),
        "https://",
        "BILEVEL_DATA",
    ):
        assert text in str(error.value)
    write_zip(tmp_path / "omniglot" / "images_background.zip", small["images_background"])
    with pytest.raises(BilevelError, match="no images_evaluation") as error:
        load("omniglot", tmp_path)
    assert "images_background.zip" not in str(error.value)


def test_an_incomplete_archive_or_a_broken_drawing(tmp_path, small):
    name, contents = small["images_background"].popitem()
    zipped(tmp_path, small)
    with pytest.raises(BilevelError, match="B/character01 has 19 drawings instead of 20"):
        load("omniglot", tmp_path)
    small["images_background"][name] = contents[:60]
    zipped(tmp_path, small)
    with pytest.raises(BilevelError, match=r"The image .*0003_20\.png in .*images_background\.zip cannot be read"):
        load("omniglot", tmp_path)
    small["images_background"][name] = png(np.zeros((28, 28), np.uint8))
    zipped(tmp_path, small)
    with pytest.raises(BilevelError, match="28×28; Omniglot's are 105×105"):
        load("omniglot", tmp_path)


def test_the_checksum_is_of_the_drawings_and_not_of_the_packing(tmp_path, small, monkeypatch):
    path = write_zip(tmp_path / "images_background.zip", small["images_background"])
    extract(tmp_path, small["images_background"])
    digest = omniglot.pixels_digest(path)
    assert omniglot.pixels_digest(tmp_path / "images_background") == digest
    monkeypatch.setitem(omniglot.SHA256, "images_background", digest)
    omniglot.verify(path)
    name, other = next(iter(small["images_background"])), png(np.zeros((105, 105), np.uint8), "1")
    write_zip(path, small["images_background"] | {name: other})
    with pytest.raises(BilevelError, match="does not hold the drawings"):
        omniglot.verify(path)


class Answer(io.BytesIO):
    def __init__(self, contents, length=None):
        super().__init__(contents)
        self.headers = {"Content-Length": str(len(contents) if length is None else length)}


def test_download_verifies_and_names_the_file_last(tmp_path, small, monkeypatch):
    asked = []

    def answer(address, timeout):
        asked.append(address)
        name = address.rpartition("/")[2].removesuffix(".zip")
        return Answer(write_zip(tmp_path / "server" / f"{name}.zip", small[name]).read_bytes())

    monkeypatch.setattr(download.urllib.request, "urlopen", answer)
    with pytest.raises(BilevelError, match="does not hold the drawings"):
        load("omniglot", tmp_path / "data", download=True)
    assert list((tmp_path / "data" / "omniglot").iterdir()) == []
    for name in omniglot.SETS:
        digest = omniglot.pixels_digest(write_zip(tmp_path / "server" / f"{name}.zip", small[name]))
        monkeypatch.setitem(omniglot.SHA256, name, digest)
    asked.clear()
    assert len(load("omniglot", tmp_path / "data", download=True)) == 100
    load("omniglot", tmp_path / "data", download=True)
    assert asked == [f"{omniglot.ADDRESS}{name}.zip" for name in omniglot.SETS]  # and not a second time


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda *_, **__: (_ for _ in ()).throw(urllib.error.URLError("no route")), "could not be reached .no route"),
        (lambda *_, **__: Answer(b"123", length=9), "cut off after 3 of 9 bytes"),
        (lambda *_, **__: Answer(bytes(2000)), "more than 1,000 bytes"),
    ],
)
def test_a_failed_download_leaves_no_file(tmp_path, monkeypatch, answer, message):
    monkeypatch.setattr(download.urllib.request, "urlopen", answer)
    with pytest.raises(BilevelError, match=message):
        download.fetch("https://example.org/a.zip", tmp_path / "data" / "a.zip", lambda path: None, 1000)
    assert list((tmp_path / "data").iterdir()) == []


def test_nothing_is_downloaded_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(download.urllib.request, "urlopen", lambda *_, **__: pytest.fail("went online"))
    with pytest.raises(BilevelError, match="bilevel data download omniglot"):
        load("omniglot", tmp_path)
    with pytest.raises(BilevelError, match="only https"):
        download.fetch("http://example.org/a.zip", tmp_path / "a.zip", lambda path: None, 1000)


@pytest.mark.slow
def test_the_real_one(real):
    root = real("omniglot/images_background.zip", "omniglot/images_evaluation.zip")
    data = load("omniglot", root)
    assert data.images.shape == (32460, 28, 28, 1) and len(data.classes) == 1623
    assert {name: len(chosen) for name, chosen in data.splits.items()} == {"train": 1200, "val": 100, "test": 323}
    assert np.array_equal(np.bincount(data.labels), np.full(1623, 20))
    assert 0.03 < (data.images > 0).mean() < 0.2
    other = load("omniglot", root, seed=1)
    assert isinstance(other.images, np.memmap) and other.fingerprint == data.fingerprint  # one decoding for all splits
    assert set(other.splits["test"]) != set(data.splits["test"])
    omniglot.verify(root / "omniglot" / "images_evaluation.zip")
