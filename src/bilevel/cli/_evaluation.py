"""The work of `bilevel evaluate` and `calibrate`. Kept in its own module so that `--help` does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

from bilevel.cli._output import print_table
from bilevel.cli.train import with_own_settings
from bilevel.data import ImageDataset
from bilevel.errors import BilevelError
from bilevel.learners import ZOO_PREFIX, library
from bilevel.learners.calibration import QUERIES, Calibration
from bilevel.learners.calibration import calibrate as fitted
from bilevel.learners.evaluation import EpisodeScore, choose_and_test
from bilevel.learners.picture_features import KnownFeatures
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import episodes as stream
from bilevel.learners.streams import open_data
from bilevel.models.batch_norm import MEANING
from bilevel.progress import bar
from bilevel.source_commit import commit
from bilevel.tasks.episodes import Episodes
from bilevel.training.folder import RunFolder

# The most episodes of each split on which probabilities are calibrated.
CALIBRATED = 100
# The ways and shots for which a model is calibrated, if its data have enough classes and pictures.
GRID = tuple((ways, shots) for ways in (2, 3, 5, 10, 20) for shots in (1, 5))


def evaluate(
    spec: str,
    count: int,
    first: int,
    last: int,
    changes: dict[str, int],
    batch_norm: str | None,
    mirror: bool | None,
    other: str | None,
    own: dict[str, str],
    seed: int | None,
    data_root: Path | None,
    save: Path | None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """The scores and the calibration, as JSON types. The weights are rounded to `dtype` first, and saved so."""
    model = library.find(spec, batch_norm)
    data = open_data(model.settings, data_root)
    model.check_data(data)
    if other is not None:
        model = library.with_learner(
            model, with_own_settings(replace(model.settings, learner=other, options={}), own), data
        )
    settings = replace(model.settings, **changes)  # type: ignore[arg-type]
    learner = model.learner
    if dtype is not None:
        learner.round_to(dtype)
    if mirror is not None:
        learner.change(mirror=mirror)
        settings = replace(settings, mirror=mirror)
    learner.check_episode(settings.ways, settings.shots)
    tried = range(first, last + 1) if learner.has_steps else range(1, 2)
    val, test = (stream(settings, data, split, seed) for split in ("val", "test"))
    known: KnownFeatures = {}
    with bar("episodes", 2 * count, show=None) as report:
        final = choose_and_test(learner, val, test, count, tried, report, known)
    result = {
        "model": spec,
        "learner": learner.name,
        "data": settings.dataset,
        "ways": settings.ways,
        "shots": settings.shots,
        "queries": settings.queries,
        "episodes": count,
        "batch_norm": learner.batch_norm if learner.has_batch_norm else None,
        "mirror": getattr(learner.options, "mirror", None),
        "inner_lr": getattr(learner.options, "inner_lr", None),
        "validation": [_line(t, final.validation) for t in tried],
        "steps": final.steps if learner.has_steps else None,
        "test": _line(final.steps, final.test),
    }
    shapes = [(settings.ways, settings.shots), *(GRID if save is not None else ())]
    used = model if batch_norm else model.for_use()
    known = known if used is model else {}  # other features, in another batch norm mode
    calibrations = for_shapes(used, settings, data, shapes, min(count, CALIBRATED), final.steps, seed, known)
    result["calibration"] = calibrations[0].plain()
    if other is None and RunFolder(Path(spec)).exists():
        library.save_calibrations(spec, model, [one.plain() for one in calibrations])
    if save is not None:
        if learner.has_steps:
            learner.steps = final.steps
        score = {key: value for key, value in result.items() if key != "model"}
        more = {"calibrations": [one.plain() for one in calibrations], "score": score}
        learner.save(save, {**_card(model, settings, data), **more}, dtype=dtype)
    return result


def _card(model: library.TrainedLearner, settings: TrainingSettings, data: ImageDataset) -> dict[str, Any]:
    """How the weights were trained and evaluated. `settings` are those of the evaluation."""
    copied = ("command", "preset", "initial", "training", "weights", "curve")
    preparation = data.preparation
    return {
        # "initial" below describes the training that came before. Its path is meaningless on another machine.
        "settings": replace(settings, initial="").plain(),
        "trained_with": {name: getattr(model.settings, name) for name in ("ways", "shots", "queries")},
        "data": {"name": model.settings.dataset, "fingerprint": data.fingerprint},
        "preparation": None if preparation is None else preparation.plain(),
        **{key: model.card[key] for key in copied if key in model.card},
        "trained_at_commit": model.card.get("commit"),
        "commit": commit(),
    }


def _line(steps: int, score: EpisodeScore) -> dict[str, Any]:
    return {"steps": steps, "accuracy": score.means[steps - 1], "interval": score.intervals[steps - 1]}


def show(result: dict[str, Any]) -> None:
    """Print the result."""
    test, validation = result["test"], result["validation"]
    if result["steps"] is None:
        line = validation[0]
        typer.echo(f"Meta-validation accuracy {line['accuracy']:.2%} ± {line['interval']:.2%}.")
        chosen = ""
    else:
        marks = [" ← best" if line["steps"] == result["steps"] else "" for line in validation]
        rows = [
            (f"{line['steps']}", f"{line['accuracy']:.2%}", f"{line['interval']:.2%}{mark}")
            for line, mark in zip(validation, marks, strict=True)
        ]
        print_table(("T", "meta-validation", "± 95 %"), rows)
        chosen = f" with T = {test['steps']}, chosen on meta-validation"
    typer.echo(
        f"Meta-test accuracy {test['accuracy']:.2%} ± {test['interval']:.2%}{chosen}.\n"
        f"{result['data']}, {result['ways']}-way {result['shots']}-shot, {result['queries']} queries "
        f"a class disjoint from the support set, {result['episodes']} episodes each."
    )
    made = Calibration.of(result["calibration"])
    mode = "" if made.batch_norm is None else f", with batch norm: {made.batch_norm}, as classify uses it"
    typer.echo(
        f"Calibration error {made.error_before:.1%}, and {made.error:.1%} with the temperature {made.temperature:.3g} "
        f"from meta-validation ({made.episodes} episodes of each split{mode})."
    )
    others = "" if made.found is None else f"; {made.found['0.05']:.0%} of pictures of other classes are found"
    typer.echo(
        f'"None of these" at a false-alarm rate of 5 % set on meta-validation: {made.false_alarms["0.05"]:.1%} on '
        f"meta-test{others}."
    )
    if result["batch_norm"] is not None:
        typer.echo(f"Batch norm: {result['batch_norm']}, {MEANING[result['batch_norm']]}.")


# ------------------------------------------------------------------------------------------------- calibration


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
    made = for_shapes(used, used.settings, data, shapes, count, used.learner.steps, seed, {})
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
    known: KnownFeatures,
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
            made[ways, shots] = fitted(model.learner, val, test, count, steps, known)
    return list(made.values())


def _streams(settings: TrainingSettings, data: ImageDataset, seed: int | None) -> list[Episodes]:
    """Episodes of meta-validation and meta-test, without rotations if there are enough classes: classes of users are
    not rotations of each other."""
    try:
        upright = replace(settings, rotations=False)
        return [stream(upright, data, split, seed) for split in ("val", "test")]
    except BilevelError:
        return [stream(settings, data, split, seed) for split in ("val", "test")]


def show_calibrations(spec: str, made: Sequence[Calibration]) -> None:
    """Print the calibrations as a table."""
    columns = ("episodes", "accuracy", "error before", "error after", "temperature", "false alarms", "found")
    rows = [
        (
            f"{one.ways}-way {one.shots}-shot",
            *(f"{number:.1%}" for number in (one.accuracy, one.error_before, one.error)),
            f"{one.temperature:.3g}",
            f"{one.false_alarms['0.05']:.1%}",
            "–" if one.found is None else f"{one.found['0.05']:.1%}",
        )
        for one in made
    ]
    print_table(columns, rows)
    typer.echo(
        f"{spec}: the temperatures are from {made[0].episodes} episodes of meta-validation each, the accuracies and "
        "calibration errors from as many of meta-test. False alarms: pictures of the classes that are called "
        '"none of these" at a rate of 5 %. Found: pictures of other classes that are called so.'
    )
