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
from bilevel.experiments._class_names import called, kin
from bilevel.experiments._representation_measures import Separation, distances, extremes, flatten, separation
from bilevel.experiments._representation_picture import Map, Pair, draw_maps, draw_pairs
from bilevel.experiments._representation_tables import NAMES, notes, spread, tables
from bilevel.experiments.base import Result, counter, described, one_thread, require, single_precision
from bilevel.meta import library
from bilevel.meta.hyper_representation import HyperRepresentation
from bilevel.meta.training import episodes, new_learner, open_data
from bilevel.models.batch_norm import MEANING
from bilevel.problem import Task
from bilevel.tasks.episodes import Episodes

PAPER = "Figure 5 (Section 5.2)"

# The maps that are drawn.
HEADINGS = {"learned": "Learned representation", "pixels": "Raw pixels"}
Features = Callable[[Task], Tensor]


@dataclass(frozen=True)
class Settings:
    """The full run.

    Attributes:
        models: zoo:NAME, folders of runs, or saved learners.
        pictures: whether to draw; not every data set's images may be passed on.
    """

    seed: int = 0
    models: tuple[str, ...] = ("zoo:omniglot-5way-1shot",)
    ways: int = 5
    queries: int = 15
    draws: int = 3
    components: int = 32
    map_ways: int = 20
    map_images: int = 19
    perplexity: float = 12.0
    episodes: int = 100
    pictures: bool = True


QUICK: dict[str, Any] = {"draws": 1, "map_ways": 8, "map_images": 10, "perplexity": 8.0, "episodes": 6}


@dataclass(frozen=True)
class Subject:
    """A model with its data, and the features that are compared on them."""

    name: str
    found: library.Trained
    data: ImageDataset
    features: dict[str, Features]

    def stream(self, split: str, ways: int, queries: int, seed: int) -> Episodes:
        """Episodes of a split, of images as they are: a turned character would be a class without a name."""
        wanted = replace(self.found.settings, ways=ways, queries=queries, rotations=False)
        return episodes(wanted, self.data, split, seed)


