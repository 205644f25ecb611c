"""`bilevel runs`: the trainings in a folder, with their progress and scores."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bilevel import extras
from bilevel.cli.list import columns
from bilevel.cli.train import AS_JSON
from bilevel.errors import BilevelError
from bilevel.files import read_json
from bilevel.learners import ZOO
from bilevel.learners.settings import TrainingSettings
from bilevel.training.log import read_metrics

# The columns of the table. This module does not import torch; it reads JSON files.
HEADER = (
    *("run", "task", "learner", "hyperiterations", "meta-validation", "batch norm", "T", "minutes", "changed", "state"),
)


def command(
    folder: Annotated[Path, typer.Argument(help="The folder with the runs, at any depth.", metavar="[DIR]")] = Path(
        "runs"
    ),
    as_json: AS_JSON = False,
) -> None:
    """List trainings and the models of the package.

    Trainings are listed with their best meta-validation accuracy, models with their meta-test accuracy.

    The state of a training is running, finished, finished early, stopped (continue it with `bilevel train --resume
    --out RUN`), or damaged, with the reason.
    """
    if folder.exists() and not folder.is_dir():
        raise BilevelError(f"{folder} is a file; pass the folder that holds the runs.")
    runs = [describe(path) for path in find(folder)]
    zoo = [_model(card) for card in sorted(ZOO.glob("*.json"))]
    if as_json:
        typer.echo(json.dumps({"runs": runs, "zoo": zoo}, indent=1))
        return
    if runs:
        columns([HEADER, *(_row(run) for run in runs)])
        typer.echo(
            "\nmeta-validation: the best accuracy so far, with this T and batch norm. Next: bilevel evaluate RUN"
        )
    else:
        typer.echo(f"There are no runs in {folder}. Start one: bilevel train glyphs-5way-1shot")
    if zoo:
        typer.echo("")
        columns([("model", "task", "meta-test", "batch norm", "T"), *(_model_row(model) for model in zoo)])


def find(folder: Path) -> list[Path]:
    """The folders of runs: those with a config.json. Folders inside of a run are not searched."""
    runs = []
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "config.json" in names:
            runs.append(Path(path))
            folders.clear()
    return sorted(runs)


def describe(path: Path) -> dict[str, Any]:
    """A run as JSON types. If its files are damaged, its state says so, and no error is raised."""
    run: dict[str, Any] = {"run": str(path), "changed": _changed(path)}
    try:
        return run | _described(path)
    except (BilevelError, OSError) as error:
        return run | {"state": f"damaged: {error}"}


def _described(path: Path) -> dict[str, Any]:
    config = read_json(path / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("settings"), dict):
        raise BilevelError("config.json is not the configuration of a run")
    settings = TrainingSettings.of(config["settings"])
    needed = ("dataset", "ways", "shots", "iterations", "batch_norm", "steps", "patience")
    if missing := [name for name in needed if name not in config["settings"]]:
        raise BilevelError(f"config.json has no {missing[0]!r}")
    run = {"preset": config.get("preset"), **{name: getattr(settings, name) for name in (*needed, "learner")}}
    learner = config.get("learner")
    # A config.json of version 0.1 names no learner; then the settings of the training are those of the learner.
    if isinstance(learner, dict) and learner.get("name"):
        run |= {name: learner.get(name) for name in ("batch_norm", "steps")}
    lines = read_metrics(path, lambda sentence: typer.echo(f"Note: {sentence}", err=True))
    scores = [(line["score"], line["iteration"], line.get("interval")) for line in lines if "score" in line]
    # The first one if several are equal, as in training.
    best: Any = max(scores, key=lambda line: (line[0], -line[1]), default=(None, None, None))
    run["accuracy"], run["best_iteration"], run["interval"] = best
    run["done"] = max((line["iteration"] for line in lines), default=0)
    run["minutes"] = max((line["minutes"] for line in lines if "minutes" in line), default=None)
    waited = sum(line[1] > best[1] for line in scores)
    run["state"] = _state(path, run, waited)
    return run


def _state(path: Path, run: dict[str, Any], waited: int) -> str:
    damage = [_damage(path / name) for name in ("best.safetensors", "last.safetensors")]
    if any(damage):
        return f"damaged: {next(filter(None, damage))}"
    if _locked(path / ".lock"):
        return "running"
    if run["done"] >= run["iterations"]:
        return "finished"
    if run["patience"] and waited >= run["patience"]:
        return "finished early"
    return "stopped" if (path / "last.safetensors").exists() else "stopped, no weights yet"


def _locked(lock: Path) -> bool:
    """Whether a process holds the lock. An existing lock file is locked and released at once; none is created."""
    if not lock.exists():
        return False
    filelock = extras.load("filelock", extra="learn", purpose="bilevel runs")
    try:
        with filelock.FileLock(lock, timeout=0):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # without the right to lock the file of another user, the answer is unknown
        return False


def _damage(file: Path) -> str:
    """What is wrong with a file of weights, judged by its length and header; the checksum is not computed."""
    if not file.exists():
        return ""
    safetensors = extras.load("safetensors", extra="learn", purpose="bilevel runs")
    try:
        with safetensors.safe_open(file, framework="np"):
            return ""
    except (safetensors.SafetensorError, OSError) as error:
        return f"{file.name} cannot be read ({error})"


def _changed(path: Path) -> float:
    """The time of the last change of a file, in seconds since 1970."""
    files = ("metrics.jsonl", "last.safetensors", "best.safetensors", "config.json")
    return max((path / name).stat().st_mtime for name in files if (path / name).exists())


def _model(card: Path) -> dict[str, Any]:
    model: dict[str, Any] = {"model": f"zoo:{card.stem}"}
    try:
        content = read_json(card)
        settings, score = content["settings"], content.get("score", {})
        model |= {name: settings[name] for name in ("dataset", "ways", "shots", "batch_norm")}
        test = score.get("test", {})
        return model | {key: test.get(key) for key in ("accuracy", "interval", "steps")}
    except (BilevelError, KeyError, TypeError, AttributeError) as error:
        return model | {"damaged": str(error)}


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["changed"]))
    if "done" not in run:
        return (run["run"], "", "", "", "", "", "", "", when, run["state"])
    return (
        run["run"],
        str(run["preset"] or _task(run)),
        run["learner"],
        f"{run['done']:,} of {run['iterations']:,}",
        _score(run),
        str(run["batch_norm"] or ""),
        str(run["steps"] or ""),
        "" if run["minutes"] is None else f"{run['minutes']:.1f}",
        when,
        run["state"],
    )


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    if "damaged" in model:
        return (model["model"], f"damaged: {model['damaged']}", "", "", "")
    steps = "" if model["steps"] is None else str(model["steps"])
    return (model["model"], _task(model), _score(model), model["batch_norm"], steps)


def _task(row: dict[str, Any]) -> str:
    return f"{row['dataset']} {row['ways']}-way {row['shots']}-shot"


def _score(row: dict[str, Any]) -> str:
    if row["accuracy"] is None:
        return "none yet"
    return f"{row['accuracy']:.2%}" + ("" if row["interval"] is None else f" ± {row['interval']:.2%}")
