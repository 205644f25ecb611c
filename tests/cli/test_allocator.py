"""The command, and only the command, tells malloc to keep freed memory."""

from bilevel import cli
from bilevel.cli import _allocator


def test_a_users_setting_of_malloc_is_respected(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert _allocator.keep_freed_memory() is False


def test_without_glibc_nothing_happens(monkeypatch):
    for name in list(_allocator.os.environ):
        if name.startswith(("MALLOC_", "GLIBC_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(_allocator.ctypes, "CDLL", lambda name: object())
    assert _allocator.keep_freed_memory() is False


def test_the_command_asks_for_it(monkeypatch):
    calls = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: calls.append("asked"))
    monkeypatch.setattr(cli, "build", lambda: lambda: calls.append("ran"))
    monkeypatch.setattr(cli.warnings, "showwarning", cli.warnings.showwarning)  # put back after the test
    cli.main()
    assert calls == ["asked", "ran"]
