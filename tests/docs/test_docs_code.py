"""The Python and the commands of the documentation's pages run as they stand and print what they say."""

from pathlib import Path

import pytest

import printed_code
from battery_shares import share

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if printed_code.blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where pages that write files may write them
    monkeypatch.setenv("BILEVEL_CACHE", str(tmp_path / "cache"))
    # The batteries that a page runs meet every example and every dynamics, as those of our own methods do;
    # and heavy ball on the quadratic problem, at which a wrong method fails on a page.
    monkeypatch.setattr("bilevel.testing.methods.battery_cases", lambda: share(5, shift=3))
    printed_code.assert_prints_what_it_shows(page)


@pytest.mark.parametrize("found, shown", [("1\n", ""), ("", "1\n"), ("1.00 a\n", "1.01 a\n"), ("a b c\n", "b … c\n")])
def test_a_page_that_shows_something_else_is_noticed(found, shown, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```python\nprint({found!r}, end='')\n```\n```text\n{shown}```\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        printed_code.assert_prints_what_it_shows(page)


def test_an_ellipsis_stands_for_what_changes_from_run_to_run():
    assert printed_code.agree(
        ["took", "3.2", "s", "on", "2", "cores", "and", "ended"], ["took", "…", "s", "on", "…", "ended"]
    )
    assert not printed_code.agree(["took", "3.2", "s"], ["took", "…", "hours"])
