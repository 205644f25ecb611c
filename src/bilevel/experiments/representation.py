"""What a learned representation finds alike: nearest and farthest pairs of images, and a map of unseen classes.

A data set D is drawn from meta-training classes and D′ from meta-test classes. Of all x ∈ D and x′ ∈ D′, the pair with
the smallest ‖h(x) − h(x′)‖ and the one with the largest are shown with some components of their features. What the
pictures suggest is then measured on many episodes, for h, for the same network before learning, and for raw pixels: how
far apart unseen classes are compared with how wide they are, and how often the nearest image is of the same class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bilevel.data import ImageDataset
from bilevel.experiments._class_names import readable, related
from bilevel.experiments._representation_picture import ClassMap, ImagePair, draw_maps, draw_pairs
from bilevel.experiments._representation_tables import (
    NAMES,
    Separation,
    distances,
    extremes,
    flatten,
    notes,
    separation,
    spread,
    tables,
)
from bilevel.experiments.base import ExperimentResult, ExperimentSettings, described, require, single_precision
from bilevel.learners import ZOO_PREFIX, library
from bilevel.learners.catalogue.hyper_representation import HyperRepresentation
from bilevel.learners.streams import episodes, open_data
from bilevel.learners.training import new_learner
from bilevel.models.batch_norm import MEANING
from bilevel.problem import Task
from bilevel.progress import counter
from bilevel.tasks.episodes import Episodes
from bilevel.thread_pool import one_thread

PAPER = "Figure 5 (Section 5.2)"

# The maps that are drawn.
HEADINGS = {"learned": "Learned representation", "pixels": "Raw pixels"}
Features = Callable[[Task], Tensor]
Begin = Callable[[str], None]  # takes the name of the current work


@dataclass(frozen=True)
class RepresentationSettings(ExperimentSettings):
    """The full run.

    Attributes:
        models: zoo:NAME, folders of runs, or saved learners.
        pictures: whether to draw; not every data set's images may be passed on.
    """

    seed: int = 0
    models: tuple[str, ...] = ("zoo:omniglot-5way-1shot", "zoo:miniimagenet-c4l-staged")
    ways: int = 5
    queries: int = 15
    draws: int = 3
    components: int = 32
    map_ways: int = 20
    map_images: int = 19
    perplexity: float = 12.0
    episodes: int = 100
    pictures: bool = True


QUICK: dict[str, Any] = {
    "models": ("zoo:omniglot-5way-1shot",),
    "draws": 1,
    "map_ways": 8,
    "map_images": 10,
    "perplexity": 8.0,
    "episodes": 6,
}


@dataclass(frozen=True)
class RepresentationModel:
    """A model with its data, and the features that are compared on them."""

    name: str
    found: library.TrainedLearner
    data: ImageDataset
    features: dict[str, Features]

    def stream(self, split: str, ways: int, queries: int, seed: int) -> Episodes:
        """Episodes of a split, without rotations, because rotated characters have no names."""
        wanted = replace(self.found.settings, ways=ways, queries=queries, rotations=False)
        return episodes(wanted, self.data, split, seed)


def run(settings: RepresentationSettings, out: Path, progress: bool | None = None) -> ExperimentResult:
    """The pictures and the numbers of every model."""
    s = settings
    _check(s)
    numbers: dict[str, Any] = {}
    pictures: list[str] = []
    with single_precision(), one_thread():
        models = _models(s)
        with counter("representation", len(models) * _work(s), progress) as begin:
            for model in models:

                def report(doing: str, name: str = model.name) -> None:
                    begin(f"{name}, {doing}")

                pairs = draw_and_compare(s, model, s.draws)
                near = nearness(s, model, report)
                apart = separations(s, model, report)
                numbers[model.name] = _numbers(s, model, pairs, near, apart)
                if not s.pictures:
                    continue
                maps = [_map(s, model, kind, apart[kind], report) for kind in HEADINGS]
                names = [f"{kind}-{model.name}.png" for kind in ("pairs", "map")]
                draw_pairs(out / names[0], pairs)
                draw_maps(out / names[1], maps)
                pictures += names
    return ExperimentResult(
        {"models": numbers},
        _choices(s, models),
        tables(numbers, s.map_ways, s.episodes),
        pictures,
        notes(numbers, s.map_ways, s.pictures),
        {one.data.name: described(one.data) for one in models},
    )


def represent(learner: HyperRepresentation) -> Features:
    """h of an episode's query set, normalised as the learner does it, without the constant of the bias."""

    def features(task: Task) -> Tensor:
        (support, _), (queries, _) = task.train, task.val
        with torch.no_grad():
            return learner.represent_sets(learner.lam, support, queries, training=False)[1][:, :-1].double()

    return features


