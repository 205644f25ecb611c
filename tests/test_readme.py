"""The README's Python runs as it stands and prints what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_prints_what_it_shows():
    scope = {}
    blocks = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(README), "exec"), scope)
        found, expected = printed.getvalue().split(), shown.split()
        assert len(found) == len(expected)
        assert [pair for pair in zip(found, expected, strict=True) if not alike(*pair)] == []


def alike(found, expected):
    """The same word, or numbers that differ by rounding only; what is itself a rounding error need only be as small."""
    if found == expected:
        return True
    try:
        a, b = float(found.strip(",;()")), float(expected.strip(",;()"))
    except ValueError:
        return False
    return abs(a - b) <= 2e-3 * abs(b) or max(abs(a), abs(b)) < 1e-8


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 190
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (README.parent / target).exists(), target


@pytest.mark.parametrize("command", ["demo", "run", "list"])
def test_the_commands_that_the_readme_names_exist(command):
    import bilevel.cli
    from bilevel import discovery

    names = {name.rsplit(".", 1)[1] for name in discovery.modules(bilevel.cli)}
    assert command in names
