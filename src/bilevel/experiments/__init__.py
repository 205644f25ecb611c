"""The paper's tables and figures: one file each, found by walking this folder.

A file is an experiment when it defines a subclass of `ExperimentSettings`; `base.py` holds the contract. Files are
described by reading their source, so that listing them imports nothing: an experiment's module, and torch with it, is
imported only to run it.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from bilevel import extras
from bilevel.errors import BilevelError


@dataclass(frozen=True)
class Description:
    """What is known about an experiment without importing it: its name, the first line of its docstring, and its
    place in the paper."""

    name: str
    summary: str
    paper: str
    module: str


@cache
def find() -> dict[str, Description]:
    """Every experiment in this folder, by name.

    >>> find()["ridge"].paper
    'Table 5 (Appendix C)'
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    found = (_describe(file) for file in files if not file.name.startswith("_"))
    return {description.name: description for description in found if description is not None}


def load(name: str) -> ModuleType:
    """Import the experiment; an unknown name is an error that lists the known ones."""
    known = find()
    if name not in known:
        raise BilevelError(
            f"There is no experiment {name!r}.{did_you_mean(name, known)} The known ones are: {', '.join(known)}. See "
            "`bilevel list`."
        )
    extras.require("matplotlib", "sklearn", extra="report", purpose=f"The experiment {name}")
    return importlib.import_module(known[name].module)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' for a word that is nearly one of the known ones, otherwise nothing.

    >>> did_you_mean("rigde", ["ridge", "figure-1"])
    " Did you mean 'ridge'?"
    """
    close = difflib.get_close_matches(word.lower().replace("_", "-"), list(known), n=1) or difflib.get_close_matches(
        word, list(known), n=1
    )
    return f" Did you mean {close[0]!r}?" if close else ""


def _describe(file: Path) -> Description | None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    bases = {ast.unparse(base) for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases}
    if "ExperimentSettings" not in bases:
        return None
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    return Description(file.stem.replace("_", "-"), summary, _paper(tree), f"{__name__}.{file.stem}")


def _paper(tree: ast.Module) -> str:
    """The string `PAPER` of the file."""
    values = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PAPER")
    return next((str(ast.literal_eval(value)) for value in values), "")
