"""Groups of features that share a penalty."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bilevel.errors import BilevelError
from bilevel.tabular.columns import Column
from bilevel.tabular.reading import read_table
from bilevel.tabular.words import listed


def read_groups(rule: str, columns: Sequence[Column]) -> tuple[list[str], NDArray[np.int64]]:
    """The names of the groups, and the group of every feature.

    The indicators of a categorical column are always in one group, its column's.

    Args:
        rule: "columns" (each column is a group), "prefix" (the name up to its first _, - or .), a JSON file
            `{"group": ["column", …]}` or `{"column": "group"}`, or a CSV file with the columns `column` and `group`.
        columns: of the table.

    >>> names, ids = read_groups("prefix", [Column(name, "number") for name in ("size_x", "age", "size_y")])
    >>> names, ids.tolist()
    (['size', 'age'], [0, 1, 0])
    """
    if rule == "columns":
        chosen = {column.name: column.name for column in columns}
    elif rule == "prefix":
        chosen = {column.name: _prefix(column.name) for column in columns}
    else:
        chosen = _from_file(Path(rule))
        _check(rule, chosen, [column.name for column in columns])
    names = list(dict.fromkeys(chosen[column.name] for column in columns))
    place = {name: number for number, name in enumerate(names)}
    return names, np.array([place[chosen[column.name]] for column in columns for _ in column.features], dtype=np.int64)


def _prefix(name: str) -> str:
    cut = min((place for mark in "_-." if (place := name.find(mark)) > 0), default=len(name))
    return name[:cut]


def _from_file(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise BilevelError(f"--groups {path} is not a file; write FILE.csv, FILE.json, prefix or columns.")
    if path.suffix.lower() == ".json":
        return _from_json(path)
    frame = read_table(path, as_text=True).frame
    if not {"column", "group"} <= set(frame.columns):
        raise BilevelError(
            f"--groups {path} has the columns {listed(frame.columns)}; it needs 'column' and 'group', a row per column."
        )
    return _mapped(path, zip(frame["column"], frame["group"], strict=True))


def _from_json(path: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise BilevelError(f"--groups {path} is not valid JSON ({error}).") from error
    if isinstance(found, Mapping) and all(isinstance(value, list) for value in found.values()):
        return _mapped(path, ((str(name), group) for group, names in found.items() for name in names))
    if isinstance(found, Mapping) and all(isinstance(value, (str, int)) for value in found.values()):
        return {name: str(group) for name, group in found.items()}
    raise BilevelError(f'--groups {path} must hold {{"group": ["column", …], …}} or {{"column": "group", …}}.')


def _mapped(path: Path, pairs: Any) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for name, group in pairs:
        if chosen.setdefault(str(name), str(group)) != str(group):
            raise BilevelError(f"--groups {path} puts column {name!r} into two groups, {chosen[name]!r} and {group!r}.")
    return chosen


def _check(rule: str, chosen: Mapping[str, str], columns: Sequence[str]) -> None:
    if without := [name for name in columns if name not in chosen]:
        raise BilevelError(f"--groups {rule} has no group for column{'s' * (len(without) > 1)} {listed(without)}.")
    if extra := [name for name in chosen if name not in columns]:
        raise BilevelError(
            f"--groups {rule} names {listed(extra)}, not among the columns that the features come from: "
            f"{listed(columns)}."
        )
