"""Presets: the settings of the paper's few-shot experiments (Section 5.2 and Appendix D). Does not import torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from bilevel.errors import BilevelError
from bilevel.learners.recipes import Recipe
from bilevel.learners.settings import LEARNER_FIELDS, TrainingSettings

MINIIMAGENET = TrainingSettings(dataset="miniimagenet")


def _all() -> dict[str, TrainingSettings]:
    presets = {}
    for ways, meta_batch in ((5, 32), (20, 16)):
        for shots in (1, 5):
            name = f"omniglot-{ways}way-{shots}shot"
            presets[name] = TrainingSettings(rotations=True, ways=ways, shots=shots, meta_batch=meta_batch)
            # The paper's step size can be above 2/ν, so the default bounds it. The preset "-paper" does not.
            presets[f"{name}-paper"] = replace(presets[name], step_bound=0)
    for shots, meta_batch in ((1, 4), (5, 2)):
        presets[f"miniimagenet-c4l-{shots}shot"] = replace(
            MINIIMAGENET, network="c4l", shots=shots, meta_batch=meta_batch, inner_lr=0.01
        )
        presets[f"miniimagenet-rn-{shots}shot"] = replace(
            MINIIMAGENET, network="rn", shots=shots, meta_batch=2, inner_lr=0.04
        )
    presets["glyphs-5way-1shot"] = TrainingSettings(
        dataset="glyphs", meta_batch=8, iterations=2000, validate_every=200, validation_episodes=200
    )
    return presets


PRESETS = _all()


def _staged(network: str, small: int, full: int, episodes: int) -> Recipe:
    """Pretraining on small images, pretraining on full images, then the bilevel problem.

    Args:
        network: the name of the network.
        small, full, episodes: the number of hyperiterations of each stage.
    """
    # All stages share these, so that running averages and the classifier over all classes can be taken over.
    common = TrainingSettings(
        dataset="miniimagenet",
        network=network,
        last_relu=False,
        normalise=True,
        batch_norm="running",
        augment="flip,crop,colour",
        classifier="cosine",
        inner_lr=1.0,
        step_bound=0.0,
        optimizer="sgd",
        weight_decay=5e-4,
        schedule="cosine",
        validation_episodes=200,
        patience=0,
    )
    pretraining = replace(common, learner="multiclass", images=256, lr=0.1)
    return Recipe(
        {
            "small": replace(pretraining, image_size=42, iterations=small, validate_every=max(1, small // 10)),
            "full": replace(pretraining, lr=0.05, iterations=full, validate_every=max(1, full // 10)),
            "episodes": replace(
                common,
                meta_batch=4,
                most_shots=5,
                global_loss=1.0,
                lr=0.01,
                average=0.99,
                iterations=episodes,
                validate_every=200,
                validation_episodes=600,
            ),
        }
    )


def _short(recipe: Recipe, changes: dict[str, dict[str, Any]]) -> Recipe:
    """For a network whose hyperiterations are expensive: more of them, of fewer images, and bfloat16 in pretraining."""
    stages = {name: replace(settings, **changes[name]) for name, settings in recipe.stages.items()}
    return Recipe(stages).changed({"precision": "bfloat16"})


RECIPES = {
    "miniimagenet-c4l-staged": _staged("c4l", small=6000, full=3000, episodes=3000),
    "miniimagenet-c4l-64-staged": _staged("c4l-64", small=6000, full=3000, episodes=3000),
    "miniimagenet-rn-staged": _short(
        _staged("rn", small=6000, full=500, episodes=60),
        {
            "small": {"images": 128, "warmup": 200, "validate_every": 1000},
            "full": {"images": 128, "lr": 0.02, "validate_every": 250},
            "episodes": {"lr": 0.005, "average": 0.95, "validate_every": 30, "validation_episodes": 200},
        },
    ),
}


def preset(name: str) -> TrainingSettings:
    """The settings of a preset.

    >>> preset("omniglot-20way-5shot").meta_batch
    16
    """
    if name not in PRESETS:
        staged = f"; presets in stages: {', '.join(RECIPES)}" if name not in RECIPES else ""
        raise BilevelError(f"There is no preset {name!r}. The presets are {', '.join(PRESETS)}{staged}.")
    return PRESETS[name]


def for_learner(settings: TrainingSettings, name: str) -> TrainingSettings:
    """The same training with another learner.

    The network and batch norm are kept. Other settings of the learner (inner steps, …) become the defaults of the new
    learner, because those of a preset were chosen for its own.

    >>> for_learner(preset("miniimagenet-c4l-1shot"), "maml").inner_lr
    0.1
    """
    from bilevel import learners

    kind = learners.get(name)
    if issubclass(kind, learners.get(settings.learner)):
        return replace(settings, learner=name, options={})
    defaults = {f.name: f.default for f in fields(TrainingSettings)} | {f.name: f.default for f in fields(kind.Options)}
    kept = {"network", "batch_norm"} & {f.name for f in fields(kind.Options)}
    changed: dict[str, Any] = {key: defaults[key] for key in LEARNER_FIELDS - kept}
    if "batch_norm" in kept and settings.batch_norm not in kind.batch_norm_modes:
        changed["batch_norm"] = kind.batch_norm_modes[0]
    return replace(settings, learner=name, options={}, **changed)
