"""Configuration files of trainings in TOML, YAML or JSON, such as the config.json of a run. Does not import torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from bilevel import extras
from bilevel.errors import BilevelError
from bilevel.files import read_json
from bilevel.learners import ZOO_PREFIX
from bilevel.learners.settings import TrainingSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENDINGS = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".json": "JSON"}
# A larger file is not a configuration.
MOST_BYTES = 1_000_000
# Settings that may be the path of a folder. A relative path is relative to the configuration file.
PATHS = ("dataset", "initial")


@dataclass(frozen=True)
class Configuration:
    """The configuration in a file: a preset, changes to it, and the number of threads if the file is of a run."""

    preset: str | None
    settings: dict[str, Any]
    threads: int | None = None


def read_table(path: Path) -> dict[str, Any]:
    """The contents of a TOML, YAML or JSON file, by its suffix. They must be a table."""
    kind = ENDINGS.get(path.suffix.lower())
    if kind is None:
        raise BilevelError(f"{path} must have a name that ends in {', '.join(ENDINGS)}, according to its format.")
    try:
        if path.exists() and not path.is_file():
            raise BilevelError(f"{path} is not a file; pass a configuration in TOML, YAML or JSON.")
        if path.exists() and path.stat().st_size > MOST_BYTES:
            raise BilevelError(
                f"{path} has more than {MOST_BYTES:,} bytes, so it is not a configuration; pass another file."
            )
        table = read_json(path) if kind == "JSON" else _parsed(path.read_text(encoding="utf-8"), kind)
    except OSError as error:
        raise BilevelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except RecursionError as error:
        raise BilevelError(f"{path} is nested too deeply to be read.") from error
    except ValueError as error:
        if isinstance(error, BilevelError):
            raise
        raise BilevelError(f"{path} is not a {kind} file: {error}.") from error
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise BilevelError(f"{path} must hold settings by name, such as `ways = 5` (TOML) or `ways: 5` (YAML).")
    return table


def read_configuration(path: Path) -> Configuration:
    """The configuration in a file: `settings` of a run's config.json, or settings by name, possibly with a `preset`.

    Settings that only one learner has are in a table `options`.
    """
    table = read_table(path)
    # The config.json of a run has the settings under a key of their own, beside the command, the data and the commit.
    recorded = isinstance(table.get("settings"), dict)
    values = dict(table["settings"] if recorded else table)
    preset = None if recorded else values.pop("preset", None)
    if preset is not None and not isinstance(preset, str):
        raise BilevelError(f"{path}: preset={preset!r} is not the name of a preset.")
    settings = typed_settings(values, str(path), extra=("preset",))
    for key in PATHS:
        value = settings.get(key)
        if isinstance(value, str) and value and not value.startswith(ZOO_PREFIX) and (path.parent / value).is_dir():
            settings[key] = str((path.parent / value).resolve())
    threads = table.get("threads") if recorded else None
    return Configuration(preset, settings, threads if isinstance(threads, int) and threads > 0 else None)


def typed_settings(values: dict[str, Any], where: str, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings by name from a file, with numbers as numbers. An unknown name is an error that lists the known ones.

    Args:
        values: the settings.
        where: the name of the file, for messages.
        extra: names that the list of known ones begins with.
    """
    hints = get_type_hints(TrainingSettings)
    for key in values:
        if key not in hints:
            similar = get_close_matches(key, hints, 1)
            suggestion = f" Did you mean {similar[0]}?" if similar else ""
            raise BilevelError(
                f"{where}: there is no setting {key}.{suggestion} The settings are {', '.join([*extra, *hints])}. "
                "Settings that only one learner has go into `options`."
            )
    return {key: _typed(f"{where}: {key}", value, hints[key]) for key, value in values.items()}


def _parsed(text: str, kind: str) -> Any:
    if kind == "TOML":
        return tomllib.loads(text)
    yaml = extras.load("yaml", extra="learn", purpose="Reading a YAML file")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as the type of the setting: YAML reads 1e-3 as text; a list becomes a text with commas."""
    if hint is str and isinstance(value, list) and all(isinstance(part, (str, int, float)) for part in value):
        return ",".join(map(str, value))
    if hint in (int, float) and isinstance(value, str):
        try:
            return hint(value)
        except ValueError as error:
            raise BilevelError(f"{name}={value!r} is not a number.") from error
    return value
