"""Trainings in stages, each of which begins with the weights of the one before it. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bilevel.errors import BilevelError
from bilevel.learners.configuration import read_table
from bilevel.learners.settings import TrainingSettings

# The file that makes a folder the folder of a recipe.
FILE = "recipe.json"
# What every stage of a recipe must share: the weights of one would not fit the next.
SHARED = ("dataset", "network", "last_relu", "rotations")


@dataclass(frozen=True)
class Recipe:
    """Stages in their order, by name. Each has a folder of its own, `NUMBER-NAME`, in the recipe's folder.

    >>> recipe = Recipe({"first": TrainingSettings(), "second": TrainingSettings(lr=1e-4)})
    >>> recipe.folders(), recipe.stages["second"].initial
    (['1-first', '2-second'], '../1-first')
    """

    stages: Mapping[str, TrainingSettings]

    def __post_init__(self) -> None:
        if not self.stages:
            raise BilevelError("A recipe needs at least one stage.")
        linked, before = {}, ""
        for (name, settings), folder in zip(self.stages.items(), self.folders(), strict=True):
            if before and settings.initial not in ("", f"../{before}"):
                raise BilevelError(f"Stage {name!r} begins with the stage before it; leave its `initial` out.")
            linked[name] = replace(settings, initial=f"../{before}") if before else settings
            before = folder
        object.__setattr__(self, "stages", linked)
        self._check()

    def _check(self) -> None:
        names = list(self.stages)
        wrong = [
            f"{key.replace('_', ' ')}: {there} in {one!r}, {here} in {two!r}"
            for one, two in pairwise(names)
            for key in SHARED
            if (there := getattr(self.stages[one], key)) != (here := getattr(self.stages[two], key))
        ]
        if wrong:
            lines = "\n".join(f"  {line}" for line in wrong)
            raise BilevelError(f"The stages of this recipe do not fit each other:\n{lines}")

    def folders(self) -> list[str]:
        return [f"{number}-{name}" for number, name in enumerate(self.stages, 1)]

    def changed(self, given: Mapping[str, Any]) -> Recipe:
        """The recipe with these settings in all of its stages."""
        return Recipe({name: replace(settings, **given) for name, settings in self.stages.items()})

    def plain(self) -> dict[str, Any]:
        return {"stages": {name: settings.plain() for name, settings in self.stages.items()}}

    @classmethod
    def read(cls, folder: Path) -> Recipe:
        """The recipe of a folder that has one."""
        from bilevel.files import read_json

        return cls._recorded(read_json(folder / FILE), folder / FILE)

    @classmethod
    def _recorded(cls, found: Any, path: Path) -> Recipe:
        stages = found.get("stages") if isinstance(found, dict) else None
        if not isinstance(stages, dict) or not all(isinstance(values, dict) for values in stages.values()):
            raise BilevelError(f"{path} is not the recipe of a training in stages.")
        return cls({name: TrainingSettings.of(values) for name, values in stages.items()})

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """From a file with a table [[stage]] for each: its name and the settings that are not the defaults'."""
        return cls.of_table(read_table(path), path)

    @classmethod
    def of_table(cls, found: dict[str, Any], path: Path) -> Recipe:
        """From what such a file holds, or the recipe.json of a folder; `path` is for messages."""
        if "stages" in found:
            return cls._recorded(found, path)
        stages = found.pop("stage", None)
        common = {key: value for key, value in found.items() if not isinstance(value, (dict, list))}
        if not isinstance(stages, list) or len(common) != len(found):
            raise BilevelError(f"{path} must have a table [[stage]] for every stage, and settings for all before them.")
        made: dict[str, TrainingSettings] = {}
        for number, values in enumerate(stages, 1):
            name = values.pop("name", f"stage-{number}")
            if not isinstance(name, str) or not name or Path(name).name != name or name in made:
                raise BilevelError(f"{path}: stage {number} is called {name!r}; every stage needs a name of its own.")
            made[name] = _settings({**common, **values}, f"{path}, stage {name!r}")
        return cls(made)


def _settings(values: dict[str, Any], where: str) -> TrainingSettings:
    known = [f.name for f in fields(TrainingSettings) if f.name != "initial"]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise BilevelError(f"{where}: {', '.join(unknown)} is no setting; the settings are {', '.join(known)}.")
    try:
        return TrainingSettings(**values)
    except BilevelError as error:
        raise BilevelError(f"{where}: {error}") from error


def is_recipe(folder: Path) -> bool:
    return (folder / FILE).exists()


def describe(recipe: Recipe) -> str:
    """The stages and what distinguishes them from the one before, a line each."""
    lines, before = [], json.loads(json.dumps(TrainingSettings().plain()))
    for folder, settings in zip(recipe.folders(), recipe.stages.values(), strict=True):
        now = settings.plain()
        changed = ", ".join(f"{key} {now[key]}" for key in now if now[key] != before[key] and key != "initial")
        lines.append(f"  {folder}: {changed}")
        before = now
    return "\n".join(lines)
