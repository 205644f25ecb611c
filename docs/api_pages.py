"""The API reference: one page per room, made from the names that `bilevel` exports and from the docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import bilevel

# The rooms in the order of the site. A room that is not named here comes after these, so nothing is ever left out.
TITLES = {
    "problem": "Problems",
    "hypergradients": "Hypergradients",
    "outer_loop": "The outer loop",
    "algorithms": "Algorithms of the outer loop",
    "certificate": "Certificates",
    "methods": "Methods",
    "structures": "Structures",
    "dynamics": "Dynamics",
    "linear_solvers": "Linear solvers",
    "constraints": "Constraints",
    "tasks": "Tasks",
    "modules": "Modules as functions",
    "tuning": "Tuning a torch model",
    "estimators": "Estimators",
    "tabular": "Tables",
    "learners": "Few-shot learning",
    "testing": "Testing",
    "data": "Data",
    "errors": "Errors and outcomes",
}
# What is public without being a name of `bilevel` itself.
MODULES = ["structures", "estimators", "tuning", "tabular", "testing", "data", "models", "trees"]
# What the public calls return or take, and is found in no list of names.
ALSO = {
    "outer_loop": ["bilevel.outer_loop.Iteration"],
    "algorithms": ["bilevel.algorithms.OuterProblem"],
    "methods": ["bilevel.engine.method.Stats"],
    "linear_solvers": ["bilevel.linear_solvers.base.LinearSolver", "bilevel.linear_solvers.base.LinearSolution"],
    "learners": [
        "bilevel.learners.classifier.FewShotClassifier",
        "bilevel.learners.library.find",
        "bilevel.learners.library.TrainedLearner",
        "bilevel.learners.fit",
        "bilevel.learners.base.Learner",
        "bilevel.learners.base.LearnerOptions",
        "bilevel.learners.base.NetworkOptions",
        "bilevel.learners.scoring_learner.ScoringLearner",
        "bilevel.learners.scoring_learner.Episode",
        "bilevel.learners.bilevel_learner.BilevelLearner",
        "bilevel.learners.bilevel_learner.DescentOptions",
    ],
    "data": ["bilevel.data.arrays.from_arrays", "bilevel.data.arrays.from_torch"],
    "models": ["bilevel.models.batch_norm.BatchNorm"],
}


def exported() -> dict[str, str]:
    """Every name of `bilevel`, and the module that defines it, as `__init__.pyi` says."""
    stub = ast.parse(Path(bilevel.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or alias.name for node in imports for alias in node.names}


def rooms() -> dict[str, list[str]]:
    """The full names on each page: those that `bilevel` exports, then those of the public modules."""
    found: dict[str, list[str]] = {room: [] for room in TITLES}
    for name, module in exported().items():
        if not inspect.ismodule(getattr(bilevel, name)):
            found.setdefault(module.split(".")[0], []).append(f"bilevel.{name}")
    for room, names in ALSO.items():
        found.setdefault(room, []).extend(names)
    known = {id(_resolve(name)) for names in found.values() for name in names}
    for room in MODULES:
        if module := _module(room):
            # A name that is on a page already, as `bilevel.NAME`, is not told twice.
            more = [f"{module.__name__}.{name}" for name in public(module)]
            found.setdefault(room, []).extend(name for name in more if id(_resolve(name)) not in known)
    return {room: names for room, names in found.items() if names}


def public(module: ModuleType) -> list[str]:
    """A module's classes and functions: those in `__all__`, or those that it defines itself."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    kept = [name for name in names if not name.startswith("_")]
    return [name for name in kept if inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name))]


def write(folder: Path) -> None:
    """One page per room and an index; pages of rooms that are gone are removed."""
    folder.mkdir(exist_ok=True)
    pages = {f"{room}.rst": _page(room, names) for room, names in rooms().items()}
    pages["commands.rst"] = _commands()
    pages["index.rst"] = _index(rooms())
    for stale in set(folder.glob("*.rst")) - {folder / name for name in pages}:
        stale.unlink()
    for name, text in pages.items():
        # A page that is as it was keeps its time, so that Sphinx does not read it again.
        if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != text:
            (folder / name).write_text(text, encoding="utf-8")


