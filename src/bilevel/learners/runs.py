"""A few-shot training in a folder: what is recorded when it begins, and what must agree when it is resumed."""

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
from bilevel.errors import BilevelError, DivergenceError, differences
from bilevel.files import write_json
from bilevel.learners import library
from bilevel.learners.base import Learner
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.training import FewShotTraining
from bilevel.source_commit import commit
from bilevel.training.files import read_tensors
from bilevel.training.folder import RunFolder
from bilevel.training.loop import Ending, Run, Schedule


def schedule(settings: TrainingSettings) -> Schedule:
    """How long a training with these settings runs, and how often it validates and saves."""
    return Schedule(
        settings.iterations,
        validate_every=settings.validate_every,
        checkpoint_every=settings.checkpoint_every,
        patience=settings.patience,
    )


def begin_or_resume(
    folder: RunFolder,
    job: FewShotTraining,
    command: str,
    *,
    preset: str | None = None,
    resume: bool = False,
    warn: Callable[[str], None] = print,
    advice: str = "",
) -> None:
    """Begin a run in the folder, or check that the run in it has the same configuration.

    Args:
        folder: the folder of the run.
        job: the training.
        command: the command line, which is recorded.
        preset: the name of the preset, which is recorded.
        resume: whether to resume the run in the folder.
        warn: called with a sentence if the resumed run may differ from an uninterrupted one.
        advice: the end of the error if the run in the folder has another configuration; by default, advice about the
            options of `bilevel train`.
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
            recorded = ("command", "settings", "training", "initial")
            config["initial"] = {key: card[key] for key in recorded if key in card}
        folder.begin({**config, "launch": launch} if launch else config)
        return
    before = folder.config()
    # `TrainingSettings.of` adds the defaults of settings that are newer than the run.
    wrong = differences(TrainingSettings.of(before["settings"]).plain(), settings.plain(), settings.free_on_resume)
    wrong += differences(before.get("data", data), data)
    wrong += differences({"kind": _kind_of(before, kind)}, {"kind": kind})
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        default_advice = (
            f"To continue with the run's own settings, write only: bilevel train --resume --out "
            f"{shlex.quote(str(folder.path))}. Its data must be the same. Or choose another folder for a new run."
        )
        raise BilevelError(
            f"The run in {folder.path} has another configuration, so it cannot be continued with this one:\n{listed}\n"
            f"{advice or default_advice}"
        )
    # Only this training splits one computation over several threads. In others the number of threads changes nothing.
    depends_on_threads = kind == "ClassicTraining"
    if depends_on_threads and before.get("threads", torch.get_num_threads()) != torch.get_num_threads():
        warn(f"The run had --threads {before['threads']}. With another number the result is not the same bit for bit.")
    write_json(folder.config_file, {**before, "settings": settings.plain()}, sealed=True)


def _kind_of(config: dict[str, Any], default: str) -> str:
    """The class of the training in a configuration. Version 0.1 had a class for multiclass, which is now a learner."""
    kind = str(config.get("kind", default))
    return FewShotTraining.__name__ if kind == "MulticlassTraining" else kind


def train_in(path: Path, job: FewShotTraining, command: str, title: str, progress: bool | None = None) -> Ending:
    """Train to the end of the schedule in this folder, and resume the training that is there.

    The result depends on the settings alone, so a run that was validated differently, or trained for longer, is
    refused. Ctrl-C saves a checkpoint and interrupts. A training that diverges is an error.
    """
    folder = RunFolder(path)
    advice = "Choose another folder with --out DIR, or remove this one."
    with folder.locked():
        if folder.exists():
            _check_same(folder, job, advice)
        else:
            begin_or_resume(folder, job, command)
        run = Run(job, folder, schedule(job.settings), report=lambda message: print(message, file=sys.stderr))
        if run.iteration > job.settings.iterations:
            raise BilevelError(
                f"The run in {path} has {run.iteration} hyperiterations already, which is more than iterations="
                f"{job.settings.iterations}. {advice}"
            )
        ending = run.go(progress, title)
    if ending.outcome.kind == "interrupted":
        raise KeyboardInterrupt(f"The training is saved in {path}. Run the same command to continue it.")
    if ending.outcome.kind == "diverged":
        raise DivergenceError(f"{title}: {ending.outcome}")
    return ending


def train_learner(
    learner: Learner, data: ImageDataset, path: Path, progress: bool | None, changes: dict[str, Any]
) -> Ending:
    """The implementation of `bilevel.learners.fit`."""
    shared = {f.name for f in fields(TrainingSettings)}
    options = asdict(learner.options)
    clash = [key for key in changes if key in options or key in ("learner", "dataset", "options")]
    unknown = [key for key in changes if key not in shared | set(clash)]
    if clash:
        raise BilevelError(f"fit takes {', '.join(clash)} from the learner and the data. Set it when you make these.")
    if unknown:
        raise BilevelError(f"There is no setting {', '.join(unknown)}; the settings are {', '.join(sorted(shared))}.")
    common = {key: value for key, value in options.items() if key in shared}
    own = {key: value for key, value in options.items() if key not in shared}
    settings = TrainingSettings(learner=learner.name, dataset=data.name, options=own, **common, **changes)
    job = FewShotTraining(settings, data, folder=path, learner=learner)
    ending = train_in(path, job, f"bilevel.learners.fit({learner.name})", learner.name, progress)
    learner.set_weights(read_tensors(RunFolder(path).best)[0])
    return ending


def _check_same(folder: RunFolder, job: FewShotTraining, advice: str) -> None:
    """Check that the run in the folder has this configuration and is validated in the same way.

    Otherwise a best score on fewer episodes could be compared with later ones.
    """
    before = TrainingSettings.of(folder.config()["settings"])
    names = ("validate_every", "validation_episodes")
    recorded, now = ({name: getattr(settings, name) for name in names} for settings in (before, job.settings))
    wrong = differences(recorded, now)
    if wrong:
        raise BilevelError(f"The run in {folder.path} was validated in another way: {'; '.join(wrong)}. {advice}")
    begin_or_resume(folder, job, "", resume=True, advice=advice)
