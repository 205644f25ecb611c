"""A few-shot training and its folder: what is written down when one begins, and what must agree when it goes on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bilevel
from bilevel.data import ImageDataset
from bilevel.errors import BilevelError, DivergenceError
from bilevel.meta import library
from bilevel.meta.multiclass import MulticlassTraining
from bilevel.meta.settings import Settings
from bilevel.meta.training import FewShotTraining
from bilevel.origin import commit
from bilevel.training import distributed
from bilevel.training.distributed import World
from bilevel.training.files import write_json
from bilevel.training.folder import RunFolder, differences
from bilevel.training.loop import Ending, Run, Schedule


def schedule(settings: Settings) -> Schedule:
    """How long a training with these settings runs, and how often it looks up."""
    return Schedule(
        settings.iterations,
        validate_every=settings.validate_every,
        checkpoint_every=settings.checkpoint_every,
        patience=settings.patience,
    )


def new_job(
    settings: Settings, data: ImageDataset, world: World | None = None, folder: Path | None = None
) -> FewShotTraining:
    """The job of the learner that the settings name."""
    kind = MulticlassTraining if settings.learner == "multiclass" else FewShotTraining
    return kind(settings, data, world, folder)


def enter(
    folder: RunFolder,
    job: FewShotTraining,
    command: str,
    *,
    preset: str | None = None,
    resume: bool = False,
    warn: Callable[[str], None] = print,
    advice: str = "",
) -> None:
    """Begin a run in the folder, or make sure that the one in it is this one.

    Args:
        folder: where.
        job: what is trained.
        command: what was said on the command line.
        preset: the preset it began from.
        resume: whether to go on with what is there.
        warn: gets a sentence on what may surprise.
        advice: what to do where the run in the folder is another one; by default, that of `bilevel train`.
    """
    settings, kind = job.settings, type(job).__name__
    data = {"name": job.data.name, "fingerprint": job.data.fingerprint, "classes": len(job.data.classes)}
    launch = distributed.launch()
    restarted = distributed.restarted() and folder.exists() and folder.config().get("launch") == launch
    if not resume and not restarted:
        config: dict[str, Any] = {
            "command": command,
            "kind": kind,
            "preset": preset,
            "settings": settings.plain(),
            "learner": job.learner.settings(),
            "data": data,
            "threads": torch.get_num_threads(),
            "bilevel": bilevel.__version__,
            "commit": commit(),
        }
        if settings.initial:
            card = library.find(settings.initial, near=folder.path).card
            known = ("command", "settings", "training", "initial")
            config["initial"] = {key: card.get(key) for key in known if key in card}
        folder.begin({**config, "launch": launch} if launch else config)
        return
    before = folder.config()
    # Through Settings, because a run of an earlier version does not know the settings that came later.
    wrong = differences(Settings.of(before["settings"]).plain(), settings.plain(), settings.free_on_resume)
    wrong += differences(before.get("data", data), data, set())
    wrong += differences({"kind": before.get("kind", kind)}, {"kind": kind}, set())
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        usual = (
            f"bilevel train --resume --out {shlex.quote(str(folder.path))} alone takes the run's own settings; its "
            "data must be the same. Or choose another folder for a new run."
        )
        raise BilevelError(
            f"The run in {folder.path} has another configuration, so it cannot be continued with this one:\n{listed}\n"
            f"{advice or usual}"
        )
    # Elsewhere every group of episodes or images has a thread to itself.
    shared = kind == "ClassicTraining"
    if shared and before.get("threads", torch.get_num_threads()) != torch.get_num_threads():
        warn(f"The run had --threads {before['threads']}; with another number it does not go on bit for bit.")
    write_json(folder.config_file, {**before, "settings": settings.plain()})


def train_in(path: Path, job: FewShotTraining, command: str, title: str, progress: bool | None = None) -> Ending:
    """Train to the end of the schedule in this folder, going on with what is there.

    The result is that of the settings alone: what was validated otherwise, or trained for longer, is refused. Ctrl-C
    saves and interrupts; a training that diverges is an error.
    """
    folder = RunFolder(path)
    advice = "Choose another folder with --out DIR, or remove this one."
    with folder.locked():
        if folder.exists():
            _check_same(folder, job, advice)
        else:
            enter(folder, job, command)
        run = Run(job, folder, schedule(job.settings), report=lambda message: print(message, file=sys.stderr))
        if run.iteration > job.settings.iterations:
            raise BilevelError(
                f"The run in {path} has {run.iteration} hyperiterations already, and iterations="
                f"{job.settings.iterations} were asked for. {advice}"
            )
        ending = run.go(progress=sys.stderr.isatty() if progress is None else progress, title=title)
    if ending.outcome.kind == "interrupted":
        raise KeyboardInterrupt(f"The training is saved in {path}; the same command goes on with it.")
    if ending.outcome.kind == "diverged":
        raise DivergenceError(f"{title}: {ending.outcome}")
    return ending


def _check_same(folder: RunFolder, job: FewShotTraining, advice: str) -> None:
    """`enter`, and no other validations either: an old best of fewer episodes would compete with the new ones."""
    before = Settings.of(folder.config()["settings"])
    looks = {name: getattr(before, name) for name in ("validate_every", "validation_episodes")}
    wrong = differences(looks, {name: getattr(job.settings, name) for name in looks}, set())
    if wrong:
        raise BilevelError(f"The run in {folder.path} was validated otherwise: {'; '.join(wrong)}. {advice}")
    enter(folder, job, "", resume=True, advice=advice)
