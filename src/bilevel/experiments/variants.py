"""Seven ways to learn a representation: what the split and the full hypergradient are worth.

The same T = 5 inner steps, and the same number of hyperiterations with the same number of images in each, which take
about the same time: pretraining on all classes (Multiclass, with the paper's wider network), the bilevel problem with
the outer objective on the training sets (Bilevel-train), the hypergradient without the inner dynamics (Approx,
Approx-train), joint descent (Classic-train), and hyper-representation. Beyond the paper: pretraining as people do it
today (multiclass-today: augmented images, SGD, a cosine classifier, normalised features), and several seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bilevel.data import ImageDataset
from bilevel.experiments._trainings import (
    PROBLEMS,
    Judged,
    Trained,
    check_datasets,
    command_of,
    differ,
    judge_with_steps,
    open_all,
    over_seeds,
    train,
)
from bilevel.experiments._variants_picture import draw
from bilevel.experiments.base import Result, Table, described, kept, one_thread, require, single_precision
from bilevel.meta.classic import ClassicTraining
from bilevel.meta.multiclass import MulticlassTraining, PaperMulticlass
from bilevel.meta.settings import Settings as Training
from bilevel.meta.training import FewShotTraining
from bilevel.models.batch_norm import MEANING

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
KINDS: dict[str, Callable[[Training, ImageDataset], FewShotTraining]] = {
    "multiclass": PaperMulticlass,
    "multiclass-today": MulticlassTraining,
    "classic-train": ClassicTraining,
}
# With 64 filters a pass takes 3.3 times as long as with 32; the others get by with the same number of hyperiterations.
WIDE = {"c4l": ("c4l-64", 0.3)}


# The trainings of a variant, one for each seed.
Trainings = list[tuple[Trained, Judged]]


@dataclass(frozen=True)
class Settings:
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
    step_factors: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
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


def run(settings: Settings, out: Path, progress: bool | None = None) -> Result:
    """Train and judge every variant on every data set."""
    _check(settings)
    with single_precision(), one_thread():
        opened = open_all(settings.datasets)
        found: dict[str, dict[str, Trainings]] = {}
        for name, iterations in zip(settings.datasets, settings.iterations, strict=True):
            found[name] = {}
            for variant in settings.variants:
                found[name][variant] = [
                    learn_and_judge(settings, name, variant, iterations, seed, opened[name], kept(out), progress)
                    for seed in range(settings.seed, settings.seed + settings.seeds)
                ]
    numbers = {name: {variant: _numbers(each) for variant, each in rows.items()} for name, rows in found.items()}
    draw(out / "variants.png", numbers, PRINTED)
    tables = [table for name in found for table in (_table(settings, name, found[name]), _order(name, found[name]))]
    return Result(
        numbers,
        _choices(settings),
        tables,
        ("variants.png",),
        _notes(settings, found),
        data={name: described(data) for name, data in opened.items()},
        runs=[
            f"runs/{_folder(name, variant, seed)}"
            for name in found
            for variant in found[name]
            for seed in range(settings.seed, settings.seed + settings.seeds)
        ],
        times={name: {variant: _minutes(each) for variant, each in rows.items()} for name, rows in found.items()},
    )


def training_of(s: Settings, dataset: str, variant: str, iterations: int, seed: int) -> Training:
    """The settings of one variant's training."""
    base = replace(PROBLEMS[dataset], **{"seed": seed, "steps": s.steps, "average": s.average, **CHANGES[variant]})
    if variant == "multiclass-today" and dataset == "miniimagenet":
        base = replace(base, augment="flip,crop,colour")  # a mirrored character may be another one
    if variant == "multiclass" and base.network in WIDE:
        network, share = WIDE[base.network]
        base, iterations = replace(base, network=network), max(1, round(share * iterations))
    every = max(1, iterations // s.looks)
    return replace(
        base,
        iterations=iterations,
        validate_every=every,
        validation_episodes=s.look_episodes,
        patience=0,
        checkpoint_every=max(10, every // 2),
    )


def learn_and_judge(
    s: Settings,
    dataset: str,
    variant: str,
    iterations: int,
    seed: int,
    data: ImageDataset,
    runs: Path,
    progress: bool | None,
) -> tuple[Trained, Judged]:
    """One variant from one seed, trained to its end."""
    training = training_of(s, dataset, variant, iterations, seed)
    kind = KINDS.get(variant, FewShotTraining)
    path = runs / _folder(dataset, variant, seed)
    trained = train(path, training, data, command_of("variants", s), progress, kind)
    sizes = [factor * trained.settings.inner_lr for factor in s.step_factors]
    return trained, judge_with_steps(trained, data, sizes, s.validation_episodes, s.test_episodes)


def _folder(dataset: str, variant: str, seed: int) -> str:
    return f"{dataset}-{variant}" + (f"-seed{seed}" if seed else "")


def _minutes(each: Trainings) -> list[float]:
    return [trained.minutes for trained, _ in each]


def _together(each: Trainings) -> Judged:
    return over_seeds([judged for _, judged in each])


def _numbers(each: Trainings) -> dict[str, Any]:
    seeds = [asdict(judged) for _, judged in each]
    first = each[0][0]
    return {**asdict(_together(each)), "seeds": seeds, "hyperiterations": first.iterations, "curve": first.curve}


def _table(s: Settings, dataset: str, rows: dict[str, Trainings]) -> Table:
    base = PROBLEMS[dataset]
    shown = []
    for variant, each in rows.items():
        trained, judged = each[0][0], _together(each)
        compared = dataset == "miniimagenet" and variant in PRINTED
        printed = f"{PRINTED[variant]:.2f}" if compared else "–"
        gap = f"{100 * judged.accuracy - PRINTED[variant]:+.2f}" if compared else "–"
        pixels = f"{base.image_size}×{base.image_size} pixels"
        why = f"{trained.iterations:,} hyperiterations on {pixels}; the paper does not state its own, on 84×84"
        if not compared:
            why = "not in the paper" if dataset == "miniimagenet" else "the paper has MiniImagenet only"
        shown.append(
            (
                variant,
                printed,
                f"{100 * judged.accuracy:.2f} ± {100 * judged.interval:.2f}",
                ", ".join(f"{100 * one.accuracy:.2f}" for _, one in each),
                gap,
                f"{trained.iterations:,}",
                f"{sum(_minutes(each)) / len(each):.1f}",
                ", ".join(f"{one.inner_lr:g}" for _, one in each),
                why,
            )
        )
    small = f" on {base.image_size}×{base.image_size} pixels" if base.image_size else ""
    return Table(
        f"{dataset} {base.ways}-way {base.shots}-shot, {base.network}{small}: accuracy in per cent on "
        f"{s.test_episodes} meta-test episodes, {s.seeds} training{'s' * (s.seeds > 1)} of each variant",
        ("variant", "paper", "ours", "each seed", "difference", "hyperiterations", "minutes", "step size", "why"),
        shown,
    )


def _order(dataset: str, rows: dict[str, Trainings]) -> Table:
    """The paper's order, neighbour by neighbour, and the two comparisons that it draws its conclusions from."""
    order = [variant for variant in PRINTED if variant in rows]
    pairs = list(pairwise(order))
    for pair in (("hyper-representation", "bilevel-train"), ("hyper-representation", "approx")):
        if pair not in pairs and set(pair) <= set(rows):
            pairs.append(pair)
    shown = []
    for better, worse in pairs:
        gap, width = differ(_together(rows[better]), _together(rows[worse]))
        shown.append(
            (
                f"{better} > {worse}",
                f"{PRINTED[better] - PRINTED[worse]:+.2f}",
                f"{100 * gap:+.2f} ± {100 * width:.2f}",
                verdict(gap, width),
            )
        )
    return Table(f"{dataset}: the order that the paper finds", ("claim", "paper", "ours", "verdict"), shown)


def verdict(gap: float, width: float) -> str:
    """Whether a difference that should be positive is.

    >>> verdict(0.03, 0.01), verdict(0.005, 0.01), verdict(-0.03, 0.01)
    ('confirmed', 'undecided', 'contradicted')
    """
    if abs(gap) <= width:
        return "undecided"
    return "confirmed" if gap > 0 else "contradicted"


def _notes(s: Settings, found: dict[str, dict[str, Trainings]]) -> tuple[str, ...]:
    return (
        *(
            _in_words(name, {variant: _together(each) for variant, each in rows.items()})
            for name, rows in found.items()
        ),
        f"Every variant sees the same number of images in a hyperiteration and is judged on the same episodes, after "
        f"T = {s.steps} steps from zero, with the step size that was best on meta-validation. Support and query sets "
        f"are disjoint. Batch norm: episode, {MEANING['episode']}.",
        "Intervals are over episodes and over the seeds, whose means count as a sample of their own."
        if s.seeds > 1
        else "Intervals are over episodes; they do not know how much another seed would change.",
    )


def _in_words(dataset: str, rows: dict[str, Judged]) -> str:
    """The paper's two conclusions, held against our numbers."""
    ranked = sorted(rows, key=lambda variant: -rows[variant].accuracy)
    text = f"On {dataset} our order is {' > '.join(ranked)}."
    claims = {
        "splitting episodes into training and validation sets matters": ("hyper-representation", "bilevel-train"),
        "the full hypergradient matters": ("hyper-representation", "approx"),
    }
    for claim, (better, worse) in claims.items():
        if {better, worse} <= set(rows):
            gap, width = differ(rows[better], rows[worse])
            text += (
                f" The paper's conclusion that {claim} is {verdict(gap, width)}: {better} minus {worse} is "
                f"{100 * gap:+.2f} ± {100 * width:.2f} points."
            )
    return text


def _choices(s: Settings) -> dict[str, str]:
    return {
        "outer optimiser": (
            f"Adam, step 1e-3, the same for all; scores are those of λ's moving average, factor {s.average:g}"
        ),
        "inner step size": "in training the problem's (see the settings of the runs), never above 1/ν",
        "Classic-train": (
            f"w^j by gradient descent and λ by Adam, at once; new episodes and w^j = 0 every {s.steps} such steps, "
            "each of which counts as a hyperiteration"
        ),
        "Multiclass": (
            "one softmax over all classes of meta-training (on Omniglot with their quarter turns), its logits are the "
            "features; C4L with 64 filters, as in the paper, and as many hyperiterations as take the same minutes"
        ),
        "multiclass-today": (
            "the network of the other variants, as many images as they see, augmented (not on Omniglot), SGD with "
            "Nesterov's momentum, a rate that falls with a cosine, a cosine classifier, features centred and of one "
            "length; judged like the others, on features instead of logits"
        ),
        "-train variants": "16 examples a class, no queries",
        "length": "hyperiterations as in the table; the paper does not say how long its variants were trained",
    }


def _check(s: Settings) -> None:
    check_datasets(s.datasets, iterations=s.iterations)
    require(s.seeds >= 1, f"seeds={s.seeds} leaves nothing to train; pass at least 1.")
    unknown = [variant for variant in s.variants if variant not in CHANGES]
    require(
        bool(s.variants) and not unknown,
        f"variants={','.join(s.variants)} must be some of {', '.join(CHANGES)}, separated by commas.",
    )
    require(
        1 <= s.looks <= min(s.iterations),
        f"looks={s.looks} must be from 1 to the number of hyperiterations ({min(s.iterations)}).",
    )
    require(
        min(s.validation_episodes, s.test_episodes) >= 2,
        f"validation_episodes={s.validation_episodes} and test_episodes={s.test_episodes} must both be at least 2.",
    )
    require(
        bool(s.step_factors) and all(factor > 0 for factor in s.step_factors),
        f"step_factors={s.step_factors} must be numbers above 0, at least one.",
    )
    for dataset, iterations in zip(s.datasets, s.iterations, strict=True):
        for variant in s.variants:
            training_of(s, dataset, variant, iterations, s.seed)  # refuses what training cannot take
