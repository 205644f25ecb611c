"""Groups of columns whose features share a penalty."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bilevel.errors import BilevelError
from bilevel.tabular.formatting import listed
from bilevel.tabular.reading import read_table


def column_groups(rules: Sequence[str], columns: Sequence[str], others: Sequence[str] = ()) -> dict[str, str]:
    """The group of every column.

    Args:
        rules: "columns" (each column is a group), "prefix" (the name up to its first _, - or .), a JSON file
            `{"group": ["column", …]}` or `{"column": "group"}`, or a CSV file with the columns `column` and `group`.
            Or several `pattern=name`, for columns whose names match the pattern. * in a pattern matches any text. The
            first pattern that matches a column applies. Columns without a match form the group "other".
        columns: the feature columns.
        others: other columns of the table. A file may name them too, without effect.

    >>> column_groups(["prefix"], ["size_x", "age", "size_y"])
    {'size_x': 'size', 'age': 'age', 'size_y': 'size'}
    >>> column_groups(["gene_*=genes", "*age*=person"], ["gene_1", "age", "gene_2", "dose"])
    {'gene_1': 'genes', 'age': 'person', 'gene_2': 'genes', 'dose': 'other'}
    """
    if any("=" in rule for rule in rules):
        return _from_patterns(rules, columns)
    if len(rules) > 1:
        raise BilevelError(
            f"--group {rules[1]} comes after --group {rules[0]}. Only PATTERN=NAME can be given several times."
        )
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
    groups: dict[str, str] = {}
    for rule in rules:
        pattern, equals, group = rule.rpartition("=")
        if not (equals and pattern and group):
            raise BilevelError(f"--group {rule} is not PATTERN=NAME, as in --group 'gene_*=genes'.")
        matching = [name for name in columns if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise BilevelError(f"--group {rule} matches no feature column. The columns are {listed(columns)}.")
        for name in matching:
            groups.setdefault(name, group)
    return {name: groups.get(name, "other") for name in columns}


def _from_file(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise BilevelError(f"--group {path} is not a file. Write PATTERN=NAME, FILE.csv, FILE.json, prefix or columns.")
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
        content: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise BilevelError(f"--group {path} is not valid JSON ({error}).") from error
    if isinstance(content, Mapping) and all(isinstance(value, list) for value in content.values()):
        return _one_group_each(path, ((name, group) for group, names in content.items() for name in names))
    if isinstance(content, Mapping) and all(isinstance(value, (str, int)) for value in content.values()):
        return {name: str(group) for name, group in content.items()}
    raise BilevelError(f'--group {path} must hold {{"group": ["column", …], …}} or {{"column": "group", …}}.')


def _one_group_each(path: Path, pairs: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    groups: dict[str, str] = {}
    for name, group in pairs:
        if groups.setdefault(str(name), str(group)) != str(group):
            raise BilevelError(
                f"--group {path} puts column {name!r} into two groups, {groups[str(name)]!r} and {group!r}."
            )
    return groups
