"""What `bilevel train` does with a recipe; kept in its own module so that --help does not import torch."""

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

CARD = "card.json"


def run_recipe(recipe: Recipe, path: Path, *, resume: bool, command: str, **common: Any) -> int:
    """Run the stages one after the other, from the first that is not finished; the exit code of the last that ran."""
    _enter(recipe, path, resume)
    say: Callable[[str], None] = typer.echo if distributed.writes() else lambda message: None
    say(f"A training in {len(recipe.stages)} stages:\n{describe(recipe)}")
    for folder, (name, settings) in zip(recipe.folders(), recipe.stages.items(), strict=True):
        stage = path / folder
        if _finished(stage, settings):
            say(f"Stage {folder} is finished.")
            continue
        say(f"Stage {folder}:")
        said = f"{command}   (stage {name})"
        begun = RunFolder(stage).exists()
        code = run(settings, None, stage, resume=begun, command=said, **common)
        if code:
            go_on = f"bilevel train --resume --out {shlex.quote(str(path))}"
            typer.echo(f"Stopped in stage {folder}. Go on with: {go_on}", err=True)
            return code
    if distributed.writes():
        _write_card(path)
    return 0


def _enter(recipe: Recipe, path: Path, resume: bool) -> None:
    """Write the recipe down, or make sure that the one in the folder is this one."""
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
        there, here = before.stages[name], recipe.stages[name]
        lines = differences(there.plain(), here.plain(), here.free_on_resume)
        wrong += [f"stage {name}, {line}" for line in lines]
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise BilevelError(f"The training in {path} has another recipe, so it cannot be continued:\n{listed}")
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
    """One card for all stages."""
    found = library.find(str(path))
    stages: list[dict[str, Any]] = found.stages
    write_json(path / CARD, {"stages": stages, "data": found.card.get("data"), "curve": found.card.get("curve")})
    typer.echo(f"All stages are finished; {path / CARD} tells how each was trained. Next: bilevel evaluate {path}")
