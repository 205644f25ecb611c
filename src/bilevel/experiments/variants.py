"""Seven ways to learn a representation: what the split and the full hypergradient are worth.

The same T = 5 inner steps, and the same number of hyperiterations with the same number of images in each, which take
about the same time: pretraining on all classes (Multiclass, with the paper's wider network), the bilevel problem with
the outer objective on the training sets (Bilevel-train), the hypergradient without the inner dynamics (Approx,
Approx-train), joint descent (Classic-train), and hyper-representation. Beyond the paper: pretraining as people do it
today (multiclass-today: augmented images, SGD, a cosine classifier, normalised features), and several seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bilevel.data import ImageDataset
from bilevel.experiments._table_4_trainings import ClassicTraining, PaperMulticlass
from bilevel.experiments._trainings import (
    PROBLEMS,
    EvaluatedTraining,
    check_datasets,
    command_of,
    differ,
    draw_curve,
    evaluate_with_steps,
    open_all,
    over_seeds,
    problem_title,
    stored,
    train,
    validations,
    with_schedule,
)
from bilevel.experiments.base import (
    ExperimentResult,
    ExperimentSettings,
    TextTable,
    described,
    percent,
    points,
    require,
    runs_folder,
    single_precision,
)
from bilevel.files import write_json
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.training import FewShotTraining
from bilevel.models.batch_norm import MEANING
from bilevel.plotting import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Axes,
    dots,
    legend_below,
    picture,
    titled,
)
from bilevel.thread_pool import one_thread

PAPER = "Table 4 (Section 5.3)"

# Accuracy in per cent, MiniImagenet 5-way 1-shot, from the best to the worst.
PRINTED = {
    "hyper-representation": 47.51,
    "multiclass": 43.02,
    "approx": 41.12,
    "classic-train": 40.46,
    "approx-train": 38.80,
    "bilevel-train": 29.63,
}
# Where there is no validation set, all 16 examples of a class are for training, as in the paper.
TRAIN = {"outer": "support", "train_shots": 16}
TODAY: dict[str, Any] = {
    "learner": "multiclass",
    "classifier": "cosine",
    "normalise": True,
    "last_relu": False,
    "batch_norm": "running",
    "inner_lr": 1.0,
    "optimizer": "sgd",
    "weight_decay": 5e-4,
    "lr": 0.1,
    "schedule": "cosine",
    "average": 0.0,
}
CHANGES: dict[str, dict[str, Any]] = {
    "hyper-representation": {},
    "multiclass": {},
    "multiclass-today": TODAY,
    "approx": {"method": "first-order"},
    "classic-train": TRAIN,
    "approx-train": {"method": "first-order", **TRAIN},
    "bilevel-train": TRAIN,
}
KINDS: dict[str, Callable[[TrainingSettings, ImageDataset], FewShotTraining]] = {
    "multiclass": PaperMulticlass,
    "classic-train": ClassicTraining,
}
# With 64 filters a pass takes 3.3 times as long as with 32, so this network gets 0.3 times the hyperiterations.
WIDE = {"c4l": ("c4l-64", 0.3)}


@dataclass(frozen=True)
class TrainedVariant:
    """A variant that was trained from one seed. `curve` holds its accuracies on meta-validation."""

    iterations: int
    minutes: float
    curve: list[tuple[int, float, float]]
    evaluated: EvaluatedTraining


# The trainings of a variant, one for each seed.
Trainings = list[TrainedVariant]


@dataclass(frozen=True)
class VariantsSettings(ExperimentSettings):
    """The full run; `iterations` has a number for each data set, `seeds` is how many trainings a variant gets."""

    seed: int = 0
    seeds: int = 2
    datasets: tuple[str, ...] = ("omniglot", "miniimagenet")
    iterations: tuple[int, ...] = (800, 5000)
    variants: tuple[str, ...] = tuple(CHANGES)
    steps: int = 5
    average: float = 0.99
    looks: int = 5
    look_episodes: int = 60
    step_factors: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    validation_episodes: int = 100
    test_episodes: int = 600


QUICK: dict[str, Any] = {
    "datasets": ("glyphs",),
    "seeds": 1,
    "iterations": (40,),
    "looks": 2,
    "look_episodes": 20,
    "validation_episodes": 20,
    "test_episodes": 40,
    "step_factors": (1.0, 10.0),
}


def run(settings: VariantsSettings, out: Path, progress: bool | None = None) -> ExperimentResult:
    """Train and evaluate every variant on every data set."""
    s, seeds = settings, range(settings.seed, settings.seed + settings.seeds)
    _check(s)
    found: dict[str, dict[str, Trainings]] = {}
    with single_precision(), one_thread():
        opened = open_all(s.datasets)
        for (name, data), iterations in zip(opened.items(), s.iterations, strict=True):
            found[name] = {}
            for variant in s.variants:
                found[name][variant] = []
                for seed in seeds:
                    folder, training = _folder(name, variant, seed), training_of(s, name, variant, iterations, seed)
                    one = train_and_evaluate(s, variant, training, data, runs_folder(out) / folder, progress)
                    found[name][variant].append(one)
    numbers = {name: {variant: _numbers(each) for variant, each in rows.items()} for name, rows in found.items()}
    _draw(out / "variants.png", numbers)
    return ExperimentResult(
        numbers,
        _choices(s),
        [table for name in found for table in (_table(s, name, found[name]), _order(name, found[name]))],
        ("variants.png",),
        _notes(s, found),
        data={name: described(data) for name, data in opened.items()},
        runs=[f"runs/{_folder(name, variant, i)}" for name in found for variant in found[name] for i in seeds],
        times={name: {variant: _minutes(each) for variant, each in rows.items()} for name, rows in found.items()},
    )


def training_of(s: VariantsSettings, dataset: str, variant: str, iterations: int, seed: int) -> TrainingSettings:
    """The settings of one variant's training."""
    base = replace(PROBLEMS[dataset], **{"seed": seed, "steps": s.steps, "average": s.average, **CHANGES[variant]})
    if variant == "multiclass-today" and dataset == "miniimagenet":
        base = replace(base, augment="flip,crop,colour")  # a mirrored character may be another one
    if variant == "multiclass" and base.network in WIDE:
        network, share = WIDE[base.network]
        base, iterations = replace(base, network=network), max(1, round(share * iterations))
    return with_schedule(base, iterations, s.looks, s.look_episodes)


