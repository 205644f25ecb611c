"""What the site is made of: every public name, every page, pictures that scripts draw, formulas as MathML."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import bilevel

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.fixture(scope="module")
def api_pages():
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("api_pages")
    finally:
        sys.path.remove(str(DOCS))


def test_every_public_name_is_in_the_api_reference(api_pages, tmp_path):
    api_pages.write(tmp_path)
    text = "".join(page.read_text(encoding="utf-8") for page in tmp_path.glob("*.rst"))
    documented = re.findall(r"^\.\. auto(?:class|function):: (\S+)$", text, re.MULTILINE)
    assert len(documented) == len(set(documented))
    names = {name for name in bilevel.__all__ if not inspect.ismodule(getattr(bilevel, name))}
    assert {f"bilevel.{name}" for name in names} <= set(documented)
    for room in ("estimators", "testing", "tuning", "data"):
        module = importlib.import_module(f"bilevel.{room}")
        objects = [api_pages._resolve(name) for name in documented]
        missing = [name for name in api_pages.public(module) if getattr(module, name) not in objects]
        assert missing == [] and api_pages.public(module)


def test_every_command_is_in_the_reference_with_its_options(api_pages, tmp_path):
    api_pages.write(tmp_path)
    text = (tmp_path / "commands.rst").read_text(encoding="utf-8")
    folder = Path(bilevel.__file__).parent / "cli"
    commands = {file.stem.replace("_", "-") for file in folder.glob("*.py") if not file.stem.startswith("_")}
    assert set(re.findall(r"^bilevel (\S+)$", text, re.MULTILINE)) == commands
    assert "--data-root" in text and "Usage: bilevel classify [OPTIONS]" in text


def test_a_name_that_is_new_comes_into_the_reference_by_itself(api_pages, tmp_path, monkeypatch):
    monkeypatch.setattr(api_pages, "exported", lambda: {"Problem": "problem", "Episodes": "somewhere.new"})
    monkeypatch.setattr(api_pages, "MODULES", [])
    api_pages.write(tmp_path)
    assert ".. autoclass:: bilevel.Episodes" in (tmp_path / "somewhere.rst").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "plain, restructured",
    [
        ("|f_T − f| of `x_` and coef_", r"\|f_T − f\| of ``x_``\  and coef\_"),
        ("the paper's *Approx*, a * b", r"the paper's *Approx*, a \* b"),
        ("an open `tick", r"an open \`tick"),
    ],
)
def test_docstrings_are_text_and_not_markup(api_pages, plain, restructured):
    assert api_pages.escaped(plain) == restructured


def test_docstrings_keep_their_arguments_and_examples(api_pages):
    lines = ["Args:", "    alpha_: |a|", "", ">>> a | b_", "'x_'", "", "then c_"]
    api_pages.as_restructured_text(None, "class", "name", None, None, lines)
    assert lines == ["Args:", r"    alpha_: \|a\|", "", ">>> a | b_", "'x_'", "", r"then c\_"]


def test_every_page_is_in_the_table_of_contents():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.stem == "index" or re.search(rf"^{page.stem}$", index, re.MULTILINE), page.name
    for table in DOCS.glob("results/*/table.md"):
        assert f"<results/{table.parent.name}/table>" in index, table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere_on_a_code_host_too(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if target.startswith(("gallery/", "api/")):  # made by the build
            continue
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_pictures_are_what_their_scripts_draw(tmp_path):
    sys.path.insert(0, str(DOCS / "pictures"))
    try:
        draw = importlib.import_module("draw")
        draw.draw(tmp_path)
    finally:
        sys.path.remove(str(DOCS / "pictures"))
    drawn = sorted(tmp_path.glob("*.svg"))
    assert [picture.name for picture in drawn] == [f"{name}.svg" for name in draw.scripts()]
    for picture in drawn:
        committed = (DOCS / "images" / picture.name).read_text(encoding="utf-8")
        # Versions of matplotlib differ in digits and not in how much there is to see.
        assert committed.count("<path") == pytest.approx(picture.read_text(encoding="utf-8").count("<path"), rel=0.1)
        assert any(f"images/{picture.name}" in page.read_text(encoding="utf-8") for page in PAGES)


def test_every_room_is_on_the_page_and_in_the_picture_of_the_architecture():
    source = Path(bilevel.__file__).parent
    rooms = {path.stem for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    picture = (DOCS / "pictures" / "rooms.py").read_text(encoding="utf-8")
    for room in rooms - {"__init__", "__main__"}:
        assert re.search(rf"\b{room}\b", page), room
        assert f'"{room}"' in picture, room


@pytest.mark.parametrize(
    "page, first, last",
    [
        ("choosing_a_method.md", "## Figures from the benchmarks", "## Which linear solver"),
        ("alternatives.md", "| compiled code in jax", "| a differentiable optimiser"),
    ],
)
def test_benchmark_figures_are_those_of_the_last_run(page, first, last):
    results = (DOCS.parent / "benchmarks" / "results" / "RESULTS.md").read_text(encoding="utf-8")
    section = (DOCS / page).read_text(encoding="utf-8").partition(first)[2].partition(last)[0]
    figures = re.findall(r"\d+\.\d+|\b\d{3,}\b", section.replace(",", ""))
    assert len(figures) >= 3
    known = set(re.findall(r"\d+\.\d+|\d+", results.replace(",", "")))
    assert [figure for figure in figures if figure not in known] == []