def pixels(task: Task) -> Tensor:
    """The query set's images themselves."""
    return task.val[0].flatten(1).double()


def draw_and_compare(s: RepresentationSettings, model: RepresentationModel, draws: int) -> list[dict[str, ImagePair]]:
    """The nearest and the farthest pair of every draw of D and D′, with the components that are shown."""
    streams = _streams(s, model)
    found = []
    for number in range(draws):
        seen, unseen = (stream.episode(number) for stream in streams)
        left, right = (model.features["learned"](task) for task in (seen, unseen))
        titles = [_titles(stream, number) for stream in streams]
        table = distances(left, right)
        order = torch.randperm(left.shape[1], generator=torch.Generator().manual_seed(s.seed))
        shown = order[: s.components].sort().values
        median, components = float(table.median()), shown.tolist()
        pairs = {}
        for which, (i, j) in extremes(table).items():
            names, images = (titles[0][i], titles[1][j]), (_image(seen, i), _image(unseen, j))
            values = left[i, shown].numpy(), right[j, shown].numpy()
            distance = float(table[i, j])
            pairs[which] = ImagePair(number, (i, j), names, images, components, values, distance, median)
        found.append(pairs)
    return found


def nearness(s: RepresentationSettings, model: RepresentationModel, report: Begin) -> dict[str, dict[str, Any]] | None:
    """How often x′ ∈ D′ is related to its nearest x ∈ D, its farthest and any; None if no classes are related."""
    titles = [[model.data.classes[label] for label in model.data.splits[split]] for split in ("train", "test")]
    possible = any(related(one, other) for one in titles[0] for other in titles[1])
    streams = _streams(s, model)
    shares: dict[str, dict[str, list[float]]] = {kind: {} for kind in model.features}
    for number in range(s.episodes):
        report("pairs")
        if not possible:
            continue
        tasks = [stream.episode(number) for stream in streams]
        one, other = (_titles(stream, number) for stream in streams)
        kinship = torch.tensor([[float(related(a, b)) for b in other] for a in one])
        for kind, features in model.features.items():
            table = distances(*map(features, tasks))
            for which, rows in (("nearest", table.argmin(0)), ("farthest", table.argmax(0))):
                shares[kind].setdefault(which, []).append(float(kinship.gather(0, rows[None]).mean()))
            shares[kind].setdefault("any", []).append(float(kinship.mean()))
    if not possible:
        return None
    return {kind: {which: spread(values) for which, values in found.items()} for kind, found in shares.items()}


def separations(s: RepresentationSettings, model: RepresentationModel, report: Begin) -> dict[str, list[Separation]]:
    """The distances of unseen classes in every episode, for each kind of features."""
    stream = _unseen(s, model)
    found: dict[str, list[Separation]] = {kind: [] for kind in model.features}
    for number in range(s.episodes):
        report("unseen classes")
        task = stream.episode(number)
        for kind, features in model.features.items():
            found[kind].append(separation(features(task), task.val[1]))
    return found


def _map(
    s: RepresentationSettings, model: RepresentationModel, kind: str, apart: Sequence[Separation], report: Begin
) -> ClassMap:
    """The first of the episodes that were measured."""
    report(f"map of {NAMES[kind]}")
    stream = _unseen(s, model)
    task = stream.episode(0)
    titles = _titles(stream, 0)
    return ClassMap(
        title=HEADINGS[kind],
        points=flatten(model.features[kind](task), s.perplexity, s.seed),
        labels=task.val[1].numpy(),
        names=[readable(title) for title in titles[:: stream.queries]],
        thumbnails=[_image(task, i) for i in range(0, len(titles), stream.queries)],
        ratio=apart[0].ratio,
        neighbours=apart[0].neighbours,
    )


def _models(s: RepresentationSettings) -> list[RepresentationModel]:
    """The models and their data. They are opened before any work, so that a missing one is an error at once."""
    models: list[RepresentationModel] = []
    for spec in s.models:
        found = library.find(spec)
        data = open_data(found.settings)
        found.check_data(data)
        plain = found.settings
        if plain.batch_norm == "running":  # an untrained network has no averages yet
            plain = replace(plain, batch_norm="episode")
        features = {"learned": represent(found.learner), "untrained": represent(new_learner(plain, data))}
        model = RepresentationModel(_file_name(spec, models), found, data, {**features, "pixels": pixels})
        _streams(s, model)
        _unseen(s, model)
        models.append(model)
    return models


