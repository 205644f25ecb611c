"""Templates of the pages, and style sheets and scripts that are written into a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bilevel.report.formatting import number, setting

TEMPLATES = Path(__file__).parent / "templates"


def template(name: str, **filters: Callable[..., Any]) -> jinja2.Template:
    """A template, with filters of its own beside those that every page has."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "setting": setting, **filters}
    return environment.get_template(name)


def inlined(*names: str) -> Markup:
    """Style sheets or scripts, one after another: a page must not need any other file."""
    return Markup("".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names))
