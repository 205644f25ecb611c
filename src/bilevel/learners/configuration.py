"""Configuration files of trainings in TOML, YAML or JSON; a run's config.json is one. Nothing here imports torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
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
# More than any configuration has.
MOST_BYTES = 1_000_000
# Settings that may be the path of a folder; where it is relative, it is relative to the file.
PATHS = ("dataset", "initial")


@dataclass(frozen=True)
class Configuration:
    """What a file says about a training: the preset it begins with, settings, and the threads that a run recorded."""

    preset: str | None
    settings: dict[str, Any]
    threads: int | None = None


def read_table(path: Path) -> dict[str, Any]:
    """The content of a TOML, YAML or JSON file, by the ending of its name; anything but a table is an error."""
    kind = ENDINGS.get(path.suffix.lower())
    if kind is None:
        raise BilevelError(f"{path} must be named {', '.join('…' + ending for ending in ENDINGS)}, after its format.")
    try:
        if path.exists() and not path.is_file():
            raise BilevelError(f"{path} is no file; pass a configuration in TOML, YAML or JSON.")
        if path.exists() and path.stat().st_size > MOST_BYTES:
            raise BilevelError(f"{path} has more than {MOST_BYTES:,} bytes, which no configuration has.")
        found = read_json(path) if kind == "JSON" else _parsed(path.read_text(encoding="utf-8"), kind)
    except OSError as error:
        raise BilevelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except RecursionError as error:
        raise BilevelError(f"{path} is nested too deeply to be read.") from error
    except ValueError as error:
        if isinstance(error, BilevelError):
            raise
        raise BilevelError(f"{path} is not a {kind} file: {error}.") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise BilevelError(f"{path} must hold settings by name, such as `ways = 5` (TOML) or `ways: 5` (YAML).")
    return found


def read_configuration(path: Path) -> Configuration:
    """The configuration in a file: `settings` of a run's config.json, or settings by name, possibly with a `preset`.

    Settings that only one learner has are in a table `options`. What is not known is an error that lists what is.
    """
    found = read_table(path)
    # What `bilevel train` writes has more in it than settings: the command, the data, the commit.
    recorded = isinstance(found.get("settings"), dict)
    values = dict(found["settings"] if recorded else found)
    preset = None if recorded else values.pop("preset", None)
    if preset is not None and not isinstance(preset, str):
        raise BilevelError(f"{path}: preset={preset!r} is not the name of a preset.")
    hints = get_type_hints(TrainingSettings)
    for key in values:
        if key not in hints:
            near = get_close_matches(key, hints, 1)
            maybe = f" Did you mean {near[0]}?" if near else ""
            raise BilevelError(
                f"{path}: {key} is no setting.{maybe} The settings are preset, "
                f"{', '.join(f.name for f in fields(TrainingSettings))}. Those that only one learner has belong to "
                "`options`."
            )
    settings = {key: _typed(f"{path}: {key}", value, hints[key]) for key, value in values.items()}
    for key in PATHS:
        settings |= _from_here(settings, key, path.parent)
    threads = found.get("threads") if recorded else None
    return Configuration(preset, settings, threads if isinstance(threads, int) and threads > 0 else None)


def _parsed(text: str, kind: str) -> Any:
    if kind == "TOML":
        return tomllib.loads(text)
    yaml = extras.load("yaml", extra="learn", purpose="Reading a YAML file")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _typed(name: str, value: Any, hint: Any) -> Any:
    """A value of the setting's type: YAML reads 1e-3 as text, and a list stands for a text with commas."""
    if hint is str and isinstance(value, list) and all(isinstance(part, (str, int, float)) for part in value):
        return ",".join(map(str, value))
    if hint in (int, float) and isinstance(value, str):
        try:
            return hint(value)
        except ValueError as error:
            raise BilevelError(f"{name}={value!r} is not a number.") from error
    return value


def _from_here(settings: dict[str, Any], key: str, folder: Path) -> dict[str, Any]:
    value = settings.get(key)
    if not isinstance(value, str) or not value or value.startswith(ZOO_PREFIX) or not (folder / value).is_dir():
        return {}
    return {key: str((folder / value).resolve())}
