"""The work of `bilevel calibrate`. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from bilevel.cli._output import console
from bilevel.data import ImageDataset
from bilevel.errors import BilevelError
from bilevel.learners import ZOO_PREFIX, library
from bilevel.learners.calibration import QUERIES, Calibration
from bilevel.learners.calibration import calibrate as fitted
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import episodes as stream
from bilevel.learners.streams import open_data
from bilevel.tasks.episodes import Episodes

# The ways and shots for which a model is calibrated, if its data have enough classes and pictures.
GRID = tuple((ways, shots) for ways in (2, 3, 5, 10, 20) for shots in (1, 5))


def calibrate(
    spec: str, count: int, batch_norm: str | None, seed: int | None, data_root: Path | None
) -> list[Calibration]:
    """Calibrate the model, and save the calibrations with its weights."""
    if spec.startswith(ZOO_PREFIX):
        raise BilevelError(
            f"{spec} comes with the package and is calibrated already. To calibrate it with other settings, make a "
            f"copy: bilevel evaluate {spec} --save PATH."
        )
    model = library.find(spec, batch_norm)
    used = model if batch_norm else model.for_use()
    if used.settings.dataset == library.UNKNOWN:
        raise BilevelError(
            f"{spec} does not say which data it was trained on, so there is no meta-validation to calibrate it on. "
            "Calibrate the run that it comes from."
        )
    data = open_data(used.settings, data_root)
    model.check_data(data)
    shapes = [(used.settings.ways, used.settings.shots), *GRID]
    made = for_shapes(used, used.settings, data, shapes, count, used.learner.steps, seed)
    library.save_calibrations(spec, model, [calibration.plain() for calibration in made])
    return made


def for_shapes(
    model: library.TrainedLearner,
    settings: TrainingSettings,
    data: ImageDataset,
    shapes: Sequence[tuple[int, int]],
    count: int,
    steps: int,
    seed: int | None,
) -> list[Calibration]:
    """Calibrations for the first ways and shots, and for those of the others that the learner and the data allow."""
    made: dict[tuple[int, int], Calibration] = {}
    for number, (ways, shots) in enumerate(shapes):
        try:
            model.learner.check_episode(ways, shots)
            changed = replace(settings, ways=ways, shots=shots, queries=min(settings.queries, QUERIES))
            val, test = _streams(changed, data, seed)
        except BilevelError:
            if number == 0:
                raise
            continue
        if (ways, shots) not in made:
            made[ways, shots] = fitted(model.learner, val, test, count, steps)
    return list(made.values())


def _streams(settings: TrainingSettings, data: ImageDataset, seed: int | None) -> list[Episodes]:
    """Episodes of meta-validation and meta-test, without rotations if there are enough classes: classes of users are
    not rotations of each other."""
    try:
        upright = replace(settings, rotations=False)
        return [stream(upright, data, split, seed) for split in ("val", "test")]
    except BilevelError:
        return [stream(settings, data, split, seed) for split in ("val", "test")]


def show(spec: str, made: Sequence[Calibration]) -> None:
    """Print the calibrations as a table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("episodes", "accuracy", "error before", "error after", "temperature", "false alarms", "found"):
        table.add_column(column, justify="right")
    for one in made:
        found = "–" if one.found is None else f"{one.found['0.05']:.1%}"
        table.add_row(
            f"{one.ways}-way {one.shots}-shot",
            *(f"{number:.1%}" for number in (one.accuracy, one.error_before, one.error)),
            f"{one.temperature:.3g}",
            f"{one.false_alarms['0.05']:.1%}",
            found,
        )
    console().print(table)
    typer.echo(
        f"{spec}: the temperatures are from {made[0].episodes} episodes of meta-validation each, the accuracies and "
        "calibration errors from as many of meta-test. False alarms: pictures of the classes that are called "
        '"none of these" at a rate of 5 %. Found: pictures of other classes that are called so.'
    )
