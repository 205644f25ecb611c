"""The README's Python runs as it stands and prints what it says."""

import re
from pathlib import Path

import pytest

import printed_code

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_prints_what_it_shows():
    assert len(printed_code.blocks(README)) >= 3
    printed_code.assert_prints_what_it_shows(README)


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (README.parent / target).exists(), target


@pytest.mark.parametrize("command", ["demo", "run", "list"])
def test_the_commands_that_the_readme_names_exist(command):
    import bilevel.cli
    from bilevel import discovery

    names = {name.rsplit(".", 1)[1] for name in discovery.modules(bilevel.cli)}
    assert command in names
