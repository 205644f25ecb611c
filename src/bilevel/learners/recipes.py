"""Recipes: trainings in stages, each of which begins with the weights of the one before. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bilevel.errors import BilevelError
from bilevel.files import read_json
from bilevel.learners.configuration import read_table, typed_settings
from bilevel.learners.settings import TrainingSettings

# The file in the folder of a recipe that holds the recipe.
FILE = "recipe.json"
# Settings that all stages of a recipe must share. Otherwise the weights of one stage would not fit the next.
SHARED = ("dataset", "network", "last_relu", "rotations")
# Settings that stages of pretraining have and stages of the bilevel problem refuse.
OF_PRETRAINING = ("precision",)


@dataclass(frozen=True)
class Recipe:
    """The stages by name, in their order. Each stage has a folder `NUMBER-NAME` in the recipe's folder.

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
                raise BilevelError(
                    f"Stage {name!r} begins with the weights of the stage before it, not with initial="
                    f"{settings.initial!r}. Leave its `initial` out."
                )
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
            raise BilevelError(f"All stages of a recipe must have the same {', '.join(SHARED)}. These differ:\n{lines}")

    def folders(self) -> list[str]:
        return [f"{number}-{name}" for number, name in enumerate(self.stages, 1)]

    def changed(self, given: Mapping[str, Any]) -> Recipe:
        """The recipe with these settings changed in all stages; those of pretraining in its stages only.

        >>> recipe = Recipe({"first": TrainingSettings(learner="multiclass"), "second": TrainingSettings()})
        >>> [stage.precision for stage in recipe.changed({"precision": "bfloat16"}).stages.values()]
        ['bfloat16', 'float32']
        """
        others = {key: value for key, value in given.items() if key not in OF_PRETRAINING}
        return Recipe(
            {
                name: replace(settings, **(given if settings.learner == "multiclass" else others))
                for name, settings in self.stages.items()
            }
        )

    def plain(self) -> dict[str, Any]:
        return {"stages": {name: settings.plain() for name, settings in self.stages.items()}}

    @classmethod
    def read(cls, folder: Path) -> Recipe:
        """The recipe in a folder."""
        return cls._recorded(read_json(folder / FILE), folder / FILE)

    @classmethod
    def _recorded(cls, contents: Any, path: Path) -> Recipe:
        stages = contents.get("stages") if isinstance(contents, dict) else None
        if not isinstance(stages, dict) or not all(isinstance(values, dict) for values in stages.values()):
            raise BilevelError(
                f"{path} does not hold a recipe. Restore the file, or begin a new training in another folder."
            )
        return cls({name: TrainingSettings.of(values) for name, values in stages.items()})

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """From a file with one table [[stage]] per stage (its name, and the settings that differ from the defaults), or
        from a recipe.json."""
        table = read_table(path)
        if "stages" in table:
            return cls._recorded(table, path)
        stages = table.get("stage")
        common = {key: value for key, value in table.items() if not isinstance(value, (dict, list))}
        tables = isinstance(stages, list) and all(isinstance(values, dict) for values in stages)
        if not isinstance(stages, list) or not tables or set(table) != {*common, "stage"}:
            raise BilevelError(
                f"{path} must have one table [[stage]] per stage, and before them only settings that all stages share."
            )
        by_name: dict[str, TrainingSettings] = {}
        for number, values in enumerate(stages, 1):
            name = values.get("name", f"stage-{number}")
            if not isinstance(name, str) or not name or Path(name).name != name or name in by_name:
                raise BilevelError(
                    f"{path}: stage {number} is called {name!r}. Every stage needs a name of its own, without a slash."
                )
            own = {key: value for key, value in values.items() if key != "name"}
            where = f"{path}, stage {name!r}"
            if "initial" in {**common, **own}:
                raise BilevelError(
                    f"{where}: a stage begins with the weights of the one before it; leave `initial` out."
                )
            settings = typed_settings({**common, **own}, where)
            try:
                by_name[name] = TrainingSettings(**settings)
            except BilevelError as error:
                raise BilevelError(f"{where}: {error}") from error
        return cls(by_name)


def is_recipe(folder: Path) -> bool:
    return (folder / FILE).exists()


def describe(recipe: Recipe) -> str:
    """One line per stage, with the settings that differ from the stage before it."""
    lines, before = [], json.loads(json.dumps(TrainingSettings().plain()))
    for folder, settings in zip(recipe.folders(), recipe.stages.values(), strict=True):
        now = settings.plain()
        changed = ", ".join(f"{key} {now[key]}" for key in now if now[key] != before[key] and key != "initial")
        lines.append(f"  {folder}: {changed}")
        before = now
    return "\n".join(lines)
