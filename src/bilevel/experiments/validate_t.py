"""Choosing T on meta-validation: accuracy against hyperiterations, and where early stopping ends each training.

Trainings that differ in T alone, with the same start and the same episodes. The paper's stopped after 42,000, 40,000,
22,000 and 15,000 hyperiterations for T = 3, 5, 8 and 12, on MiniImagenet with its residual network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bilevel.experiments._trainings import PROBLEMS, Trained, check_datasets, command_of, open_all, train
from bilevel.experiments._validate_t_picture import draw
from bilevel.experiments.base import Result, Table, described, kept, one_thread, require, single_precision
from bilevel.meta.settings import Settings as Training
from bilevel.models.batch_norm import MEANING

PAPER = "Figure 6 (Section 5.2)"

# T: hyperiterations after which early stopping halted the paper's trainings.
PRINTED = {3: 42_000, 5: 40_000, 8: 22_000, 12: 15_000}
# Smaller episodes than Table 4's, so that trainings come to their end.
CHANGES: dict[str, dict[str, Any]] = {"omniglot": {"ways": 5, "queries": 5, "meta_batch": 4}}


@dataclass(frozen=True)
class Settings:
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


def run(settings: Settings, out: Path, progress: bool | None = None) -> Result:
    """Figure 6, as far as the settings let it run."""
    _check(settings)
    found: dict[str, dict[int, Trained]] = {}
    with single_precision(), one_thread():
        opened = open_all(settings.datasets)
        for index, name in enumerate(settings.datasets):
            found[name] = {
                steps: train(
                    kept(out) / f"{name}-T{steps}",
                    training_of(settings, index, steps),
                    opened[name],
                    command_of("validate-t", settings),
                    progress,
                )
                for steps in settings.steps
            }
    numbers = {name: {str(steps): _numbers(one) for steps, one in rows.items()} for name, rows in found.items()}
    draw(out / "validate-t.png", numbers)
    return Result(
        numbers,
        _choices(settings),
        [_table(settings, index, found[name]) for index, name in enumerate(settings.datasets)],
        ("validate-t.png",),
        _notes(found),
        data={name: described(data) for name, data in opened.items()},
        runs=[f"runs/{name}-T{steps}" for name in found for steps in settings.steps],
        times={name: {str(steps): one.minutes for steps, one in rows.items()} for name, rows in found.items()},
    )


def training_of(s: Settings, index: int, steps: int) -> Training:
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


def _numbers(trained: Trained) -> dict[str, Any]:
    return {
        "curve": trained.curve,
        "best": trained.best[1],
        "best after": trained.best_iteration,
        "ended after": trained.iterations,
        "stopped early": trained.stopped_early,
    }


def _table(s: Settings, index: int, rows: dict[int, Trained]) -> Table:
    shown = []
    for steps, trained in rows.items():
        _, score, interval = trained.best
        ended = f"{trained.iterations:,}" + ("" if trained.stopped_early else ", not stopped")
        why = (
            "another network, data set, patience and size of meta-batch"
            if trained.stopped_early
            else "as far as it got: the hyperiterations ran out first"
        )
        shown.append(
            (
                str(steps),
                f"{PRINTED[steps]:,}" if steps in PRINTED else "–",
                ended,
                f"{trained.best_iteration:,}",
                f"{100 * score:.2f} ± {100 * interval:.2f}",
                f"{trained.minutes:.1f}",
                why,
            )
        )
    base = training_of(s, index, s.steps[0])
    pixels = f" on {base.image_size}×{base.image_size} pixels" if base.image_size else ""
    return Table(
        f"{base.dataset} {base.ways}-way {base.shots}-shot, {base.network}{pixels}: where early stopping ends each",
        ("T", "paper stops after", "ours ends after", "best after", "best accuracy", "minutes", "why"),
        shown,
    )


def in_words(dataset: str, rows: dict[int, Trained]) -> str:
    """Whether larger T stop earlier, as the paper found, and which T is best."""
    best = max(rows, key=lambda steps: rows[steps].best[1])
    _, score, interval = rows[best].best
    text = f"On {dataset} T = {best} is best on meta-validation, {100 * score:.2f} ± {100 * interval:.2f} per cent."
    close = [str(steps) for steps in rows if steps != best and score - rows[steps].best[1] <= interval]
    if close:
        text += f" T = {', '.join(close)} came within that interval of it."
    if not all(one.stopped_early for one in rows.values()):
        running = [str(steps) for steps, one in rows.items() if not one.stopped_early]
        return (
            text + f" Trainings with T = {', '.join(running)} were not stopped by then, so that their ends say nothing."
        )
    ends = [rows[steps].iterations for steps in sorted(rows)]
    if len(ends) < 2 or len(set(ends)) == 1:
        return text + " All stop alike."
    if all(later < earlier for earlier, later in pairwise(ends)):
        return text + " Larger T stop earlier, as the paper found."
    if ends[-1] < ends[0]:
        return (
            text + " The largest T stops earlier than the smallest, as in the paper, but not every step is downwards."
        )
    return text + " Larger T do not stop earlier here, unlike in the paper."


def _notes(found: dict[str, dict[int, Trained]]) -> tuple[str, ...]:
    return (
        *(in_words(name, rows) for name, rows in found.items()),
        f"Support and query sets are disjoint. Batch norm: episode, {MEANING['episode']}.",
        "One training for each T; where early stopping ends one depends on the noise of meta-validation.",
    )


def _choices(s: Settings) -> dict[str, str]:
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


def _check(s: Settings) -> None:
    check_datasets(s.datasets, iterations=s.iterations, validate_every=s.validate_every)
    require(bool(s.steps) and min(s.steps) >= 1, f"steps={s.steps} must be numbers T ≥ 1, at least one.")
    require(len(set(s.steps)) == len(s.steps), f"steps={s.steps} names a T twice.")
    require(s.patience >= 1, f"patience={s.patience} would never stop; pass at least 1.")
    for index in range(len(s.datasets)):
        training_of(s, index, s.steps[0])  # refuses what training cannot take
