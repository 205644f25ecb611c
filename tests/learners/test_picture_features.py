"""Evaluations that compute the features of a picture once."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from bilevel import learners
from bilevel.data import ImageDataset
from bilevel.distributed import World
from bilevel.learners import picture_features
from bilevel.learners.calibration import calibrate
from bilevel.learners.evaluation import evaluate
from bilevel.tasks.augmentation import ImageAugmentation
from bilevel.tasks.episodes import Episodes
from bilevel.training.stopping import Interrupted

COUNT = 30


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def data():
    """Ten classes that are hard to tell apart: much noise on a faint pattern."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 6)
    patterns = rng.integers(-40, 40, (10, 16, 16, 1))
    images = np.clip(128 + patterns[labels] + rng.integers(-120, 120, (len(labels), 16, 16, 1)), 0, 255)
    splits = {"train": range(4), "val": range(4, 9), "test": range(9, 10)}
    return ImageDataset("noise", images.astype(np.uint8), labels, tuple(map(str, range(10))), splits)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, stride=2), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()
    )


def episodes(data, **more):
    return Episodes(data, **{"split": "val", "ways": 3, "shots": 1, "queries": 4, "seed": 5, **more})


def passed(learner):
    """The number of pictures that pass through the network from now on, as a function."""
    counts = []
    learner.module[0].register_forward_pre_hook(lambda module, inputs: counts.append(len(inputs[0])))
    return lambda: sum(counts)


def build(name, module=None, **options):
    torch.manual_seed(1)
    return learners.get(name)(module or network(), (1, 16, 16), **{"batch_norm": "running", **options})


def score(learner, drawn, **more):
    return evaluate(learner, drawn, COUNT, 3, **more).per_episode


@pytest.fixture
def one_by_one(monkeypatch):
    """Evaluate episode by episode, from the pictures."""
    return lambda: monkeypatch.setattr("bilevel.learners.evaluation.with_features", lambda *given, **more: None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hyper-representation", {"inner_lr": 0.5}),
        ("hyper-representation", {"normalise": True, "mirror": True, "step_bound": 1.0}),
        ("multiclass", {"inner_lr": 0.5}),
        ("ridge-head", {"normalise": True}),
        ("logistic-head", {}),
        ("prototypical", {}),
        ("nearest-centroid", {"mirror": True}),
    ],
)
@pytest.mark.parametrize("rotations", [False, True])
def test_scores_are_those_of_the_pictures(name, options, rotations, data, one_by_one):
    learner, drawn = build(name, **options), episodes(data, rotations=rotations)
    found = score(learner, drawn)
    one_by_one()
    assert found.unique().numel() > 2  # the learners are sometimes right and sometimes wrong
    assert torch.equal(found, score(learner, drawn))


@pytest.mark.parametrize("name", ["hyper-representation", "ridge-head", "prototypical"])
def test_calibrations_are_those_of_the_pictures(name, data, monkeypatch):
    learner, drawn = build(name), [episodes(data, split=split, ways=2) for split in ("val", "train")]
    found = calibrate(learner, *drawn, COUNT, 3)
    monkeypatch.setattr("bilevel.learners.calibration.with_features", lambda *given, **more: None)
    expected = calibrate(learner, *drawn, COUNT, 3)
    assert found.plain().pop("found") == expected.found and 0 < found.accuracy == expected.accuracy < 1
    for name in ("temperature", "error", "error_before"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4)
    assert found.thresholds == pytest.approx(expected.thresholds, rel=1e-4)


def test_each_picture_passes_once(data):
    learner, drawn = build("hyper-representation"), episodes(data)
    learner.representation._fuses = False
    seen = passed(learner)
    score(learner, drawn)
    different = len(picture_features.DrawnPictures.of(drawn, COUNT).keys)
    assert different == 5 * 6  # five classes of six pictures, 450 times in 30 episodes
    assert seen() == different


def test_known_features_are_not_computed_again(data):
    learner, drawn, known = build("hyper-representation"), episodes(data), {}
    learner.representation._fuses = False
    seen = passed(learner)
    once = score(learner, drawn, known=known)
    few = picture_features.DrawnPictures.of(drawn, 3).keys
    for key in few:
        del known["val", key]
    before = seen()
    assert torch.equal(score(learner, drawn, known=known), once) and seen() - before == len(few)


class Elsewhere(torch.nn.Module):
    """A layer that mixes the pictures of a batch."""

    def forward(self, x):
        return x - x.mean(0)


@dataclass(frozen=True)
class Case:
    name: str
    options: dict
    module: object = None
    episodes: dict = None
    count: int = COUNT


@pytest.mark.parametrize(
    "case",
    [
        Case("hyper-representation", {"batch_norm": "episode"}),
        Case("hyper-representation", {"batch_norm": "support"}),
        Case("hyper-representation", {}, torch.nn.Sequential(*network(), Elsewhere())),
        Case("hyper-representation", {}, None, {"augmentation": ImageAugmentation.of("flip")}),
        Case("hyper-representation", {}, None, None, 1),
        Case("maml", {"batch_norm": "episode"}),
        Case("anil", {"batch_norm": "episode"}),
    ],
)
def test_what_depends_on_more_than_features_of_a_picture_is_not_changed(case, data):
    learner, drawn = build(case.name, case.module, **case.options), episodes(data, **(case.episodes or {}))
    assert picture_features.with_features(learner, drawn, case.count, World(), print, False) is None


def test_features_do_not_depend_on_the_number_of_processes(data, monkeypatch):
    monkeypatch.setattr(picture_features, "GROUP", 7)
    learner, drawn = build("hyper-representation"), episodes(data)
    tables = []
    for size in (1, 3):
        total = 0
        for rank in range(size):
            world = World(rank, size)
            monkeypatch.setattr(World, "sum", lambda self, tensor: tensor)
            found, _ = picture_features.with_features(learner, drawn, COUNT, world, lambda part: None, False)
            total = total + found.module.table
        tables.append(total)
    assert torch.equal(*tables)


def test_the_learner_is_not_changed(data):
    learner, drawn = build("hyper-representation"), episodes(data)
    training = replace(drawn, split="train").batch(range(4))
    before = learner.hypergradient(training)
    learner._problems.clear()
    score(learner, drawn)
    value, grads = learner.hypergradient(training)
    assert torch.equal(value, before[0]) and all(torch.equal(grads[name], before[1][name]) for name in grads)


def test_progress_and_stopping(data):
    learner, reported = build("hyper-representation"), []
    score(learner, episodes(data), report=reported.append)
    assert reported == sorted(reported) and reported[-1] == COUNT and 0 < reported[0] < COUNT
    with pytest.raises(Interrupted):
        score(learner, episodes(data), stop=True)
