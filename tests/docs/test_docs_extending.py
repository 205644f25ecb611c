"""Every worked example of the page on extending is found when its file is put into the folder that it names."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import bilevel.cli
from bilevel import algorithms, constraints, data, dynamics, experiments, learners, linear_solvers, methods, models
from bilevel.tuning import roles
from printed_code import blocks

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
FOUND = {
    "dynamics/adagrad.py": lambda: "AdaGrad" in dynamics.find(),
    "methods/every_iterate.py": lambda: "EveryIterate" in methods.find(),
    "linear_solvers/minimal_residual.py": lambda: "MinimalResidual" in linear_solvers.find(),
    "constraints/ascending.py": lambda: "Ascending" in constraints.find(),
    "algorithms/barzilai_borwein.py": lambda: "BarzilaiBorwein" in algorithms.find(),
    "tuning/roles/stay_close.py": lambda: "StayClose" in roles.find(),
    "learners/catalogue/nearest_image.py": lambda: (
        "nearest-image" in learners.names() and learners.get("nearest-image")
    ),
    "models/small.py": lambda: "small" in models.find(),
    "data/digits.py": lambda: "digits" in data.find(),
    "experiments/limits.py": lambda: "limits" in experiments.find.__wrapped__(),  # not what it remembers
    "cli/greet.py": lambda: "greet" in [command.name for command in bilevel.cli.build().registered_commands],
}


def files():
    """The blocks that begin with the name of a file."""
    named = ((re.match(r"# (\S+\.py)\n", code), code) for _, code, _ in blocks(PAGE))
    return {match.group(1): code for match, code in named if match}


def test_the_page_has_an_example_of_each_kind():
    assert set(files()) == set(FOUND)


@pytest.mark.parametrize("name", sorted(FOUND))
def test_a_file_in_its_folder_is_enough(name, tmp_path, monkeypatch):
    room, _, file = name.rpartition("/")
    package = importlib.import_module("bilevel." + room.replace("/", "."))
    module = f"{package.__name__}.{Path(file).stem}"
    assert not FOUND[name]()
    (tmp_path / file).write_text(files()[name], encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(package, "__file__", str(tmp_path / "__init__.py"))  # experiments are read, not imported
    importlib.invalidate_caches()
    try:
        assert FOUND[name]()
    finally:
        sys.modules.pop(module, None)
        vars(package).pop(Path(file).stem, None)