def run(settings: Settings, out: Path, progress: bool | None = None) -> Result:
    """The pictures and the numbers of every model."""
    _check(settings)
    numbers: dict[str, Any] = {}
    pictures: list[str] = []
    with single_precision(), one_thread():
        subjects = _subjects(settings)
        with counter("representation", len(subjects) * _work(settings), progress) as begin:
            for subject in subjects:

                def report(doing: str, name: str = subject.name) -> None:
                    begin(f"{name}, {doing}")

                pairs = draw_and_compare(settings, subject, settings.draws)
                near = nearness(settings, subject, report)
                apart = separations(settings, subject, report)
                numbers[subject.name] = _numbers(settings, subject, pairs, near, apart)
                if not settings.pictures:
                    continue
                maps = [_map(settings, subject, kind, apart[kind], report) for kind in HEADINGS]
                names = [f"{kind}-{subject.name}.png" for kind in ("pairs", "map")]
                draw_pairs(out / names[0], pairs)
                draw_maps(out / names[1], maps)
                pictures += names
    return Result(
        {"models": numbers},
        _choices(settings, subjects),
        tables(numbers, settings.map_ways, settings.episodes),
        pictures,
        notes(numbers, settings.map_ways, settings.pictures),
        {one.data.name: described(one.data) for one in subjects},
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


def draw_and_compare(settings: Settings, subject: Subject, draws: int) -> list[dict[str, Pair]]:
    """The nearest and the farthest pair of every draw of D and D′, with the components that are shown."""
    streams = _streams(settings, subject)
    found = []
    for number in range(draws):
        seen, unseen = (stream.episode(number) for stream in streams)
        left, right = (subject.features["learned"](task) for task in (seen, unseen))
        titles = [_titles(stream, number) for stream in streams]
        table = distances(left, right)
        order = torch.randperm(left.shape[1], generator=torch.Generator().manual_seed(settings.seed))
        shown = order[: settings.components].sort().values
        found.append(
            {
                which: Pair(
                    draw=number,
                    numbers=(i, j),
                    titles=(titles[0][i], titles[1][j]),
                    images=(_image(seen, i), _image(unseen, j)),
                    components=shown.tolist(),
                    values=(left[i, shown].numpy(), right[j, shown].numpy()),
                    distance=float(table[i, j]),
                    median=float(table.median()),
                )
                for which, (i, j) in extremes(table).items()
            }
        )
    return found


def nearness(settings: Settings, subject: Subject, report: Callable[[str], None]) -> dict[str, dict[str, Any]] | None:
    """How often x′ ∈ D′ is kin to the x ∈ D nearest to it, to the farthest and to any; None where no classes are."""
    titles = [[subject.data.classes[label] for label in subject.data.splits[split]] for split in ("train", "test")]
    possible = any(kin(one, other) for one in titles[0] for other in titles[1])
    streams = _streams(settings, subject)
    shares: dict[str, dict[str, list[float]]] = {kind: {} for kind in subject.features}
    for number in range(settings.episodes):
        report("pairs")
        if not possible:
            continue
        tasks = [stream.episode(number) for stream in streams]
        one, other = (_titles(stream, number) for stream in streams)
        alike = torch.tensor([[float(kin(a, b)) for b in other] for a in one])
        for kind, features in subject.features.items():
            table = distances(*map(features, tasks))
            for which, rows in (("nearest", table.argmin(0)), ("farthest", table.argmax(0))):
                shares[kind].setdefault(which, []).append(float(alike.gather(0, rows[None]).mean()))
            shares[kind].setdefault("any", []).append(float(alike.mean()))
    if not possible:
        return None
    return {kind: {which: spread(values) for which, values in found.items()} for kind, found in shares.items()}


def separations(settings: Settings, subject: Subject, report: Callable[[str], None]) -> dict[str, list[Separation]]:
    """Of unseen classes, episode by episode, for each kind of features."""
    stream = _unseen(settings, subject)
    found: dict[str, list[Separation]] = {kind: [] for kind in subject.features}
    for number in range(settings.episodes):
        report("unseen classes")
        task = stream.episode(number)
        for kind, features in subject.features.items():
            found[kind].append(separation(features(task), task.val[1]))
    return found


def _map(
    settings: Settings, subject: Subject, kind: str, apart: Sequence[Separation], report: Callable[[str], None]
) -> Map:
    """The first of the episodes that were measured."""
    report(f"map of {NAMES[kind]}")
    stream = _unseen(settings, subject)
    task = stream.episode(0)
    titles = _titles(stream, 0)
    return Map(
        title=HEADINGS[kind],
        points=flatten(subject.features[kind](task), settings.perplexity, settings.seed),
        labels=task.val[1].numpy(),
        names=[called(title) for title in titles[:: stream.queries]],
        thumbnails=[_image(task, i) for i in range(0, len(titles), stream.queries)],
        ratio=apart[0].ratio,
        neighbours=apart[0].neighbours,
    )


def _subjects(settings: Settings) -> list[Subject]:
    """Every model and its data, before any work: one that is missing should cost no time."""
    subjects: list[Subject] = []
    for spec in settings.models:
        found = library.find(spec)
        data = open_data(found.settings)
        found.check_data(data)
        plain = found.settings
        if plain.batch_norm == "running":  # an untrained network has no averages yet
            plain = replace(plain, batch_norm="episode")
        features = {"learned": represent(found.learner), "untrained": represent(new_learner(plain, data))}
        subject = Subject(_file_name(spec, subjects), found, data, {**features, "pixels": pixels})
        _streams(settings, subject)
        _unseen(settings, subject)
        subjects.append(subject)
    return subjects


def _file_name(spec: str, others: Sequence[Subject]) -> str:
    """A model's name that any file system takes, different from the others'.

    >>> _file_name("zoo:omniglot-5way-1shot", []), _file_name("runs/my run/", [])
    ('omniglot-5way-1shot', 'my-run')
    """
    bare = Path(spec.removeprefix(library.PREFIX)).resolve().name
    name = re.sub(r"[^\w.-]+", "-", bare).strip("-.") or "model"
    used = [other.name for other in others]
    return next(one for one in (name, *(f"{name}-{i}" for i in range(2, len(used) + 3))) if one not in used)


def _streams(settings: Settings, subject: Subject) -> tuple[Episodes, Episodes]:
    """Where D and D′ come from."""
    return (
        subject.stream("train", settings.ways, settings.queries, settings.seed),
        subject.stream("test", settings.ways, settings.queries, settings.seed),
    )


def _unseen(settings: Settings, subject: Subject) -> Episodes:
    """Larger episodes of unseen classes, of all the images that a small class has."""
    sizes = np.bincount(subject.data.labels, minlength=len(subject.data.classes))
    smallest = int(sizes[list(subject.data.splits["test"])].min()) if subject.data.splits.get("test") else 0
    each = min(settings.map_images, smallest - subject.found.settings.shots)
    return subject.stream("test", settings.map_ways, max(each, 2), settings.seed)


def _titles(stream: Episodes, number: int) -> list[str]:
    """The class of every query image of an episode."""
    rows, _ = stream.sampler.draw(number)
    return [stream.dataset.classes[int(stream.dataset.labels[row])] for row in rows[:, stream.shots :].flatten()]


def _image(task: Task, number: int) -> NDArray[Any]:
    return task.val[0][number].permute(1, 2, 0).numpy()


def _work(s: Settings) -> int:
    return 2 * s.episodes + (len(HEADINGS) if s.pictures else 0)


def _numbers(
    settings: Settings,
    subject: Subject,
    pairs: list[dict[str, Pair]],
    near: dict[str, dict[str, Any]] | None,
    apart: dict[str, list[Separation]],
) -> dict[str, Any]:
    stream = _unseen(settings, subject)
    mode = subject.found.settings.batch_norm
    return {
        "data": subject.data.name,
        "batch_norm": {"mode": mode, "meaning": MEANING[mode]},
        "features": subject.found.learner.features - 1,
        "pairs": [
            {
                which: {
                    "draw": pair.draw,
                    "classes": [called(title) for title in pair.titles],
                    "kin": kin(*pair.titles),
                    "images": list(pair.numbers),
                    "distance": pair.distance,
                    "median": pair.median,
                    "components": pair.components,
                    "values": [part.tolist() for part in pair.values],
                }
                for which, pair in draw.items()
            }
            for draw in pairs
        ],
        "kin": near,
        "separation": {
            kind: {
                "ratio": spread([one.ratio for one in found]),
                "neighbours": spread([one.neighbours for one in found]),
            }
            for kind, found in apart.items()
        },
        "map": {
            "classes": [called(title) for title in _titles(stream, 0)[:: stream.queries]],
            "images": stream.queries,
        },
    }


def _choices(s: Settings, subjects: Sequence[Subject]) -> dict[str, str]:
    modes = sorted({one.found.settings.batch_norm for one in subjects})
    own = (
        " The untrained network has no averages and uses the statistics of the set at hand."
        if "running" in modes
        else ""
    )
    found = {
        "D and D′": f"the query sets of {s.ways}-way episodes with {s.queries} images a class, the first {s.draws} of "
        f"seed {s.seed}: none was picked by eye. Characters are not turned",
        "features": "h(x) as the network gives it, without the constant of the bias and without the factor that bounds "
        "the inner step, which differs from episode to episode",
        "batch norm": "as each model was trained, "
        + "; ".join(f"{mode}: {MEANING[mode]}" for mode in modes)
        + f". So h(x) also depends on the images that x is shown with.{own}",
        "components": f"{s.components} drawn at random once for all pairs of a model, in their order",
        "untrained network": "the same architecture with the random weights of the training's seed",
    }
    if s.pictures:
        found["map"] = f"t-SNE, perplexity {s.perplexity:g}, from principal components; the paper has none"
    return found


def _check(s: Settings) -> None:
    require(bool(s.models), "models= names no model; pass zoo:NAME or the folder of a run.")
    require(s.seed >= 0, f"seed={s.seed} must be at least 0.")
    require(s.ways >= 2, f"ways={s.ways} leaves nothing to tell apart; pass at least 2.")
    require(s.queries >= 1, f"queries={s.queries} leaves D empty; pass at least 1.")
    require(s.draws >= 1, f"draws={s.draws} shows nothing; pass at least 1.")
    require(s.components >= 1, f"components={s.components} shows nothing; pass at least 1.")
    require(s.map_ways >= 2, f"map_ways={s.map_ways} leaves nothing to tell apart; pass at least 2.")
    require(s.map_images >= 2, f"map_images={s.map_images} leaves no distance within a class; pass at least 2.")
    require(s.episodes >= 2, f"episodes={s.episodes} give no interval; pass at least 2.")
    require(
        1 <= s.perplexity < s.map_ways * 2,
        f"perplexity={s.perplexity:g} must be at least 1 and below twice map_ways={s.map_ways}, the fewest images that "
        "a map can have.",
    )
