"""Episodes: pure functions of (seed, i), disjoint where they must be, and refused where they cannot be drawn."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel import BilevelError, Task
from bilevel.tasks.episodes import Episodes, EpisodeSampler


@dataclass
class Numbered:
    """Image n of class c holds the number n in every pixel, and a mark in one corner that shows how it was turned."""

    per_class: int = 20
    count: int = 12
    side: int = 4
    splits: dict = field(default_factory=lambda: {"train": tuple(range(6)), "val": (6, 7, 8), "test": (9, 10, 11)})

    def __post_init__(self):
        self.labels = np.repeat(np.arange(self.count), self.per_class)
        self.classes = tuple(f"class {k}" for k in range(self.count))
        self.images = np.zeros((len(self.labels), self.side, self.side, 1), np.uint8)
        self.images[:, 1:3, 1:3, 0] = np.arange(len(self.labels))[:, None, None]
        self.images[:, 0, 0, 0] = 255


DATA = Numbered()


def numbers(images):
    return (images[..., 0, 1, 1] * 255).round().to(torch.int64)


@given(
    seed=st.integers(0, 2**64 - 1),
    i=st.integers(0, 2**63),
    ways=st.integers(1, 6),
    shots=st.integers(1, 8),
    queries=st.integers(0, 12),
    rotations=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_support_and_query_are_disjoint_and_classes_distinct(seed, i, ways, shots, queries, rotations):
    sampler = EpisodeSampler(DATA.labels, ways, shots, queries, seed, classes=DATA.splits["train"], rotations=rotations)
    rows, turns = sampler.draw(i)
    assert rows.shape == (ways, shots + queries)
    labels = DATA.labels[rows]
    assert (labels == labels[:, :1]).all() and set(labels[:, 0]) <= set(DATA.splits["train"])
    assert all(len(set(row)) == len(row) for row in rows.tolist())
    drawn = list(zip(labels[:, 0].tolist(), turns.tolist(), strict=True))
    assert len(set(drawn)) == ways and (rotations or set(turns.tolist()) == {0})
    again, turned = EpisodeSampler(
        DATA.labels, ways, shots, queries, seed, classes=DATA.splits["train"], rotations=rotations
    ).draw(i)
    assert np.array_equal(rows, again) and np.array_equal(turns, turned)


def test_an_episode_is_the_same_in_any_order_and_alone_or_in_a_batch():
    episodes = Episodes(DATA, "train", ways=3, shots=2, queries=4, seed=5, rotations=True)
    later = [episodes.episode(i) for i in (9, 2, 7)]
    batch = Episodes(DATA, "train", ways=3, shots=2, queries=4, seed=5, rotations=True).batch(range(10))
    for i, task in zip((9, 2, 7), later, strict=True):
        for one, many in ((task.train, batch.train), (task.val, batch.val)):
            assert torch.equal(one[0], many[0][i]) and torch.equal(one[1], many[1][i])
    source = episodes.sample(5)
    assert torch.equal(source(1)[2].val[0], batch.val[0][7]) and len(source(0)) == 5
    assert not torch.equal(batch.train[0][0], batch.train[0][1])
    other = Episodes(DATA, "train", ways=3, shots=2, queries=4, seed=6, rotations=True)
    assert not torch.equal(other(2).train[0], later[1].train[0])


def test_a_drawn_episode_is_written_down():
    # A resumed run on another machine or with another numpy must continue with the same episodes.
    rows, turns = EpisodeSampler(DATA.labels, ways=3, shots=1, queries=1, seed=1, rotations=True).draw(4)
    assert rows.tolist() == ROWS and turns.tolist() == TURNS


ROWS, TURNS = [[32, 20], [63, 75], [172, 171]], [0, 2, 0]


def test_tensors():
    task = Episodes(DATA, "val", ways=2, shots=3, queries=4)(0)
    assert isinstance(task, Task)
    (images, labels), (queries, answers) = task.train, task.val
    assert images.shape == (6, 1, 4, 4) and queries.shape == (8, 1, 4, 4) and images.dtype == torch.float32
    assert labels.tolist() == [0, 0, 0, 1, 1, 1] and answers.tolist() == [0] * 4 + [1] * 4
    assert images.min() >= 0 and images.max() == 1 and images.is_contiguous()
    support, query = numbers(images), numbers(queries)
    assert not set(support.tolist()) & set(query.tolist())
    # A label is one class in both sets, and it is a class of the split.
    truth = torch.from_numpy(DATA.labels)
    for label in (0, 1):
        classes = set(truth[support[labels == label]].tolist()) | set(truth[query[answers == label]].tolist())
        assert len(classes) == 1 and classes <= set(DATA.splits["val"])


def test_colour_is_channels_first():
    @dataclass
    class Colour(Numbered):
        def __post_init__(self):
            super().__post_init__()
            self.images = np.stack([np.full((len(self.labels), 4, 4), c, np.uint8) for c in (0, 51, 102)], axis=-1)

    images, _ = Episodes(Colour(), "test", ways=2, shots=1, queries=1)(0).train
    assert images.shape == (2, 3, 4, 4) and torch.allclose(images[0, :, 0, 0], torch.tensor([0, 0.2, 0.4]).float())


def test_rotations_are_classes_of_their_own():
    episodes = Episodes(DATA, "val", ways=12, shots=1, queries=2, rotations=True)
    assert episodes.sampler.count == 12
    task = episodes(3)
    rows, turns = episodes.sampler.draw(3)
    corner = {0: (0, 0), 1: (3, 0), 2: (3, 3), 3: (0, 3)}  # where a quarter turn to the left takes the mark
    for (images, labels), columns in ((task.train, slice(0, 1)), (task.val, slice(1, 3))):
        for image, label, row in zip(images, labels.tolist(), rows[:, columns].ravel(), strict=True):
            assert image[0][corner[int(turns[label])]] == 1 and int(numbers(image)) == row
    assert sorted(turns.tolist()) == sorted([0, 1, 2, 3] * 3)


def test_every_class_and_example_is_drawn_equally_often():
    sampler = EpisodeSampler(np.repeat(np.arange(5), 4), ways=2, shots=1, queries=1)
    drawn = np.concatenate([sampler.draw(i)[0].ravel() for i in range(5000)])
    counts = np.bincount(drawn, minlength=20)
    # 20 cells of 1,000: five standard deviations.
    assert counts.sum() == 20_000 and np.abs(counts - 1000).max() < 150


def test_labels_only_and_uneven_classes():
    labels = [7, 7, 7, -3, -3, 100, 100, 100, 100]
    sampler = EpisodeSampler(labels, ways=3, shots=1, queries=1)
    rows, _ = sampler.draw(0)
    assert {labels[row] for row in rows[:, 0]} == {7, -3, 100}
    assert {frozenset(labels[k] for k in row) for row in rows.tolist()} == {frozenset({c}) for c in (7, -3, 100)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ways": 7}, "ways=7 needs 7 classes and there are 6.*ways ≤ 6, or let rotations"),
        ({"ways": 25, "rotations": True}, "ways=25 needs 25 classes and there are 24"),
        (
            {"shots": 6, "queries": 15},
            r"Class 'class 0' has 20 examples \(and 5 more.*needs 21.*Lower shots or queries",
        ),
        ({"ways": 0}, "ways=0"),
        ({"shots": 0}, "shots=0"),
        ({"queries": -1}, "queries=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"split": "training"}, "split='training' holds no classes; pass one of 'train', 'val', 'test'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_at_once(settings, message):
    with pytest.raises(BilevelError, match=message):
        Episodes(DATA, **settings)


def test_other_refusals():
    with pytest.raises(BilevelError, match="numbered 0, 1, 2"):
        Episodes(DATA).episode(-1)
    with pytest.raises(BilevelError, match="no episodes"):
        Episodes(DATA).batch([])
    with pytest.raises(BilevelError, match="count=0"):
        Episodes(DATA).sample(0)
    with pytest.raises(BilevelError, match="one integer per example"):
        EpisodeSampler(np.zeros(4), ways=1, shots=1, queries=1)
    wide = Numbered()
    wide.images = np.zeros((len(wide.labels), 4, 5, 1), np.uint8)
    with pytest.raises(BilevelError, match="square images, and these are 5×4"):
        Episodes(wide, rotations=True)


def test_solve_takes_episodes_as_a_source():
    import bilevel as bl

    def features(images):
        return images.flatten(1).to(torch.float64)

    def loss(w, lam, batch):
        return (
            torch.nn.functional.cross_entropy(features(batch[0]) @ w + 0 * lam.sum(), batch[1])
            + lam.exp() * (w**2).sum()
        )

    problem = bl.Problem(inner=loss, outer=loss, init=lambda lam: torch.zeros(16, 3))
    episodes = Episodes(DATA, "train", ways=3, shots=2, queries=2)
    solution = bl.solve(
        problem, torch.tensor(-2.0), episodes.sample(2), dynamics=bl.GradientDescent(0.1), steps=3, iterations=3
    )
    assert solution.outcome.ok and solution.outer != -2.0
