"""A few-shot training and its folder: what is written down when one begins, and what must agree when it goes on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

import bilevel
from bilevel import distributed
from bilevel.data import ImageDataset
from bilevel.errors import BilevelError, DivergenceError
from bilevel.files import write_json
from bilevel.learners import library
from bilevel.learners.base import Learner
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.training import FewShotTraining
from bilevel.source_commit import commit
from bilevel.training.files import read_tensors
from bilevel.training.folder import RunFolder, differences
from bilevel.training.loop import Ending, Run, Schedule


def schedule(settings: TrainingSettings) -> Schedule:
    """How long a training with these settings runs, and how often it is validated and saved."""
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
            "preparation": None if job.data.preparation is None else job.data.preparation.plain(),
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
    # Through TrainingSettings, because a run of an earlier version does not know the settings that came later.
    wrong = differences(TrainingSettings.of(before["settings"]).plain(), settings.plain(), settings.free_on_resume)
    wrong += differences(before.get("data", data), data, set())
    wrong += differences({"kind": _kind_of(before, kind)}, {"kind": kind}, set())
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
    write_json(folder.config_file, {**before, "settings": settings.plain()}, sealed=True)


def _kind_of(config: dict[str, Any], usual: str) -> str:
    """The class of the training; version 0.1 had one of its own for multiclass, which `settings.learner` says too."""
    kind = str(config.get("kind", usual))
    return FewShotTraining.__name__ if kind == "MulticlassTraining" else kind


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


def train_learner(
    learner: Learner, data: ImageDataset, path: Path, progress: bool | None, given: dict[str, Any]
) -> Ending:
    """`bilevel.learners.fit`."""
    shared = {f.name for f in fields(TrainingSettings)}
    chosen = asdict(learner.options)
    clash = [key for key in given if key in chosen or key in ("learner", "dataset", "options")]
    unknown = [key for key in given if key not in shared | set(clash)]
    if clash:
        raise BilevelError(f"fit takes {', '.join(clash)} from the learner and the data; set it there.")
    if unknown:
        raise BilevelError(f"There is no setting {', '.join(unknown)}; the settings are {', '.join(sorted(shared))}.")
    common = {key: value for key, value in chosen.items() if key in shared}
    own = {key: value for key, value in chosen.items() if key not in shared}
    settings = TrainingSettings(learner=learner.name, dataset=data.name, options=own, **common, **given)
    job = FewShotTraining(settings, data, folder=path, learner=learner)
    ending = train_in(path, job, f"bilevel.learners.fit({learner.name})", learner.name, progress)
    learner.set_weights(read_tensors(RunFolder(path).best)[0])
    return ending


def _check_same(folder: RunFolder, job: FewShotTraining, advice: str) -> None:
    """`enter`, and no other validations either: an old best of fewer episodes would compete with the new ones."""
    before = TrainingSettings.of(folder.config()["settings"])
    looks = {name: getattr(before, name) for name in ("validate_every", "validation_episodes")}
    wrong = differences(looks, {name: getattr(job.settings, name) for name in looks}, set())
    if wrong:
        raise BilevelError(f"The run in {folder.path} was validated otherwise: {'; '.join(wrong)}. {advice}")
    enter(folder, job, "", resume=True, advice=advice)
