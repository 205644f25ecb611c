"""`bilevel list`: experiments, presets, the models of the zoo, and the classes of a part of the library."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, get_type_hints

import typer

from bilevel import experiments
from bilevel.cli._output import printable
from bilevel.errors import BilevelError
from bilevel.experiments.overrides import as_text, describe

ROOMS = {
    "dynamics": "bilevel.dynamics",
    "methods": "bilevel.methods",
    "solvers": "bilevel.linear_solvers",
    "constraints": "bilevel.constraints",
    "algorithms": "bilevel.algorithms",
    "learners": "bilevel.learners",
}


def command(
    what: Annotated[
        str,
        typer.Argument(
            help=f"experiments, presets, models, {', '.join(ROOMS)}, or the name of an experiment for its settings."
        ),
    ] = "experiments",
) -> None:
    """List experiments, presets of trainings, trained models, methods, learners, …

    For experiments it prints their table or figure in the paper; for the name of an experiment, its settings; for
    trained models, their accuracy on meta-test.
    """
    if what == "experiments":
        columns([(listed.name, listed.paper, listed.summary) for listed in experiments.find().values()])
    elif what == "presets":
        _presets()
    elif what == "models":
        _models()
    elif what in ROOMS:
        # This imports torch: the classes are found by importing their files.
        kinds = importlib.import_module(ROOMS[what]).find()
        columns([(name, *_description(kind)) for name, kind in sorted(kinds.items())])
    elif what in experiments.find():
        _settings(what)
    else:
        legal = ["experiments", "presets", "models", *ROOMS, *experiments.find()]
        raise BilevelError(
            f"There is no list of {what!r}.{experiments.did_you_mean(what, legal)} Pass one of: {', '.join(legal)}."
        )


def _description(kind: type) -> tuple[str, ...]:
    """The first line of a class's docstring; for a learner, its strategy and the first line of its file."""
    strategy = getattr(kind, "strategy", None)
    text = inspect.getdoc(kind) if strategy is None else inspect.getmodule(kind).__doc__
    first = (text or "").partition("\n")[0]
    return (first,) if strategy is None else (strategy, first)


def _presets() -> None:
    """Every preset with its data, episodes, network and length; the stages of a training in stages add up."""
    from bilevel.learners.presets import PRESETS, RECIPES

    stages = {name: [training] for name, training in PRESETS.items()}
    stages |= {name: list(recipe.stages.values()) for name, recipe in RECIPES.items()}
    rows = []
    for name, trainings in stages.items():
        last, lengths = trainings[-1], " + ".join(f"{one.iterations:,}" for one in trainings)
        episode = f"{last.ways}-way {last.shots}-shot"
        rows.append((name, last.dataset, episode, last.network, f"{lengths} hyperiterations"))
    columns(rows)


def _models() -> None:
    """Every model of the zoo, with its data, network and the score in its card."""
    from bilevel.learners import ZOO_PREFIX
    from bilevel.learners.library import zoo

    rows = []
    for name, card in zoo().items():
        score = card["score"]
        test = score["test"]
        accuracy = f"{100 * test['accuracy']:.2f} ± {100 * test['interval']:.2f} %"
        protocol = f"{score['ways']}-way {score['shots']}-shot, batch norm {score['batch_norm']}"
        rows.append((ZOO_PREFIX + name, score["data"], card["learner"]["network"], accuracy, protocol))
    columns(rows)


def _settings(name: str) -> None:
    from bilevel.experiments.base import settings_of

    module = experiments.load(name)
    kind = settings_of(module)
    hints = get_type_hints(kind)
    quick = module.QUICK
    rows = [("--set", "default", "--quick", "")]
    for field in fields(kind):
        small = as_text(quick[field.name]) if field.name in quick else ""
        rows.append((field.name, as_text(getattr(kind(), field.name)), small, describe(hints[field.name])))
    columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with aligned columns, as plain text: importing a library for tables would take too long."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
