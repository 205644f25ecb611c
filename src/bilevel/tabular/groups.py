"""Groups of columns whose features share a penalty."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bilevel.errors import BilevelError
from bilevel.tabular.reading import read_table
from bilevel.tabular.words import listed


def column_groups(rules: Sequence[str], columns: Sequence[str], others: Sequence[str] = ()) -> dict[str, str]:
    """The group of every column.

    Args:
        rules: "columns" (each column is a group), "prefix" (the name up to its first _, - or .), a JSON file
            `{"group": ["column", …]}` or `{"column": "group"}`, or a CSV file with the columns `column` and `group`.
            Or several `pattern=name`: columns whose names match the pattern, in which * stands for anything; the first
            that matches counts, and columns that none matches are the group "other".
        columns: those that features come from.
        others: columns of the table that a file may name as well, without effect.

    >>> column_groups(["prefix"], ["size_x", "age", "size_y"])
    {'size_x': 'size', 'age': 'age', 'size_y': 'size'}
    >>> column_groups(["gene_*=genes", "*age*=person"], ["gene_1", "age", "gene_2", "dose"])
    {'gene_1': 'genes', 'age': 'person', 'gene_2': 'genes', 'dose': 'other'}
    """
    if any("=" in rule for rule in rules):
        return _from_patterns(rules, columns)
    if len(rules) > 1:
        raise BilevelError(f"--group {rules[1]} comes after --group {rules[0]}; several are for PATTERN=NAME alone.")
    rule = rules[0]
    if rule == "columns":
        return {name: name for name in columns}
    if rule == "prefix":
        return {name: re.split(r"(?<=.)[_.-]", name, maxsplit=1)[0] for name in columns}
    groups = _from_file(Path(rule))
    if without := [name for name in columns if name not in groups]:
        raise BilevelError(f"--group {rule} has no group for column{'s' * (len(without) > 1)} {listed(without)}.")
    if extra := [name for name in groups if name not in {*columns, *others}]:
        raise BilevelError(
            f"--group {rule} names {listed(extra)}, not among the columns of the table: {listed(others or columns)}."
        )
    return groups


def _from_patterns(rules: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for rule in rules:
        pattern, mark, group = rule.rpartition("=")
        if not (mark and pattern and group):
            raise BilevelError(f"--group {rule} is not PATTERN=NAME, as in --group 'gene_*=genes'.")
        matching = [name for name in columns if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise BilevelError(f"--group {rule} matches no feature column; there are {listed(columns)}.")
        for name in matching:
            found.setdefault(name, group)
    return {name: found.get(name, "other") for name in columns}


def _from_file(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise BilevelError(f"--group {path} is not a file; write PATTERN=NAME, FILE.csv, FILE.json, prefix or columns.")
    if path.suffix.lower() == ".json":
        return _from_json(path)
    frame = read_table(path, as_text=True).frame
    if not {"column", "group"} <= set(frame.columns):
        raise BilevelError(
            f"--group {path} has the columns {listed(frame.columns)}; it needs 'column' and 'group', a row per column."
        )
    return _one_group_each(path, zip(frame["column"], frame["group"], strict=True))


def _from_json(path: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise BilevelError(f"--group {path} is not valid JSON ({error}).") from error
    if isinstance(found, Mapping) and all(isinstance(value, list) for value in found.values()):
        return _one_group_each(path, ((name, group) for group, names in found.items() for name in names))
    if isinstance(found, Mapping) and all(isinstance(value, (str, int)) for value in found.values()):
        return {name: str(group) for name, group in found.items()}
    raise BilevelError(f'--group {path} must hold {{"group": ["column", …], …}} or {{"column": "group", …}}.')


def _one_group_each(path: Path, pairs: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for name, group in pairs:
        if chosen.setdefault(str(name), str(group)) != str(group):
            raise BilevelError(f"--group {path} puts column {name!r} into two groups, {chosen[name]!r} and {group!r}.")
    return chosen