def train_and_evaluate(
    s: VariantsSettings, variant: str, training: TrainingSettings, data: ImageDataset, path: Path, progress: bool | None
) -> TrainedVariant:
    """One variant from one seed, trained to its end. A score that is stored beside the training is only read."""
    sizes = [factor * training.inner_lr for factor in s.step_factors]
    asked = {"sizes": sizes, "episodes": [s.validation_episodes, s.test_episodes]}
    of = {**asked, "settings": json.loads(json.dumps(training.plain())), "data": data.fingerprint}
    file = path / "meta_test.json"
    found = stored(file, of)
    if found is None:
        trained = train(path, training, data, command_of("variants", s), progress, KINDS.get(variant, FewShotTraining))
        found = asdict(evaluate_with_steps(trained, data, sizes, s.validation_episodes, s.test_episodes))
        write_json(file, {"of": of, "found": found})
    curve, minutes = validations(path)
    evaluated = EvaluatedTraining(**{**found, "per_episode": tuple(found["per_episode"])})
    return TrainedVariant(training.iterations, minutes, curve, evaluated)


def _folder(dataset: str, variant: str, seed: int) -> str:
    return f"{dataset}-{variant}" + (f"-seed{seed}" if seed else "")


def _minutes(each: Trainings) -> list[float]:
    return [one.minutes for one in each]


def _together(each: Trainings) -> EvaluatedTraining:
    return over_seeds([one.evaluated for one in each])


def _numbers(each: Trainings) -> dict[str, Any]:
    seeds, first = [one.evaluated.numbers() for one in each], each[0]
    return {**_together(each).numbers(), "seeds": seeds, "hyperiterations": first.iterations, "curve": first.curve}


