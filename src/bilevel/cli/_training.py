"""The work of `bilevel train`. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
import typer

from bilevel import distributed
from bilevel.learners.presets import PRESETS, for_learner
from bilevel.learners.runs import begin_or_resume, schedule
from bilevel.learners.settings import LEARNER_FIELDS, TrainingSettings
from bilevel.learners.streams import open_data
from bilevel.learners.training import FewShotTraining, duration
from bilevel.models.batch_norm import MEANING
from bilevel.training.folder import RunFolder
from bilevel.training.loop import Ending, Run


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
            ending = training.go(progress=sys.stderr.isatty(), deadline=deadline)
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
