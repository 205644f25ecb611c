"""A few-shot training and its folder: what is written down when one begins, and what must agree when it goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bilevel
from bilevel.errors import BilevelError
from bilevel.meta import library
from bilevel.meta.settings import FREE_ON_RESUME, Settings
from bilevel.meta.training import FewShotTraining
from bilevel.origin import commit
from bilevel.training import distributed
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


def enter(
    folder: RunFolder,
    job: FewShotTraining,
    command: str,
    *,
    preset: str | None = None,
    resume: bool = False,
    warn: Callable[[str], None] = print,
) -> None:
    """Begin a run in the folder, or make sure that the one in it is this one."""
    settings = job.settings
    data = {"name": job.data.name, "fingerprint": job.data.fingerprint, "classes": len(job.data.classes)}
    launch = distributed.launch()
    restarted = distributed.restarted() and folder.exists() and folder.config().get("launch") == launch
    if not resume and not restarted:
        config: dict[str, Any] = {
            "command": command,
            "preset": preset,
            "settings": settings.plain(),
            "learner": job.learner.settings(),
            "data": data,
            "threads": torch.get_num_threads(),
            "bilevel": bilevel.__version__,
            "commit": commit(),
        }
        if settings.initial:
            card = library.find(settings.initial).card
            config["initial"] = {key: card.get(key) for key in ("command", "training", "initial") if key in card}
        folder.begin({**config, "launch": launch} if launch else config)
        return
    before = folder.config()
    # Through Settings, because a run of an earlier version does not know the settings that came later.
    wrong = differences(Settings.of(before["settings"]).plain(), settings.plain(), FREE_ON_RESUME)
    wrong += differences(before.get("data", data), data, set())
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise BilevelError(
            f"The run in {folder.path} has another configuration, so it cannot be continued with this one:\n{listed}\n"
            f"bilevel train --resume --out {folder.path} alone takes the run's own settings; its data must be the "
            "same. Or choose another folder for a new run."
        )
    if before.get("threads", torch.get_num_threads()) != torch.get_num_threads():
        warn(f"The run had --threads {before['threads']}; with another number it does not go on bit for bit.")
    write_json(folder.config_file, {**before, "settings": settings.plain()})


def train_in(path: Path, job: FewShotTraining, command: str, title: str, progress: bool | None = None) -> Ending:
    """Train to the end of the schedule in this folder, going on with what is there; Ctrl-C saves and interrupts."""
    folder = RunFolder(path)
    with folder.locked():
        enter(folder, job, command, resume=folder.exists())
        run = Run(job, folder, schedule(job.settings), report=lambda message: print(message, file=sys.stderr))
        ending = run.go(progress=sys.stderr.isatty() if progress is None else progress, title=title)
    if ending.outcome.kind == "interrupted":
        raise KeyboardInterrupt(f"The training is saved in {path}; the same command goes on with it.")
    return ending
