"""The work of `bilevel train`, in one or more stages. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer

from bilevel import distributed
from bilevel.errors import BilevelError, differences
from bilevel.files import write_json
from bilevel.learners import library
from bilevel.learners.presets import PRESETS, for_learner
from bilevel.learners.recipes import FILE, Recipe, describe, is_recipe
from bilevel.learners.runs import begin_or_resume, schedule
from bilevel.learners.settings import LEARNER_FIELDS, TrainingSettings
from bilevel.learners.streams import open_data
from bilevel.learners.training import FewShotTraining, duration
from bilevel.models.batch_norm import MEANING
from bilevel.training.folder import RunFolder
from bilevel.training.loop import Ending, Run
from bilevel.training.stopping import EarlyStopping

# The file in the folder of a recipe that describes the training of all stages.
CARD = "card.json"


def run(
    settings: TrainingSettings,
    preset: str | None,
    path: Path,
    *,
    resume: bool,
    data_root: Path | None,
    threads: int | None,
    command: str,
    deadline: float = math.inf,
) -> int:
    """Train, and return the exit code; `deadline` is when to save and stop, on the clock of `time.monotonic`."""
    folder = RunFolder(path)
    # Another number of threads may change rounding, so a resumed run uses the same number.
    threads = threads or (folder.config().get("threads") if resume else None)
    if threads is not None:
        torch.set_num_threads(threads)
    with distributed.world() as world, ExitStack() as stack:
        with world.agreed():
            job = FewShotTraining(settings, open_data(settings, data_root), world, path)
            if world.writes:
                stack.enter_context(folder.locked())
                begin_or_resume(folder, job, command, preset=preset, resume=resume, warn=_warn)
        training = Run(job, folder, schedule(job.settings), world, report=_warn)
        try:
            if world.writes:
                _announce(folder, job, training.iteration)
            ending = training.go(progress=None, deadline=deadline)
        except KeyboardInterrupt:
            _warn(
                f"Stopped at once. Continue from the last checkpoint with: bilevel train --resume --out {folder.path}"
            )
            return 130
        if world.writes:
            _conclude(ending, folder, job)
    return ending.exit_code


def _announce(folder: RunFolder, job: FewShotTraining, done: int) -> None:
    """Print the settings, the estimated time and memory, and the folder."""
    settings = job.settings
    preset = folder.config()["preset"]
    defaults = for_learner(PRESETS[preset] if preset else TrainingSettings(), settings.learner).plain()
    typer.echo(f"bilevel train {preset or ''}".rstrip())
    typer.echo(f"  {job.data.describe()}")
    for note in job.data.notes:
        typer.echo(f"    {note}")
    learner, own = job.learner, asdict(job.learner.options)
    unused = LEARNER_FIELDS - own.keys() - learner.also_uses
    for name, value in settings.plain().items():
        if name not in unused and name != "options":
            changed = "" if defaults[name] == value else f"   (not {defaults[name]})"
            typer.echo(f"  {name} = {value}{changed}")
    for name, value in own.items():
        if name not in defaults:
            typer.echo(f"  {name} = {value}")
    inner = learner.inner_size(settings.ways)
    each = f", w has {inner:,} for each episode" if inner else ""
    typer.echo(f"  λ has {sum(leaf.numel() for leaf in learner.lam.values()):,} numbers{each}")
    if learner.has_batch_norm:
        typer.echo(f"  batch norm: {learner.batch_norm}, {MEANING[learner.batch_norm]}")
    if not learner.trains:
        typer.echo(f"  {learner.name} has nothing to train, so the run ends after its first validation")
    processes = f", {job.world.size} processes" if job.world.size > 1 else ""
    typer.echo(f"  {torch.get_num_threads()} threads{processes}")
    if done:
        typer.echo(f"Continuing after hyperiteration {done}.")
    early = f"; it stops early after {settings.patience} validations without a new best" if settings.patience else ""
    left = max(0, settings.iterations - done)
    typer.echo(f"Estimate: {job.estimate().describe(left, settings.validate_every)}{early}.")
    typer.echo(f"Folder: {folder.path}   (tensorboard --logdir {folder.path}, if TensorBoard is installed)")


def _conclude(ending: Ending, folder: RunFolder, job: FewShotTraining) -> None:
    typer.echo(f"{ending.outcome} {duration(ending.seconds)} of training in all.")
    if math.isfinite(ending.best):
        learner = job.learner
        steps = f", T = {learner.steps}" if learner.has_steps else ""
        norm = f", batch norm: {learner.batch_norm}" if learner.has_batch_norm else ""
        typer.echo(
            f"Best meta-validation accuracy {ending.best:.2%} after hyperiteration {ending.best_iteration} "
            f"({job.settings.validation_episodes} episodes{steps}{norm})."
        )
    if ending.outcome.kind == "interrupted":
        typer.echo(f"Everything is saved. Continue with: bilevel train --resume --out {folder.path}")
    else:
        typer.echo(f"Next: bilevel evaluate {folder.path}")


def _warn(message: str) -> None:
    typer.echo(message, err=True)


# ------------------------------------------------------------------------------------------------- several stages


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