def _index(found: dict[str, list[str]]) -> str:
    lines = [*_heading("API reference"), "Every public name, by room; the text is that of the docstrings.", ""]
    lines += [".. toctree::", "   :hidden:", "", *(f"   {room}" for room in found), "   commands", ""]
    lines += ["The commands of the shell, with their options, are :doc:`here <commands>`.", ""]
    lines += [".. list-table::", "   :widths: 25 75", ""]
    for room, names in found.items():
        links = ", ".join(f":py:obj:`~{name}`" for name in names)
        lines += [f"   * - :doc:`{_title(room)} <{room}>`", f"     - {links}"]
    return "\n".join(lines) + "\n"


def _commands() -> str:
    """What `bilevel COMMAND --help` prints, for every command."""
    from typer.testing import CliRunner

    from bilevel.cli import build

    app, lines = build(), _heading("Commands")
    for command in sorted(str(command.name) for command in app.registered_commands):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "90", "TERMINAL_WIDTH": "90"}).stdout
        title = f"bilevel {command}"
        lines += [title, "-" * len(title), "", ".. code-block:: text", ""]
        lines += [f"   {line}".rstrip() for line in shown.strip().splitlines()] + [""]
    return "\n".join(lines) + "\n"


def _page(room: str, names: list[str]) -> str:
    lines = _heading(_title(room))
    module = _module(room)
    if module and module.__doc__:
        lines += [escaped(line) for line in inspect.cleandoc(module.__doc__).splitlines()] + [""]
    for name in names:
        value = _resolve(name)
        if inspect.isclass(value):
            lines += [f".. autoclass:: {name}", "   :members:", ""]
        else:
            lines += [f".. autofunction:: {name}", ""]
    return "\n".join(lines) + "\n"


def _heading(title: str) -> list[str]:
    return [title, "=" * len(title), ""]


def _title(room: str) -> str:
    return TITLES.get(room, room.replace("_", " ").capitalize())


def _module(room: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"bilevel.{room}")
    except ModuleNotFoundError:
        return None


def _resolve(name: str) -> Any:
    parts = name.split(".")
    module, rest = bilevel, parts[1:]
    while len(rest) > 1:
        module, rest = importlib.import_module(f"{module.__name__}.{rest[0]}"), rest[1:]
    return getattr(module, rest[0])


def as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `code` in backticks; what reStructuredText would make of the rest is escaped."""
    example = False
    for i, line in enumerate(lines):
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            # The name of an argument stays as it is: napoleon looks for it.
            head = re.match(r"\s*(?:[\w, ]+:(?=\s|$))?", line)
            start = head.end() if head else 0
            lines[i] = line[:start] + escaped(line[start:])


def is_foreign(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Whether a member comes from another package, scikit-learn's generated methods say; None leaves the choice."""
    home = getattr(inspect.unwrap(obj) if callable(obj) else obj, "__module__", None)
    return True if isinstance(home, str) and not home.startswith("bilevel") else None


def _one_escaped(match: re.Match[str]) -> str:
    return match.group(1) or "\\" + match.group(2)


def escaped(text: str) -> str:
    """`code` as a literal, *emphasis* as it is, and no other markup."""
    parts = re.split(r"`([^`]+)`", text)
    plain = [re.sub(r"(\*\w[^*]*\w\*)|([\\*|`]|(?<=\w)_(?!\w))", _one_escaped, part) for part in parts[::2]]
    # A literal may not touch a word: an escaped space ends it.
    literal = [rf"``{part}``\ " for part in parts[1::2]]
    return "".join(a + b for a, b in zip(plain, [*literal, ""], strict=True))
