"""The direction of imports, read from the files."""

import ast
import re
from pathlib import Path

import bilevel

ROOT = Path(bilevel.__file__).parent
# Rooms in the order in which they may import each other: a room sees itself and everything before it.
ORDER = [
    {"errors", "trees", "discovery", "extras", "progress", "source_commit", "thread_pool"},
    {"files", "distributed"},
    {"plotting"},
    {"problem", "modules", "structures"},
    {"dynamics", "linear_solvers", "constraints", "tasks", "data", "models"},
    {"engine"},
    {"methods"},
    {"hypergradients"},
    {"certificate", "compilation", "smoothness", "solutions"},
    {"hyperiterations"},
    {"algorithms"},
    {"training"},
    {"outer_sources", "outer_record", "outer_checkpoints", "outer_ranks", "outer_loop"},
    {"learners", "estimators", "tuning"},
    {"testing"},
    {"tabular"},
    {"experiments", "report"},
    {"app"},
    {"cli"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}


def room_of(path: Path) -> str:
    part = path.relative_to(ROOT).parts[0]
    return part.removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "bilevel":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bilevel."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("bilevel.")}
    return found


def files():
    return [path for path in ROOT.rglob("*.py") if path.name not in ("__main__.py",) and path != ROOT / "__init__.py"]


def test_every_room_is_in_the_plan():
    assert {room_of(path) for path in files()} <= set(RANK)


def test_imports_go_one_way():
    wrong = []
    for path in files():
        here = room_of(path)
        wrong += [
            f"{path.relative_to(ROOT)} imports {room}"
            for room in imported_rooms(path) & set(RANK)
            if RANK[room] > RANK[here]
        ]
        wrong += [
            f"{path.relative_to(ROOT)} imports its neighbour {room}"
            for room in imported_rooms(path) & set(RANK)
            if RANK[room] == RANK[here]
            and room != here
            and here not in ("errors", "trees", "extras", "progress", "problem", "outer_loop", "testing")
        ]
    assert not wrong


def test_methods_know_no_concrete_dynamics_task_or_model():
    concrete = re.compile(r"bilevel\.(dynamics\.(?!base)|tasks|data|models)")
    assert not [path.name for path in (ROOT / "methods").rglob("*.py") if concrete.search(path.read_text())]


def test_files_are_short():
    assert not [
        f"{path.relative_to(ROOT)}: {count}" for path in files() if (count := len(path.read_text().splitlines())) > 400
    ]


def test_the_public_names_exist_and_nothing_of_the_project_names_a_machine():
    for name in bilevel.__all__:
        assert getattr(bilevel, name) is not None