def _file_name(spec: str, others: Sequence[RepresentationModel]) -> str:
    """A model's name that any file system takes, different from the others'.

    >>> _file_name("zoo:omniglot-5way-1shot", []), _file_name("runs/my run/", [])
    ('omniglot-5way-1shot', 'my-run')
    """
    bare = Path(spec.removeprefix(ZOO_PREFIX)).resolve().name
    name = re.sub(r"[^\w.-]+", "-", bare).strip("-.") or "model"
    used = [other.name for other in others]
    return next(one for one in (name, *(f"{name}-{i}" for i in range(2, len(used) + 3))) if one not in used)


def _streams(s: RepresentationSettings, model: RepresentationModel) -> tuple[Episodes, Episodes]:
    """The episodes that D and D′ are drawn from."""
    train, test = (model.stream(split, s.ways, s.queries, s.seed) for split in ("train", "test"))
    return train, test


def _unseen(s: RepresentationSettings, model: RepresentationModel) -> Episodes:
    """Larger episodes of unseen classes, of all the images that a small class has."""
    sizes = np.bincount(model.data.labels, minlength=len(model.data.classes))
    smallest = int(sizes[list(model.data.splits["test"])].min()) if model.data.splits.get("test") else 0
    each = min(s.map_images, smallest - model.found.settings.shots)
    return model.stream("test", s.map_ways, max(each, 2), s.seed)


def _titles(stream: Episodes, number: int) -> list[str]:
    """The class of every query image of an episode."""
    rows, _ = stream.sampler.draw(number)
    return [stream.dataset.classes[int(stream.dataset.labels[row])] for row in rows[:, stream.shots :].flatten()]


def _image(task: Task, number: int) -> NDArray[Any]:
    return task.val[0][number].permute(1, 2, 0).numpy()


def _work(s: RepresentationSettings) -> int:
    return 2 * s.episodes + (len(HEADINGS) if s.pictures else 0)


def _numbers(
    s: RepresentationSettings,
    model: RepresentationModel,
    pairs: list[dict[str, ImagePair]],
    near: dict[str, dict[str, Any]] | None,
    apart: dict[str, list[Separation]],
) -> dict[str, Any]:
    stream = _unseen(s, model)
    mode = model.found.settings.batch_norm
    return {
        "data": model.data.name,
        "batch_norm": {"mode": mode, "meaning": MEANING[mode]},
        "features": model.found.learner.features - 1,
        "pairs": [{which: _pair(pair) for which, pair in draw.items()} for draw in pairs],
        "kin": near,
        "separation": {
            kind: {name: spread([getattr(one, name) for one in found]) for name in ("ratio", "neighbours")}
            for kind, found in apart.items()
        },
        "map": {"classes": list(map(readable, _titles(stream, 0)[:: stream.queries])), "images": stream.queries},
    }


def _pair(pair: ImagePair) -> dict[str, Any]:
    return {
        "draw": pair.draw,
        "classes": [readable(title) for title in pair.titles],
        "kin": related(*pair.titles),
        "images": list(pair.numbers),
        "distance": pair.distance,
        "median": pair.median,
        "components": pair.components,
        "values": [part.tolist() for part in pair.values],
    }


def _choices(s: RepresentationSettings, models: Sequence[RepresentationModel]) -> dict[str, str]:
    modes = sorted({one.found.settings.batch_norm for one in models})
    own = " The untrained network has no averages and uses the statistics of the set at hand." * ("running" in modes)
    found = {
        "D and D′": f"the query sets of {s.ways}-way episodes with {s.queries} images a class, the first {s.draws} of "
        f"seed {s.seed}: none was picked by eye. Characters are not turned",
        "features": "h(x) as the network gives it, without the constant of the bias and without the factor that bounds "
        "the inner step, which differs from episode to episode",
        "batch norm": f"as each model was trained, {'; '.join(f'{mode}: {MEANING[mode]}' for mode in modes)}. So h(x) "
        f"also depends on the images that x is shown with.{own}",
        "components": f"{s.components} drawn at random once for all pairs of a model, in their order",
        "untrained network": "the same architecture with the random weights of the training's seed",
    }
    if s.pictures:
        found["map"] = f"t-SNE, perplexity {s.perplexity:g}, from principal components; the paper has none"
    return found


def _check(s: RepresentationSettings) -> None:
    require(bool(s.models), "models= names no model; pass zoo:NAME or the folder of a run.")
    s.at_least(0, seed="is no seed")
    s.at_least(1, queries="leaves D empty", draws="shows nothing", components="shows nothing")
    s.at_least(2, ways="leaves nothing to tell apart", map_ways="leaves nothing to tell apart")
    s.at_least(2, map_images="leaves no distance within a class", episodes="give no interval")
    require(
        1 <= s.perplexity < s.map_ways * 2,
        f"perplexity={s.perplexity:g} must be at least 1 and below twice map_ways={s.map_ways}, the fewest images that "
        "a map can have.",
    )
