"""The work of `bilevel train` for a recipe. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from bilevel import distributed
from bilevel.cli._training import run
from bilevel.errors import BilevelError
from bilevel.files import write_json
from bilevel.learners import library
from bilevel.learners.recipes import FILE, Recipe, describe, is_recipe
from bilevel.learners.settings import TrainingSettings
from bilevel.training.folder import RunFolder, differences
from bilevel.training.stopping import EarlyStopping

# The file in the folder of a recipe that describes the training of all stages.
CARD = "card.json"


def run_recipe(recipe: Recipe, path: Path, *, resume: bool, command: str, **common: Any) -> int:
    """Run the stages in their order, from the first that is not finished. Returns the exit code of the last one."""
    _begin_or_resume(recipe, path, resume)
    say: Callable[[str], None] = typer.echo if distributed.writes() else lambda message: None
    say(f"A training in {len(recipe.stages)} stages:\n{describe(recipe)}")
    for folder, (name, settings) in zip(recipe.folders(), recipe.stages.items(), strict=True):
        stage = path / folder
        if _finished(stage, settings):
            say(f"Stage {folder} is finished.")
            continue
        say(f"Stage {folder}:")
        code = run(
            settings,
            None,
            stage,
            resume=RunFolder(stage).exists(),
            command=f"{command}   (stage {name})",
            **common,
        )
        if code:
            again = f"bilevel train --resume --out {shlex.quote(str(path))}"
            typer.echo(f"Stopped in stage {folder}. Continue with: {again}", err=True)
            return code
    if distributed.writes():
        _write_card(path)
    return 0


def _begin_or_resume(recipe: Recipe, path: Path, resume: bool) -> None:
    """Write the recipe to the folder, or check that the recipe in it is the same."""
    if not distributed.writes():
        return
    if not is_recipe(path):
        if RunFolder(path).exists():
            raise BilevelError(f"{path} holds a run in one stage already. Choose another folder with --out DIR.")
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / FILE, recipe.plain(), sealed=True)
        return
    if not resume:
        raise BilevelError(f"{path} holds a training in stages already. Continue it with --resume, or pass --out DIR.")
    before = Recipe.read(path)
    wrong = [] if list(before.stages) == list(recipe.stages) else ["the names of the stages"]
    for name in before.stages.keys() & recipe.stages.keys():
        old, new = before.stages[name], recipe.stages[name]
        lines = differences(old.plain(), new.plain(), new.free_on_resume)
        wrong += [f"stage {name}, {line}" for line in lines]
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise BilevelError(
            f"The training in {path} has another recipe, so it cannot be continued with this one:\n{listed}\n"
            f"Choose another folder with --out DIR."
        )
    write_json(path / FILE, recipe.plain(), sealed=True)


def _finished(stage: Path, settings: TrainingSettings) -> bool:
    """Whether a stage ran to its last hyperiteration, or stopped early."""
    newest = RunFolder(stage).checkpoints.newest(lambda message: None) if RunFolder(stage).exists() else None
    if newest is None:
        return False
    stopping = EarlyStopping(settings.patience)
    stopping.restore(newest[1]["stopping"])
    return stopping.stop or newest[1]["iteration"] >= settings.iterations


def _write_card(path: Path) -> None:
    """Write one card for all stages."""
    model = library.find(str(path))
    stages: list[dict[str, Any]] = model.stages
    write_json(path / CARD, {"stages": stages, "data": model.card.get("data"), "curve": model.card.get("curve")})
    typer.echo(f"All stages are finished. {path / CARD} describes the training. Next: bilevel evaluate {path}")
