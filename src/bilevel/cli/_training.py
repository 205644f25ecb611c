"""What `bilevel train` does once it knows what is wanted; apart, because it needs torch."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import typer

from bilevel.meta.presets import PRESETS
from bilevel.meta.runs import enter, new_job, schedule
from bilevel.meta.settings import Settings
from bilevel.meta.training import FewShotTraining, duration, open_data
from bilevel.models.batch_norm import MEANING
from bilevel.training import distributed
from bilevel.training.folder import RunFolder
from bilevel.training.loop import Ending, Run


def run(
    settings: Settings,
    preset: str | None,
    path: Path,
    *,
    resume: bool,
    data_root: Path | None,
    threads: int | None,
    command: str,
) -> int:
    """Train, and return the exit code."""
    folder = RunFolder(path)
    # Another number of threads rounds differently, so a run goes on with its own.
    threads = threads or (folder.config().get("threads") if resume else None)
    if threads is not None:
        torch.set_num_threads(threads)
    with distributed.world() as world, ExitStack() as stack:
        with world.agreed():
            job = new_job(settings, open_data(settings, data_root), world, path)
            if world.writes:
                stack.enter_context(folder.locked())
                enter(folder, job, command, preset=preset, resume=resume, warn=_warn)
        training = Run(job, folder, schedule(settings), world, report=_warn)
        try:
            if world.writes:
                _announce(settings, folder, job, training.iteration)
            ending = training.go(progress=sys.stderr.isatty())
        except KeyboardInterrupt:
            _warn(f"Stopped at once. Go on from what was saved with: bilevel train --resume --out {folder.path}")
            return 130
        if world.writes:
            _conclude(ending, folder, settings)
    return ending.exit_code


def _announce(settings: Settings, folder: RunFolder, job: FewShotTraining, done: int) -> None:
    """Everything that is about to happen, before it does."""
    preset = folder.config()["preset"]
    usual = (PRESETS[preset] if preset else Settings()).plain()
    typer.echo(f"bilevel train {preset or ''}".rstrip())
    typer.echo(f"  {job.data.describe()}")
    for note in job.data.notes:
        typer.echo(f"    {note}")
    for name, value in settings.plain().items():
        changed = "" if usual[name] == value else f"   (not {usual[name]})"
        typer.echo(f"  {name} = {value}{changed}")
    weights = sum(leaf.numel() for leaf in job.learner.lam.values())
    typer.echo(f"  λ has {weights:,} numbers, w has {settings.ways * job.learner.features:,} for each episode")
    typer.echo(f"  batch norm: {settings.batch_norm}, {MEANING[settings.batch_norm]}")
    processes = f", {job.world.size} processes" if job.world.size > 1 else ""
    typer.echo(f"  {torch.get_num_threads()} threads{processes}")
    if done:
        typer.echo(f"Continuing after hyperiteration {done}.")
    early = f"; it stops early after {settings.patience} validations without a new best" if settings.patience else ""
    left = max(0, settings.iterations - done)
    typer.echo(f"Estimate: {job.estimate().describe(left, settings.validate_every)}{early}.")
    typer.echo(f"Folder: {folder.path}   (tensorboard --logdir {folder.path}, if TensorBoard is installed)")


def _conclude(ending: Ending, folder: RunFolder, settings: Settings) -> None:
    typer.echo(f"{ending.outcome} {duration(ending.seconds)} of training in all.")
    if math.isfinite(ending.best):
        typer.echo(
            f"Best meta-validation accuracy {ending.best:.2%} after hyperiteration {ending.best_iteration} "
            f"({settings.validation_episodes} episodes, T = {settings.steps}, batch norm: {settings.batch_norm})."
        )
    if ending.outcome.kind == "interrupted":
        typer.echo(f"Everything is saved. Go on with: bilevel train --resume --out {folder.path}")
    else:
        typer.echo(f"Next: bilevel evaluate {folder.path}")


def _warn(message: str) -> None:
    typer.echo(message, err=True)
