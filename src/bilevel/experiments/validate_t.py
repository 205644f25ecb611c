"""Choosing T on meta-validation: accuracy against hyperiterations, and where early stopping ends each training.

Trainings that differ in T alone, with the same start and the same episodes. The paper's stopped after 42,000, 40,000,
22,000 and 15,000 hyperiterations for T = 3, 5, 8 and 12, on MiniImagenet with its residual network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bilevel.experiments._trainings import (
    PROBLEMS,
    TrainingCurve,
    check_datasets,
    command_of,
    draw_curve,
    logged,
    open_all,
    problem_title,
    train,
)
from bilevel.experiments.base import (
    ExperimentResult,
    ExperimentSettings,
    TextTable,
    described,
    percent,
    require,
    runs_folder,
    single_precision,
)
from bilevel.learners.settings import TrainingSettings
from bilevel.models.batch_norm import MEANING
from bilevel.plotting import BLACK, COLOURS, dots, picture, titled
from bilevel.thread_pool import one_thread

PAPER = "Figure 6 (Section 5.2)"

# T: hyperiterations after which early stopping halted the paper's trainings.
PRINTED = {3: 42_000, 5: 40_000, 8: 22_000, 12: 15_000}
# Smaller episodes than Table 4's, so that trainings come to their end.
CHANGES: dict[str, dict[str, Any]] = {"omniglot": {"ways": 5, "queries": 5, "meta_batch": 4}}


@dataclass(frozen=True)
class ValidateTSettings(ExperimentSettings):
    """The full run; `iterations`, the most that a training may take, and `validate_every` have a number for each data
    set."""

    seed: int = 0
    datasets: tuple[str, ...] = ("omniglot", "miniimagenet")
    steps: tuple[int, ...] = tuple(PRINTED)
    iterations: tuple[int, ...] = (12_000, 40_000)
    validate_every: tuple[int, ...] = (200, 250)
    validation_episodes: int = 100
    patience: int = 4


QUICK: dict[str, Any] = {
    "datasets": ("glyphs",),
    "iterations": (60,),
    "validate_every": (10,),
    "validation_episodes": 20,
    "patience": 2,
}


def run(settings: ValidateTSettings, out: Path, progress: bool | None = None) -> ExperimentResult:
    """Train with every T, and draw Figure 6."""
    _check(settings)
    command = command_of("validate-t", settings)
    found: dict[str, dict[int, TrainingCurve]] = {}
    with single_precision(), one_thread():
        opened = open_all(settings.datasets)
        for index, (name, data) in enumerate(opened.items()):
            found[name] = {}
            for steps in settings.steps:
                training, folder = training_of(settings, index, steps), runs_folder(out) / f"{name}-T{steps}"
                curve = logged(folder, training, data) or train(folder, training, data, command, progress)
                found[name][steps] = curve
    numbers = {name: {str(steps): _numbers(one) for steps, one in rows.items()} for name, rows in found.items()}
    _draw(out / "validate-t.png", numbers)
    return ExperimentResult(
        numbers,
        _choices(settings),
        [_table(settings, index, found[name]) for index, name in enumerate(settings.datasets)],
        ("validate-t.png",),
        _notes(found),
        data={name: described(data) for name, data in opened.items()},
        runs=[f"runs/{name}-T{steps}" for name in found for steps in settings.steps],
        times={name: {str(steps): one.minutes for steps, one in rows.items()} for name, rows in found.items()},
    )


def training_of(s: ValidateTSettings, index: int, steps: int) -> TrainingSettings:
    """The settings of one training."""
    dataset, every = s.datasets[index], s.validate_every[index]
    return replace(
        PROBLEMS[dataset],
        **CHANGES.get(dataset, {}),
        seed=s.seed,
        steps=steps,
        iterations=s.iterations[index],
        validate_every=every,
        validation_episodes=s.validation_episodes,
        patience=s.patience,
        checkpoint_every=max(1, every // 2),
    )


def _numbers(trained: TrainingCurve) -> dict[str, Any]:
    return {
        "curve": trained.curve,
        "best": trained.best[1],
        "best after": trained.best_iteration,
        "ended after": trained.iterations,
        "stopped early": trained.stopped_early,
    }


def _table(s: ValidateTSettings, index: int, rows: dict[int, TrainingCurve]) -> TextTable:
    shown = []
    for steps, trained in rows.items():
        _, score, interval = trained.best
        paper = f"{PRINTED[steps]:,}" if steps in PRINTED else "–"
        ended, why = f"{trained.iterations:,}", "another network, data set, patience and size of meta-batch"
        if not trained.stopped_early:
            ended, why = f"{ended}, not stopped", "as far as it got: the hyperiterations ran out first"
        best = f"{trained.best_iteration:,}"
        shown.append((str(steps), paper, ended, best, percent(score, interval), f"{trained.minutes:.1f}", why))
    title = f"{problem_title(training_of(s, index, s.steps[0]))}: where early stopping ends each"
    columns = ("T", "paper stops after", "ours ends after", "best after", "best accuracy", "minutes", "why")
    return TextTable(title, columns, shown)


def stopping_note(dataset: str, rows: dict[int, TrainingCurve]) -> str:
    """Whether larger T stop earlier, as the paper found, and which T is best."""
    best = max(rows, key=lambda steps: rows[steps].best[1])
    _, score, interval = rows[best].best
    text = f"On {dataset} T = {best} is best on meta-validation, {percent(score, interval)} per cent."
    close = [str(steps) for steps in rows if steps != best and score - rows[steps].best[1] <= interval]
    if close:
        text += f" T = {', '.join(close)} came within that interval of it."
    if not all(one.stopped_early for one in rows.values()):
        running = [str(steps) for steps, one in rows.items() if not one.stopped_early]
        listed = ", ".join(running)
        return f"{text} Trainings with T = {listed} were not stopped by then, so that their ends say nothing."
    ends = [rows[steps].iterations for steps in sorted(rows)]
    if len(ends) < 2 or len(set(ends)) == 1:
        return text + " All stop alike."
    if all(later < earlier for earlier, later in pairwise(ends)):
        return text + " Larger T stop earlier, as the paper found."
    if ends[-1] < ends[0]:
        return f"{text} The largest T stops before the smallest, as in the paper, but not every step is downwards."
    return text + " Larger T do not stop earlier here, unlike in the paper."


def _notes(found: dict[str, dict[int, TrainingCurve]]) -> tuple[str, ...]:
    return (
        *(stopping_note(name, rows) for name, rows in found.items()),
        f"Support and query sets are disjoint. Batch norm: episode, {MEANING['episode']}.",
        "One training for each T; where early stopping ends one depends on the noise of meta-validation.",
    )


def _choices(s: ValidateTSettings) -> dict[str, str]:
    return {
        "early stopping": (
            f"after {s.patience} validations of {s.validation_episodes} episodes without a new best, one every "
            f"{', '.join(f'{every} ({name})' for name, every in zip(s.datasets, s.validate_every, strict=True))} "
            "hyperiterations; the authors' code has 40, every 1,000"
        ),
        "outer optimiser": "Adam, step 1e-3/(1 + 1e-5·k), as in the authors' code",
        "inner step size": "the problem's (see the settings of the runs), never above 1/ν",
        "length": "at most " + ", ".join(f"{n:,} ({d})" for d, n in zip(s.datasets, s.iterations, strict=True)),
    }


def _check(s: ValidateTSettings) -> None:
    check_datasets(s.datasets, iterations=s.iterations, validate_every=s.validate_every)
    require(bool(s.steps) and min(s.steps) >= 1, f"steps={s.steps} must be numbers T ≥ 1, at least one.")
    require(len(set(s.steps)) == len(s.steps), f"steps={s.steps} names a T twice.")
    s.at_least(1, patience="would never stop")
    for index in range(len(s.datasets)):
        training_of(s, index, s.steps[0])  # refuses what training cannot take


def _draw(path: Path, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    """A panel for every data set, a curve for each T; a cross marks where a training was stopped, a ring its best."""
    with picture(path, width=5.8 * len(numbers) + 0.4) as figure:
        panels = figure.subplots(1, len(numbers), squeeze=False)[0]
        for axes, (dataset, rows) in zip(panels, numbers.items(), strict=True):
            titled(axes, dataset, "hyperiterations", "meta-validation accuracy in per cent")
            for (steps, found), colour in zip(rows.items(), COLOURS, strict=False):
                draw_curve(axes, found["curve"], colour, f"T = {steps}")
                dots(axes, found["best after"], 100 * found["best"], colour, size=9, fillstyle="none")
                if found["stopped early"]:
                    at, score, _ = found["curve"][-1]
                    dots(axes, at, 100 * score, colour, size=9, marker="X")
            dots(axes, [], [], BLACK, "best", fillstyle="none")
            if any(found["stopped early"] for found in rows.values()):
                dots(axes, [], [], BLACK, "stopped", marker="X")
            if all(len(found["curve"]) > 2 for found in rows.values()):  # the first validation would hide the others
                scores = [100 * point[1] for found in rows.values() for point in found["curve"][1:]]
                low, top = min(scores), max(scores)
                axes.set_ylim(low - 0.12 * (top - low) - 0.1, top + 0.06 * (top - low) + 0.1)
            axes.legend(loc="lower right", ncols=2)
