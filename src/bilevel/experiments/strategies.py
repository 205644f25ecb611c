"""Every few-shot strategy on the same episodes, with the same network and the same number of training images.

Table 3 of the paper compares numbers that other authors report, each with a network, a training and a protocol of its
own. Here every learner of `bilevel list learners` is trained once for each data set, on as many images as the others
(`images`, counted as they are drawn), with episodes of one to five shots, and evaluated on the same meta-test episodes.
Every training has a folder of its own, so the same command resumes a run that was stopped, and several commands with
other `problems` or `learners` can fill one folder. With `train=false` nothing is trained: table, picture and notes are
written from the finished trainings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bilevel import learners
from bilevel.data import ImageDataset
from bilevel.errors import BilevelError, DivergenceError
from bilevel.experiments._peak_memory import peak_memory
from bilevel.experiments._strategies_notes import (
    BASELINE,
    UNFINISHED,
    StrategyScore,
    by_strategy,
    claim_notes,
    defects,
    published,
    ranked,
)
from bilevel.experiments._strategies_picture import draw
from bilevel.experiments._trainings import command_of, problem_title, stored, train, with_schedule
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
from bilevel.files import write_json
from bilevel.learners.evaluation import evaluate
from bilevel.learners.presets import for_learner, preset
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import episodes, open_data
from bilevel.learners.training import FewShotTraining
from bilevel.thread_pool import one_thread
from bilevel.training.log import read_metrics

PAPER = "Table 3 (Section 5.2), every strategy trained here"

# The problems of Table 3, in the order of its columns, and a small one that needs no data.
TABLE_3 = {
    **{
        f"omniglot-{ways}way-{shots}shot": preset(f"omniglot-{ways}way-{shots}shot")
        for ways in (5, 20)
        for shots in (1, 5)
    },
    **{
        f"miniimagenet-5way-{shots}shot": replace(preset(f"miniimagenet-c4l-{shots}shot"), image_size=42)
        for shots in (1, 5)
    },
}
PROBLEMS = {**TABLE_3, "glyphs-5way-1shot": preset("glyphs-5way-1shot")}
# What is trained for the problems of a data set: the one with the most classes and the fewest shots, with shots drawn
# anew for every hyperiteration. Few queries and few episodes in a meta-batch make a budget of images many
# hyperiterations.
TRAININGS = {
    "omniglot": replace(PROBLEMS["omniglot-20way-1shot"], most_shots=5, queries=5, meta_batch=2),
    "miniimagenet": replace(PROBLEMS["miniimagenet-5way-1shot"], most_shots=5, queries=5, meta_batch=4),
    "glyphs": replace(PROBLEMS["glyphs-5way-1shot"], meta_batch=2),
}


@dataclass(frozen=True)
class StrategiesSettings(ExperimentSettings):
    """The full run. `images` is the training budget of every learner; without names in `learners` all are trained.

    `photographs` is the budget on MiniImagenet, where an image takes several times as long. `look_episodes` is for 5
    classes. Episodes of more classes have more queries, and as many fewer are needed.
    """

    seed: int = 0
    problems: tuple[str, ...] = tuple(TABLE_3)
    learners: tuple[str, ...] = ()
    images: int = 500_000
    photographs: int = 160_000
    average: float = 0.99
    looks: int = 10
    look_episodes: int = 100
    test_episodes: int = 600
    train: bool = True


QUICK: dict[str, Any] = {
    "problems": ("glyphs-5way-1shot",),
    "images": 960,
    "looks": 2,
    "look_episodes": 10,
    "test_episodes": 30,
}


Scores = dict[str, list[StrategyScore]]


def run(settings: StrategiesSettings, out: Path, progress: bool | None = None) -> ExperimentResult:
    """Train and evaluate every learner on every problem."""
    s, chosen = settings, _check(settings)
    found: Scores = {problem: [] for problem in s.problems}
    with single_precision(), one_thread():
        names = list(dict.fromkeys(PROBLEMS[problem].dataset for problem in s.problems))
        opened = {data: open_data(replace(TRAININGS[data], seed=s.seed)) for data in names}
        of_data = {data: [one for one in s.problems if PROBLEMS[one].dataset == data] for data in names}
        # A learner at a time; all refusals before any training.
        jobs = [(problem, name, opened[data]) for data in names for name in chosen for problem in of_data[data]]
        planned = {(problem, name): _planned(s, problem, name, data) for problem, name, data in jobs}
        for problem, name, data in jobs:
            found[problem].append(_score(s, problem, name, planned[problem, name], data, runs_folder(out), progress))
    scored = {problem: [row for row in rows if not row.failure] for problem, rows in found.items()}
    scored = {problem: rows for problem, rows in scored.items() if rows}
    require(bool(scored), f"No training is finished in {runs_folder(out)}; leave train=false out to begin.")
    drawn = dict.fromkeys(_validated(list(scored), PROBLEMS[problem].dataset) for problem in scored)
    draw(out / "strategies.png", {problem: [asdict(row) for row in scored[problem]] for problem in drawn})
    return ExperimentResult(
        {problem: {row.learner: _numbers(row) for row in rows} for problem, rows in found.items()},
        _choices(s),
        [*([_overview(found)] if len(found) > 1 else []), *(_table(s, problem, found[problem]) for problem in found)],
        ("strategies.png",),
        tuple(_notes(s, found)),
        data={name: described(data) for name, data in opened.items()},
        runs=list(dict.fromkeys(f"runs/{_folder(plan)}" for plan in planned.values() if not isinstance(plan, str))),
        times={problem: {row.learner: _times(row) for row in rows} for problem, rows in scored.items()},
    )


# ------------------------------------------------------------------------------------------------- trainings


def training_of(s: StrategiesSettings, name: str, data: ImageDataset, ways: int = 0) -> TrainingSettings:
    """The training of a learner: its own defaults, the data's network, and as many images as all learners get.

    Args:
        ways: other than those of all learners, if not 0.
    """
    kind, shared = learners.get(name), TRAININGS[data.name]
    training = for_learner(replace(shared, seed=s.seed, average=s.average, ways=ways or shared.ways), name)
    budget = s.photographs if data.name == "miniimagenet" else s.images
    iterations = max(1, round(budget / training.images_in_iteration)) if kind.trains else 0
    return with_schedule(training, iterations, s.looks, max(2, s.look_episodes * 5 // max(5, training.ways)))


def _validated(problems: Sequence[str], data: str) -> str:
    """The problem whose episodes a training of this data set is validated on, or else its first."""
    of_data = [problem for problem in problems if PROBLEMS[problem].dataset == data]
    shape = TRAININGS[data].ways, TRAININGS[data].shots
    return next((one for one in of_data if (PROBLEMS[one].ways, PROBLEMS[one].shots) == shape), of_data[0])


def _planned(s: StrategiesSettings, problem: str, name: str, data: ImageDataset) -> TrainingSettings | str:
    """The settings of a training, or why this learner cannot do it.

    It is the training that all problems of the data share, or, for a learner that is built for a number of classes, one
    with as many classes as the problem.
    """
    ways, shots = PROBLEMS[problem].ways, PROBLEMS[problem].shots
    try:
        training = training_of(s, name, data)
        try:
            FewShotTraining(training, data).learner.check_episode(ways, shots)
        except BilevelError:
            training = training_of(s, name, data, ways)
            FewShotTraining(training, data).learner.check_episode(ways, shots)
    except BilevelError as error:
        return f"refuses the problem: {error}"
    return training


def _score(
    s: StrategiesSettings,
    problem: str,
    name: str,
    training: TrainingSettings | str,
    data: ImageDataset,
    runs: Path,
    progress: bool | None,
) -> StrategyScore:
    kind = learners.get(name)
    nothing = StrategyScore(name, kind.strategy, kind.trains)
    if isinstance(training, str):
        return replace(nothing, failure=training)
    path, per_iteration = runs / _folder(training), training.images_in_iteration
    of = {"episodes": s.test_episodes, "settings": json.loads(json.dumps(training.plain())), "data": data.fingerprint}
    file = path / f"meta_test-{problem}.json"
    evaluated = stored(file, of)
    if evaluated is None and not s.train:
        return replace(nothing, failure=UNFINISHED)
    if evaluated is None:
        try:
            trained = train(path, training, data, command_of("strategies", s), progress)
        except DivergenceError as error:
            return replace(nothing, failure=f"diverged: {error}")
        evaluated = {
            "images": trained.iterations * per_iteration,
            **_evaluated(s, trained.learner, problem, training, data),
        }
        write_json(file, {"of": of, "found": evaluated})
    curve = tuple(_curve(path, per_iteration))
    return replace(nothing, curve=curve, seconds=curve[-1][1], **evaluated)


def _curve(path: Path, per_iteration: int) -> Iterator[tuple[int, float, float, float]]:
    """Seconds are those of hyperiterations alone, in processor time, which other work on the machine leaves alone."""
    at, seconds, lines = [0], [0.0], read_metrics(path)
    for line in lines:
        if "processor_seconds" in line:
            seconds.append(seconds[-1] + (int(line["iteration"]) - at[-1]) * line["processor_seconds"])
            at.append(int(line["iteration"]))
    for line in lines:
        if "score" in line:
            iteration = int(line["iteration"])
            yield iteration * per_iteration, float(np.interp(iteration, at, seconds)), line["score"], line["interval"]


def _evaluated(
    s: StrategiesSettings, learner: Any, problem: str, training: TrainingSettings, data: ImageDataset
) -> dict[str, Any]:
    """Accuracy on meta-test, with the costs."""
    test = episodes(replace(PROBLEMS[problem], seed=s.seed), data, "test")
    score = evaluate(learner, test, s.test_episodes, learner.steps)
    one = test.batch(range(1))
    adapt = partial(_adapt, learner, one.train[0][0], one.train[1][0], one.val[0][0])
    memory = None
    if learner.trains:
        stream = type(learner).stream(training, data)
        group = stream.draw(stream.groups(1, learner.group_size(training.meta_batch))[0])
        memory = peak_memory(lambda: learner.hypergradient(group))
    return {
        "accuracy": score.means[-1],
        "interval": score.intervals[-1],
        "adapting": min(adapt() for _ in range(5)),
        "memory": memory,
    }


def _adapt(learner: Any, images: Any, labels: Any, queries: Any) -> float:
    began = time.process_time()
    learner.adapt(images, labels).predict(queries)
    return time.process_time() - began


def _folder(training: TrainingSettings) -> str:
    own_ways = f"-{training.ways}way" * (training.ways != TRAININGS[training.dataset].ways)
    return f"{training.dataset}-{training.learner}{own_ways}" + f"-seed{training.seed}" * (training.seed > 0)


def _numbers(row: StrategyScore) -> dict[str, Any]:
    if row.failure:
        return {"strategy": row.strategy, "failure": row.failure}
    curve = [(images, score, interval) for images, _, score, interval in row.curve]
    facts = {"strategy": row.strategy, "images": row.images, "accuracy": row.accuracy, "interval": row.interval}
    return {**facts, "curve": curve}


def _times(row: StrategyScore) -> dict[str, Any]:
    seconds = [point[1] for point in row.curve]
    return {"training": row.seconds, "adapting": row.adapting, "memory": row.memory, "curve": seconds}


# ------------------------------------------------------------------------------------------------- tables and notes


def _table(s: StrategiesSettings, problem: str, rows: list[StrategyScore]) -> TextTable:
    columns = ("strategy", "learner", "published", "ours", "difference", "images", "training, s", "adapting, ms")
    shown = []
    for row in ranked(rows):
        text, source = published(row.learner, problem)
        if row.failure:
            shown.append((row.strategy, row.learner, text, "–", "–", *["–"] * 4, row.failure))
            continue
        gap = "–" if text == "–" else f"{100 * row.accuracy - float(text.split()[0]):+.2f}"
        memory = "–" if row.memory is None else f"{row.memory / 1e6:.0f}"
        costs = f"{row.images:,}", f"{row.seconds:.0f}", f"{1000 * row.adapting:.1f}", memory
        ours = percent(row.accuracy, row.interval)
        shown.append((row.strategy, row.learner, text, ours, gap, *costs, source))
    title = (
        f"{problem_title(PROBLEMS[problem])}: accuracy in per cent on {s.test_episodes} meta-test episodes, the "
        "same for all, support and query sets disjoint"
    )
    return TextTable(title, (*columns, "memory, MB", "published in, or why not"), shown, ("published in, or why not",))


def _overview(found: Scores) -> TextTable:
    """Table 3 with our numbers: a row for each learner, a column for each problem."""
    cells = {
        (row.learner, problem): "–" if row.failure else percent(row.accuracy, row.interval)
        for problem, rows in found.items()
        for row in rows
    }
    names = [row.learner for row in ranked(next(iter(found.values())))]
    rows = [(name, *(cells[name, problem] for problem in found)) for name in names]
    return TextTable("All strategies: accuracy in per cent, ours", ("learner", *found), rows)


def _notes(s: StrategiesSettings, found: Scores) -> Iterator[str]:
    waiting = sum(row.failure == UNFINISHED for rows in found.values() for row in rows)
    if waiting:
        yield f"{waiting} of {sum(map(len, found.values()))} trainings are not finished; the rest is compared."
    for problem, rows in found.items():
        scored = [row for row in rows if not row.failure]
        if scored:
            yield from claim_notes(problem, scored)
            yield by_strategy(problem, scored)
        yield from defects(problem, rows)
    yield (
        "Seconds of training are those of hyperiterations, without validations; of adapting, those of learning from "
        "one support set and classifying its queries, the least of five; both in processor time. Memory is the peak of "
        "the resident memory while a group of episodes is differentiated, above what was resident before. All are on "
        "one thread."
    )
    yield (
        "Published numbers are from other networks, budgets and protocols: many times the images of this run, queries "
        "that share batch norm statistics or do not, 84×84 pixels on MiniImagenet. They are no measure of an "
        "implementation here before the budgets are alike."
    )


def _choices(s: StrategiesSettings) -> dict[str, str]:
    return {
        "budget": f"{s.images:,} training images for each learner, {s.photographs:,} on MiniImagenet, counted as they "
        "are drawn: an image that passes through the network in every inner step counts once",
        "training": "one for each data set and learner, evaluated on all problems of the data set: 20-way episodes on "
        "Omniglot, 5-way on MiniImagenet, 1 to 5 shots drawn anew for every hyperiteration, 5 queries a class. A "
        "learner that is built for a number of classes is trained for each",
        "outer optimiser": "Adam, step 1e-3, and the same meta-batch for all; scores are those of λ's moving average, "
        f"factor {s.average:g}, with the weights of the best of about {s.looks} validations",
        "settings of a learner": "its defaults, as `bilevel train --learner NAME` has them; T is that of training",
        "networks": "omniglot-net for characters; C4L with 32 filters on 42×42 pixels for MiniImagenet, where the "
        "literature has 84×84 and often 64 filters",
        "competitive": "the paper's word; here: the best other learner is no further ahead than the best other row of "
        "Table 3, as far as the intervals can tell",
    }


def _check(s: StrategiesSettings) -> list[str]:
    """The learners to train; the baseline is always among them."""
    require(
        bool(s.problems) and all(problem in PROBLEMS for problem in s.problems),
        f"problems={','.join(s.problems)} must be some of {', '.join(PROBLEMS)}, separated by commas.",
    )
    require(0 <= s.average < 1, f"average={s.average} must be at least 0 and below 1.")
    nothing = "leave nothing to learn from"
    s.at_least(1, images=nothing, photographs=nothing, looks="leaves no validation")
    s.at_least(2, look_episodes="give no interval", test_episodes="give no interval")
    names = list(s.learners or learners.names())
    for name in names:
        require(name in learners.names(), f"learners={','.join(s.learners)}: {learners.unknown(name)}")
    return list(dict.fromkeys([*names, BASELINE]))