def _table(s: VariantsSettings, dataset: str, rows: dict[str, Trainings]) -> TextTable:
    base = PROBLEMS[dataset]
    shown = []
    for variant, each in rows.items():
        trained, evaluated = each[0], _together(each)
        if dataset == "miniimagenet" and variant in PRINTED:
            paper, gap = f"{PRINTED[variant]:.2f}", f"{100 * evaluated.accuracy - PRINTED[variant]:+.2f}"
            why = (
                f"{trained.iterations:,} hyperiterations on {base.image_size}×{base.image_size} pixels; the paper does "
                "not state its own, on 84×84"
            )
        else:
            paper = gap = "–"
            why = "not in the paper" if dataset == "miniimagenet" else "the paper has MiniImagenet only"
        scores = (
            percent(evaluated.accuracy, evaluated.interval),
            ", ".join(percent(one.evaluated.accuracy) for one in each),
        )
        length = f"{trained.iterations:,}", f"{sum(_minutes(each)) / len(each):.1f}"
        sizes = ", ".join(f"{one.evaluated.inner_lr:g}" for one in each)
        shown.append((variant, paper, *scores, gap, *length, sizes, why))
    columns = ("variant", "paper", "ours", "each seed", "difference", "hyperiterations", "minutes", "step size", "why")
    title = (
        f"{problem_title(base)}: accuracy in per cent on {s.test_episodes} meta-test episodes, {s.seeds} "
        f"training{'s' * (s.seeds > 1)} of each variant"
    )
    return TextTable(title, columns, shown)


# What the paper concludes from two comparisons.
CONCLUSIONS = {
    "splitting episodes into training and validation sets matters": ("hyper-representation", "bilevel-train"),
    "the full hypergradient matters": ("hyper-representation", "approx"),
}


def _order(dataset: str, rows: dict[str, Trainings]) -> TextTable:
    """The paper's order, neighbour by neighbour, and the two comparisons that it draws its conclusions from."""
    pairs = list(pairwise(variant for variant in PRINTED if variant in rows))
    pairs += [pair for pair in CONCLUSIONS.values() if pair not in pairs and set(pair) <= set(rows)]
    shown = []
    for better, worse in pairs:
        gap, width = differ(_together(rows[better]), _together(rows[worse]))
        paper = f"{PRINTED[better] - PRINTED[worse]:+.2f}"
        shown.append((f"{better} > {worse}", paper, points(gap, width), verdict(gap, width)))
    return TextTable(f"{dataset}: the order that the paper finds", ("claim", "paper", "ours", "verdict"), shown)


def verdict(gap: float, width: float) -> str:
    """Whether a difference that should be positive is.

    >>> verdict(0.03, 0.01), verdict(0.005, 0.01), verdict(-0.03, 0.01)
    ('confirmed', 'undecided', 'contradicted')
    """
    if abs(gap) <= width:
        return "undecided"
    return "confirmed" if gap > 0 else "contradicted"


def _notes(s: VariantsSettings, found: dict[str, dict[str, Trainings]]) -> tuple[str, ...]:
    return (
        *(_conclusions(name, {one: _together(each) for one, each in rows.items()}) for name, rows in found.items()),
        f"Every variant has the same number of images in a hyperiteration and is evaluated on the same episodes, after "
        f"T = {s.steps} steps from zero, with the step size that was best on meta-validation. Support and query sets "
        f"are disjoint. Batch norm: episode, {MEANING['episode']}.",
        "Intervals of differences are over the differences within episodes, which are the same for all variants. "
        + (
            "All intervals include the spread of the seeds' means."
            if s.seeds > 1
            else "No interval includes how much another seed would change."
        ),
    )


def _conclusions(dataset: str, rows: dict[str, EvaluatedTraining]) -> str:
    """The paper's two conclusions, compared with our numbers."""
    ranked = sorted(rows, key=lambda variant: -rows[variant].accuracy)
    text = f"On {dataset} our order is {' > '.join(ranked)}."
    for conclusion, (better, worse) in CONCLUSIONS.items():
        if {better, worse} <= set(rows):
            gap, width = differ(rows[better], rows[worse])
            text += (
                f" The paper's conclusion that {conclusion} is {verdict(gap, width)}: {better} minus {worse} is "
                f"{points(gap, width)} points."
            )
    return text


