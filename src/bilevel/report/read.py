"""Find the results and runs of a report. A file that cannot be read is left out, with a warning that names it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bilevel.errors import BilevelError
from bilevel.files import read_json
from bilevel.learners import ZOO_PREFIX
from bilevel.learners.library import zoo
from bilevel.training.log import read_metrics

# Where to look without specs; the last folder holds the results that come with the source tree.
PLACES, KEPT = ("results", "runs"), "docs/results"

# The fields of a point of the curve in a model's card.
CURVE_FIELDS = ("iteration", "score", "interval")

# The fields of a result.json and their types, with what to take where one is missing; None: it must be there.
FIELDS: dict[str, tuple[type | tuple[type, ...], Any]] = {
    "experiment": (str, None),
    "tables": (list, None),
    "summary": (str, ""),
    "paper": (str, ""),
    "command": (str, ""),
    "settings": (dict, {}),
    "choices": (dict, {}),
    "pictures": (list, []),
    "notes": (list, []),
    "data": (dict, {}),
    "runs": (list, []),
    "minutes": ((int, float), math.nan),
    "machine": (dict, {}),
    "finished": (str, ""),
}


@dataclass(frozen=True)
class FoundResult:
    """A `result.json` whose fields have the types they should have, and the pictures that were beside it."""

    file: Path
    fields: dict[str, Any]
    pictures: dict[str, bytes]

    @property
    def experiment(self) -> str:
        return self.fields["experiment"]


@dataclass(frozen=True)
class FoundRun:
    """A training or a model.

    Attributes:
        spec: what `bilevel.learners.library.find` takes.
        config: its `config.json`, or the card of a saved model; empty where it cannot be read.
        metrics: the records of its `metrics.jsonl`.
        owner: the result whose numbers come from it.
    """

    spec: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    owner: FoundResult | None = None

    @property
    def settings(self) -> dict[str, Any]:
        found = self.config.get("settings")
        return found if isinstance(found, dict) else {}


@dataclass
class ReportSources:
    """The results and runs of a report, and a sentence for everything that was left out."""

    results: list[FoundResult] = field(default_factory=list)
    runs: list[FoundRun] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)


def gather(specs: Sequence[str | Path]) -> ReportSources:
    """Find what the specs name: results, runs, folders of them at any depth, and `zoo:NAME`.

    Without specs, everything in `results/` and `runs/`; and where there is no `results/`, in `docs/results/`.
    """
    found = ReportSources()
    for spec in specs or _default_specs():
        _add(str(spec), found)
    return found


def _default_specs() -> list[str]:
    places = [place for place in PLACES if Path(place).is_dir()]
    if "results" not in places and Path(KEPT).is_dir():
        places.insert(0, KEPT)
    places = [place for place in places if any(True for _ in _files(Path(place)))]
    if not places:
        raise BilevelError(
            "There is nothing to report: no results in results/ and no runs in runs/. Make some first (bilevel run "
            "ridge --quick, or bilevel train glyphs-5way-1shot), or name them: bilevel report DIR, or bilevel report "
            "zoo:NAME."
        )
    return places


def _add(spec: str, found: ReportSources) -> None:
    path = Path(spec)
    if spec.startswith(ZOO_PREFIX):
        name = spec.removeprefix(ZOO_PREFIX)
        if name not in zoo():
            raise BilevelError(f"The zoo has no {name!r}; it has {', '.join(zoo())}.")
        card = zoo()[name]
        validations = [dict(zip(CURVE_FIELDS, point, strict=True)) for point in card.get("curve", [])]
        found.runs.append(FoundRun(spec, card, validations))
    elif path.is_file():
        _add_file(path, found)
    elif path.is_dir():
        files = list(_files(path))
        if not files:
            raise BilevelError(
                f"{spec} holds neither results (result.json, from `bilevel run`) nor runs (config.json, from `bilevel "
                "train`), at any depth."
            )
        for file in files:
            _add_file(file, found)
    elif path.with_name(path.name + ".json").is_file() and path.with_name(path.name + ".safetensors").is_file():
        found.runs.append(FoundRun(spec, _config(path.with_name(path.name + ".json"), found), []))
    else:
        raise BilevelError(
            f"There is no {spec!r}. Pass a result's folder or its result.json, a run's folder, a folder that holds "
            f"some, or a model that comes with the package: {', '.join(ZOO_PREFIX + name for name in zoo())}."
        )


def _files(folder: Path) -> Iterator[Path]:
    """The files `result.json` and `config.json` below a folder; a run holds no other runs."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "result.json" in names:
            yield Path(place) / "result.json"
        if "config.json" in names:
            yield Path(place) / "config.json"
            folders.clear()


