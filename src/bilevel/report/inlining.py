"""Style sheets and scripts as parts of a page, which must not need any other file."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


def inlined(*names: str) -> Markup:
    """The files of the templates' folder, one after another."""
    return Markup("".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names))
