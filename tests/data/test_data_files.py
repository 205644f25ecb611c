"""Archives that nobody vouches for."""

import gzip
import stat
import zipfile

import pytest
from data_fixtures import write_zip

from bilevel import BilevelError
from bilevel.data.files import ArchiveLimits, gunzip, open_tree


def opened(path, limits=None):
    with open_tree(path, limits) as files:
        return files.names


def test_members_are_read(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"images/b.txt": b"two", "images/a.txt": b"one"})
    with open_tree(path, top="images") as files:
        assert files.names == ["a.txt", "b.txt"]
        assert files.read("b.txt") == b"two" and files.describe("b.txt") == f"images/b.txt in {path}"
        with pytest.raises(BilevelError, match="no member 'c'"):
            files.read("c")


@pytest.mark.parametrize(
    "name", ["../evil.png", "/etc/evil.png", "images/../../evil.png", "C:/evil.png", "a\\..\\evil"]
)
def test_a_path_that_escapes_is_refused_and_named(tmp_path, name):
    path = write_zip(tmp_path / "a.zip", {"images/a.png": b"x", name: b"x"})
    with pytest.raises(BilevelError, match="points outside") as error:
        opened(path)
    assert str(path) in str(error.value) and "evil" in str(error.value)


def test_a_symbolic_link_is_refused(tmp_path):
    link = zipfile.ZipInfo("images/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(BilevelError, match="symbolic link"):
        opened(tmp_path / "a.zip")


def test_bombs_are_refused_before_they_are_read(tmp_path, monkeypatch):
    bomb = write_zip(tmp_path / "bomb.zip", {"images/a.png": bytes(4 * 2**20)}, zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("a bomb was read"))
    with pytest.raises(BilevelError, match="decompression bomb"):
        opened(bomb)
    with pytest.raises(BilevelError, match="at most 1,000 are read"):
        opened(bomb, ArchiveLimits(member=1000))
    many = write_zip(tmp_path / "many.zip", {f"{k}.png": b"12345" for k in range(10)})
    with pytest.raises(BilevelError, match="expands to 50 bytes"):
        opened(many, ArchiveLimits(total=49))
    with pytest.raises(BilevelError, match="10 members"):
        opened(many, ArchiveLimits(members=9))


def test_a_name_that_appears_twice(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.png", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.png", b"2")
    with pytest.raises(BilevelError, match="appears twice"):
        opened(tmp_path / "a.zip")


def test_truncated_and_corrupt_archives_are_named(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"images/a.png": bytes(range(256)) * 8})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BilevelError, match=r"a\.zip is not a readable zip file.*truncated"):
        opened(path)
    damaged = bytearray(whole)
    damaged[200] ^= 0xFF
    path.write_bytes(damaged)
    with open_tree(path) as archive, pytest.raises(BilevelError, match=r"'images/a\.png' in .*a\.zip is damaged"):
        archive.read("images/a.png")


def test_gzip(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    assert gunzip(path, 1000) == bytes(1000)
    with pytest.raises(BilevelError, match="more than 999 bytes"):
        gunzip(path, 999)
    path.write_bytes(gzip.compress(bytes(1000))[:-9])
    with pytest.raises(BilevelError, match=r"a\.gz is not a readable gzip file"):
        gunzip(path, 1000)