def _add_file(file: Path, found: ReportSources) -> None:
    if file.resolve() in found.seen:
        return
    found.seen.add(file.resolve())
    if file.name == "config.json":
        found.runs.append(_run(file.parent, found))
        return
    try:
        result = _result(file, found)
    except BilevelError as error:
        found.warnings.append(f"{file} was left out: {error}")
        return
    found.results.append(result)
    for name in result.fields["runs"]:
        folder = _inside(file.parent, name)
        if folder is None or not folder.is_dir():
            found.warnings.append(
                f"{file.parent / str(name)} was left out: {file} names it, but there is no such folder."
            )
        elif (folder / "config.json").resolve() not in found.seen:
            found.seen.add((folder / "config.json").resolve())
            found.runs.append(_run(folder, found, result))


def _result(file: Path, found: ReportSources) -> FoundResult:
    content = read_json(file)
    if not isinstance(content, dict):
        raise BilevelError("it is not the record of a result.")
    fields: dict[str, Any] = {}
    for name, (kind, default) in FIELDS.items():
        value = content.get(name, default)
        if value is None:
            raise BilevelError(f"it has no {name!r}.")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BilevelError(f"its {name!r} is {type(value).__name__} and must be {_type_name(kind)}.")
        fields[name] = value
    fields["seed"] = content.get("seed")
    fields["tables"] = [_table(table) for table in fields["tables"]]
    fields["notes"] = [str(note) for note in fields["notes"]]
    pictures = {}
    for name in fields["pictures"]:
        path = _inside(file.parent, name)
        try:
            if path is None:
                raise BilevelError(f"{name!r} is not the name of a file in its folder.")
            pictures[str(name)] = _picture(path)
        except BilevelError as error:
            found.warnings.append(f"{file.parent / str(name)} was left out: {error}")
    return FoundResult(file, fields, pictures)


def _table(table: Any) -> dict[str, Any]:
    if not isinstance(table, dict) or not all(isinstance(table.get(name), list) for name in ("columns", "rows")):
        raise BilevelError("one of its tables has no columns or no rows.")
    columns = [str(column) for column in table["columns"]]
    if not all(isinstance(row, list) and len(row) == len(columns) for row in table["rows"]):
        raise BilevelError(f"a table with {len(columns)} columns has rows of another length.")
    rows = [["" if cell is None else str(cell) for cell in row] for row in table["rows"]]
    prose = table.get("prose", [])
    return {
        "title": str(table.get("title", "")),
        "columns": columns,
        "rows": rows,
        "prose": [str(column) for column in prose] if isinstance(prose, list) else [],
    }


def _picture(path: Path) -> bytes:
    """The bytes of a PNG file. It is decoded once, because a damaged file is an error."""
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG",)) as picture:
            picture.load()
        return path.read_bytes()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BilevelError("there is no such picture." if not path.exists() else f"no PNG ({error}).") from error


def _run(folder: Path, found: ReportSources, owner: FoundResult | None = None) -> FoundRun:
    file = folder / "config.json"
    if owner is None:  # while an experiment is running, its result does not name all of its runs yet
        above = (result for result in found.results if folder.resolve().is_relative_to(result.file.parent.resolve()))
        owner = next(above, None)
    return FoundRun(str(folder), _config(file, found), _metrics(folder, found), owner)


def _config(file: Path, found: ReportSources) -> dict[str, Any]:
    try:
        config = read_json(file)
        if not isinstance(config, dict) or not isinstance(config.get("settings"), dict):
            raise BilevelError("it is not the configuration of a run: it has no settings.")
        return config
    except BilevelError as error:
        found.warnings.append(f"{file} was left out: {error}")
        return {}


def _metrics(folder: Path, found: ReportSources) -> list[dict[str, float]]:
    try:
        return sorted(read_metrics(folder, found.warnings.append), key=lambda record: record["iteration"])
    except BilevelError as error:
        found.warnings.append(str(error))
        return []


def _inside(folder: Path, name: Any) -> Path | None:
    """The file of that name in the folder; None if the name leads outside, because a page must not show other files."""
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    path = folder / name
    try:
        path.exists()
    except OSError:  # a name that is too long
        return None
    return path if path.resolve().is_relative_to(folder.resolve()) and path.resolve() != folder.resolve() else None


def _type_name(kind: type | tuple[type, ...]) -> str:
    names: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
    return "a number" if isinstance(kind, tuple) else names[kind]