def _choices(s: VariantsSettings) -> dict[str, str]:
    return {
        "outer optimiser": "Adam, step 1e-3, the same for all; scores are those of λ's moving average, factor "
        f"{s.average:g}",
        "inner step size": "in training the problem's (see the settings of the runs), never above 1/ν",
        "Classic-train": f"w^j by gradient descent and λ by Adam, at once; new episodes and w^j = 0 every {s.steps} "
        "such steps, each of which counts as a hyperiteration",
        "Multiclass": "one softmax over all classes of meta-training (on Omniglot with their quarter turns), its "
        "logits are the features; C4L with 64 filters, as in the paper, and as many hyperiterations as take the same "
        "minutes",
        "multiclass-today": "the network of the other variants, as many images as they see, augmented (not on "
        "Omniglot), SGD with Nesterov's momentum, a rate that falls with a cosine, a cosine classifier, features "
        "centred and of one length; evaluated like the others, on features instead of logits",
        "-train variants": "16 examples a class, no queries",
        "length": "hyperiterations as in the table; the paper does not say how long its variants were trained",
    }


def _check(s: VariantsSettings) -> None:
    check_datasets(s.datasets, iterations=s.iterations)
    s.at_least(1, seeds="leaves nothing to train")
    unknown = [variant for variant in s.variants if variant not in CHANGES]
    require(
        bool(s.variants) and not unknown,
        f"variants={','.join(s.variants)} must be some of {', '.join(CHANGES)}, separated by commas.",
    )
    require(
        1 <= s.looks <= min(s.iterations),
        f"looks={s.looks} must be from 1 to the number of hyperiterations ({min(s.iterations)}).",
    )
    s.at_least(2, validation_episodes="give no interval", test_episodes="give no interval")
    require(
        bool(s.step_factors) and all(factor > 0 for factor in s.step_factors),
        f"step_factors={s.step_factors} must be numbers above 0, at least one.",
    )
    for dataset, iterations in zip(s.datasets, s.iterations, strict=True):
        for variant in s.variants:
            training_of(s, dataset, variant, iterations, s.seed)  # refuses what training cannot take


COLOURS = (BLUE, GREY, ORANGE, GREEN, PURPLE, RED, SKY)


def _draw(path: Path, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    """A row for every data set: final accuracies as bars beside the paper's, and how the trainings got there."""
    with picture(path, width=11.5, height=4.4 * len(numbers)) as figure:
        grid = figure.subplots(len(numbers), 2, squeeze=False)
        for (bars, curves), (dataset, rows) in zip(grid, numbers.items(), strict=True):
            _draw_bars(bars, dataset, rows, PRINTED if dataset == "miniimagenet" else {})
            labels = "share of the training", "meta-validation accuracy in per cent"
            titled(curves, f"{dataset}: while learning", *labels)
            for (variant, found), colour in zip(rows.items(), COLOURS, strict=False):
                last = max(point[0] for point in found["curve"]) or 1
                draw_curve(curves, found["curve"], colour, variant, 1 / last)
            legend_below(curves, columns=3)


def _draw_bars(axes: Axes, dataset: str, rows: Mapping[str, Any], printed: Mapping[str, float]) -> None:
    titled(axes, f"{dataset}: meta-test", "accuracy in per cent")
    places = list(range(len(rows)))[::-1]
    longest = max([100 * found["accuracy"] for found in rows.values()] + list(printed.values()))
    for place, (variant, found), colour in zip(places, rows.items(), COLOURS, strict=False):
        value, width = 100 * found["accuracy"], 100 * found["interval"]
        axes.barh(place, value, 0.62, color=colour, xerr=width, ecolor=BLACK, capsize=3)
        # In a column of their own, where no bar and no mark of the paper's reaches.
        axes.text(1.16 * longest, place, f"{value:.1f}", ha="right", va="center", fontsize=9.5)
        if variant in printed:
            dots(axes, printed[variant], place, BLACK, marker="D", zorder=5)
    if printed:
        dots(axes, [], [], BLACK, "the paper's", marker="D")
        legend_below(axes)
    axes.set_yticks(places, list(rows))
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.18 * longest)
