"""What `bilevel train` does once it knows what is wanted; apart, because it needs torch."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import typer

import bilevel
from bilevel.errors import BilevelError
from bilevel.meta.presets import PRESETS
from bilevel.meta.settings import FREE_ON_RESUME, Settings
from bilevel.meta.training import FewShotTraining, duration, open_data
from bilevel.models.batch_norm import MEANING
from bilevel.origin import commit
from bilevel.training import distributed
from bilevel.training.files import write_json
from bilevel.training.folder import RunFolder, differences
from bilevel.training.loop import Ending, Schedule, train


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
    if threads is not None:
        torch.set_num_threads(threads)
    folder = RunFolder(path)
    with distributed.world() as world, folder.locked() if world.writes else nullcontext():
        data = open_data(settings, data_root)
        job = FewShotTraining(settings, data, world)
        if world.writes:
            _enter(folder, settings, preset, job, command, resume or distributed.restarted())
            _announce(settings, preset, folder, job)
        world.wait()  # the others read the folder too, and rank 0 has to have looked at it first
        schedule = Schedule(
            settings.iterations,
            validate_every=settings.validate_every,
            checkpoint_every=settings.checkpoint_every,
            patience=settings.patience,
        )
        ending = train(job, folder, schedule, world=world, report=_warn, progress=sys.stderr.isatty())
        if world.writes:
            _conclude(ending, folder, settings)
    return ending.exit_code


def _enter(
    folder: RunFolder, settings: Settings, preset: str | None, job: FewShotTraining, command: str, resume: bool
) -> None:
    """Begin a run in the folder, or make sure that the one in it is this one."""
    config = {
        "command": command,
        "preset": preset,
        "settings": settings.plain(),
        "learner": job.learner.settings(),
        "data": {"name": job.data.name, "fingerprint": job.data.fingerprint, "classes": len(job.data.classes)},
        "bilevel": bilevel.__version__,
        "commit": commit(),
    }
    if not resume or not folder.exists():
        if resume and not distributed.restarted():
            raise BilevelError(
                f"{folder.path} holds no run that --resume could continue. Leave --resume out to begin one."
            )
        folder.begin(config)
        return
    before = folder.config()
    wrong = differences(before["settings"], config["settings"], FREE_ON_RESUME)
    wrong += differences(before.get("data", {}), config["data"], set())
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise BilevelError(
            f"The run in {folder.path} has another configuration, so it cannot be continued with this one:\n{listed}\n"
            "Leave those options out (bilevel train --resume --out DIR takes the run's own), or choose another --out DIR."
        )
    write_json(folder.config_file, {**before, "settings": config["settings"]})


def _announce(settings: Settings, preset: str | None, folder: RunFolder, job: FewShotTraining) -> None:
    """Everything that is about to happen, before it does."""
    usual = PRESETS[preset].plain() if preset else Settings().plain()
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
    left = settings.iterations - _done(folder)
    early = f"; it stops early after {settings.patience} validations without a new best" if settings.patience else ""
    typer.echo(f"Estimate: {job.estimate().describe(left)}{early}.")
    typer.echo(f"Folder: {folder.path}   (tensorboard --logdir {folder.path}, if TensorBoard is installed)")


def _done(folder: RunFolder) -> int:
    """The hyperiteration of the newest checkpoint, from its name."""
    files = folder.checkpoints.files()
    if not files:
        return 0
    typer.echo(f"Continuing after hyperiteration {int(files[-1].stem)}.")
    return int(files[-1].stem)


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
