"""Progress of long work: what a pipe or log file gets in the place of a bar."""

import pytest

from bilevel import progress


@pytest.fixture
def at_once(monkeypatch):
    """Every step writes a line, as if a minute had passed."""
    monkeypatch.setattr(progress, "BAR_FIRST", 0.0)
    monkeypatch.setattr(progress, "BAR_NEXT", 0.0)


def test_a_log_file_gets_lines_with_the_time_that_is_left(at_once, capsys):
    with progress.bar("training", 2_000, "loss {task.fields[loss]}", done=500, show=None, loss="…") as advance:
        advance(500)
        advance(1_250, loss="0.31")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "training: 500 of 2,000, 0.0 min, loss …"
    assert second == "training: 1,250 of 2,000, 0.0 min, about 0.0 min left, loss 0.31"


def test_the_time_that_is_left_follows_from_what_this_run_has_done(at_once, capsys, monkeypatch):
    clock = iter([0.0, 120.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.bar("training", 100, done=40, show=None) as advance:
        advance(60)
    assert capsys.readouterr().err == "training: 60 of 100, 2.0 min, about 4.0 min left\n"


def test_a_total_may_become_known_later(at_once, capsys):
    with progress.bar("images", None, show=None) as advance:
        advance(7)
        advance(8, total=10)
    assert [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()] == ["images: 7", "images: 8 of 10"]


def test_a_counter_names_the_current_work(at_once, capsys):
    with progress.counter("ridge", 2, None) as begin:
        begin("T = 10")
        begin("T = 50")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["ridge: 0 of 2", "ridge: 1 of 2", "ridge: 2 of 2"]
    assert lines[1].endswith("T = 50")


@pytest.mark.parametrize("show", [None, False])
def test_short_work_writes_nothing(show, capsys):
    with progress.bar("training", 2, show=show) as advance:
        advance(1)
        advance(2)
    assert capsys.readouterr().err == ""


def test_nothing_is_written_where_it_is_not_wanted(at_once, capsys):
    with progress.bar("training", 2, show=False) as advance:
        advance(1)
    assert capsys.readouterr().err == ""
