"""The documentation site: `make docs` builds it, and it works without a network."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import api_pages

import bilevel

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"

project = "bilevel"
author = "The bilevel developers"
copyright = "the bilevel developers, MIT licence"  # noqa: A001 - Sphinx wants this name
version = release = bilevel.__version__
language = "en_GB"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "results/*/runs", "pictures"]
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
# The pages of results are written by the experiments, and skip a level of headings.
suppress_warnings = ["myst.header", "config.cache"]

html_theme = "furo"
html_title = "bilevel"
pygments_style = "default"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["bilevel.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has the annotations' names, the text what they mean
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # an override repeats nothing
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = False
napoleon_attr_annotations = False
napoleon_custom_sections = [("Warns", "returns_style")]

# With BILEVEL_QUICK=1 the examples do a part of their work: enough to see that they run.
sphinx_gallery_conf: dict[str, Any] = {
    "examples_dirs": str(EXAMPLES),
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_",
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 1,
    "abort_on_example_error": False,
    "only_warn_on_example_error": False,
    "remove_config_comments": True,
    "show_signature": False,
    "image_scrapers": ("matplotlib",),
    "write_computation_times": False,
    "capture_repr": (),  # what is printed, and not the value of a block's last line
    "reset_modules": ("matplotlib", "gallery_state.reset"),
}


def _mathml(tex: str, display: str) -> tuple[str, str]:
    r"""MathML of a formula, and the number that its \tag{…} gives it."""
    tag = re.search(r"\\tag\{([^}]*)\}", tex)
    formula = tex.replace(tag.group(0), "") if tag else tex
    return convert(formula.strip(), display=display), tag.group(1) if tag else ""


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(_mathml(node.astext(), "inline")[0])
    raise nodes.SkipNode


def _display(translator: Any, node: nodes.math_block) -> None:
    formula, number = _mathml(node.astext(), "block")
    label = f'<span class="equation-number">({number})</span>' if number else ""
    translator.body.append(f'<div class="equation">{formula}{label}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    app.connect("builder-inited", lambda _: api_pages.write(HERE / "api"), priority=100)
    app.connect("autodoc-skip-member", api_pages.is_foreign)
    app.connect("autodoc-process-docstring", api_pages.as_restructured_text, priority=100)
