"""Loaders replayed by step number: a pure function of t, the loader's own batches, and no side effects."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from tuning_examples import Pictures, classes, loader

from bilevel.engine.samplers import same
from bilevel.errors import BilevelError
from bilevel.tuning.batches import ReplayedLoader, training_data, whole_batch

LIKE = torch.zeros(())


def replayed(given, steps=12, seed=0):
    return ReplayedLoader(given, seed, LIKE, steps)


def states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize(
    "given",
    [
        loader(),
        loader(size=7, drop_last=True),
        loader(generator=torch.Generator().manual_seed(3)),
        DataLoader(Pictures(), batch_size=4, shuffle=True),
        DataLoader(Pictures(), batch_size=None, shuffle=True),
        DataLoader(Pictures(), batch_size=3, sampler=WeightedRandomSampler([1.0] * 10, 10)),
        DataLoader(
            Pictures(),
            batch_size=3,
            sampler=WeightedRandomSampler([1.0] * 10, 10, generator=torch.Generator().manual_seed(1)),
        ),
    ],
)
def test_a_batch_is_a_function_of_seed_and_step_and_leaves_no_trace(given):
    generators = [g for g in (given.generator, getattr(given.sampler, "generator", None)) if g is not None]
    before, own = states(), [g.get_state().tolist() for g in generators]
    one, two = replayed(given), replayed(given)
    forward = [one(t) for t in range(1, 13)]
    backward = [two(t) for t in range(12, 0, -1)][::-1]
    assert all(same(a, b) for a, b in zip(forward, backward, strict=True))
    assert states() == before
    assert [g.get_state().tolist() for g in generators] == own
    other = replayed(given, seed=1)
    assert not all(same(a, other(t)) for t, a in enumerate(forward, 1))


@pytest.mark.parametrize("seed", [-5, 2**62])
def test_any_integer_is_a_seed(seed):
    replay = replayed(loader(generator=torch.Generator()), seed=seed)
    assert sorted(torch.cat([replay(t).index for t in (1, 2, 3)]).tolist()) == list(range(24))


def test_without_shuffling_the_batches_are_the_loaders_own():
    given = loader(count=22, shuffle=False)
    replay = replayed(given)
    for t, (x, y) in enumerate([*given, *given], 1):
        batch = replay(t)
        assert torch.equal(batch.inputs, x) and torch.equal(batch.targets, y)
    assert batch.index.tolist() == list(range(16, 22))


def test_every_epoch_of_a_shuffling_loader_shows_every_example_once_in_another_order():
    given = loader(count=22)
    replay = replayed(given)
    assert replay.per_epoch == len(given) == 3
    epochs = [torch.cat([replay(3 * e + t).index for t in (1, 2, 3)]).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(22)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    x, y = classes(22)
    batch = replay(5)
    assert torch.equal(batch.inputs, x[batch.index]) and torch.equal(batch.targets, y[batch.index])


def test_drop_last_drops_and_collate_is_the_users():
    replay = replayed(loader(count=22, drop_last=True))
    assert [len(replay(t).index) for t in range(1, 5)] == [8, 8, 8, 8]

    def doubled(examples):
        return torch.stack([2 * x for x, _ in examples]), torch.stack([y for _, y in examples])

    given = loader(shuffle=False, collate_fn=doubled)
    assert torch.equal(replayed(given)(1).inputs, 2 * classes()[0][:8])


def test_subsets_of_tensors_are_indexed_like_the_data_set():
    data = TensorDataset(*classes())
    nested = Subset(Subset(data, [5, 3, 1, 20, 7]), [4, 0, 2])
    fast = whole_batch(nested, 0, LIKE, "val")
    assert torch.equal(fast.inputs, torch.stack([x for x, _ in nested]))
    part, _ = random_split(data, [10, 14], generator=torch.Generator().manual_seed(0))
    batch = replayed(DataLoader(part, batch_size=4, shuffle=True))(2)
    assert all(torch.equal(x, part[int(i)][0]) for x, i in zip(batch.inputs, batch.index, strict=True))


@pytest.mark.parametrize("data", [TensorDataset(*classes()), [(torch.ones(3) * i, i % 3) for i in range(24)]])
@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"batch_size": 5, "drop_last": True}])
def test_loaders_told_apart_by_their_samplers_are_not_mixed(data, settings):
    """The usual split of one data set: the validation set holds no training example."""
    kept = [20, 3, 11, 6, 17, 9, 2]
    batch = whole_batch(DataLoader(data, sampler=SubsetRandomSampler(kept), **settings), 0, LIKE, "val")
    assert batch.index.tolist() == sorted(kept)
    assert torch.equal(batch.inputs, torch.stack([data[i][0] for i in sorted(kept)]).double())
    everything = whole_batch(DataLoader(data, shuffle=True, **settings), 0, LIKE, "val")
    assert everything.index.tolist() == list(range(24))


class Thirds(Sampler):
    """Batches as tensors or arrays, of the first 12 examples only."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return iter(self.make(torch.randperm(12).reshape(3, 4)))

    def __len__(self):
        return 3


@pytest.mark.parametrize("make", [list, lambda x: list(x.numpy()), lambda x: x.tolist()])
def test_samplers_may_give_tensors_and_arrays(make):
    given = DataLoader(TensorDataset(*classes()), batch_sampler=Thirds(make))
    replay = replayed(given)
    epoch = [replay(t) for t in (1, 2, 3)]
    assert sorted(torch.cat([batch.index for batch in epoch]).tolist()) == list(range(12))
    assert torch.equal(epoch[1].inputs, classes()[0][epoch[1].index])
    assert whole_batch(given, 0, LIKE, "val").index.tolist() == list(range(12))


def test_a_number_among_the_inputs_is_not_mistaken_for_the_examples():
    batch = whole_batch(({"count": torch.tensor(24), "x": classes()[0]}, classes()[1]), 0, LIKE, "val")
    assert len(batch.index) == 24


def test_floats_follow_the_model_and_labels_stay():
    x, y = classes()
    batch = whole_batch((x.float(), y), 0, LIKE, "val")
    assert batch.inputs.dtype == torch.float64 and batch.targets.dtype == torch.int64


def test_batches_of_a_slow_data_set_are_made_once():
    asked = []

    class Counted(Pictures):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    replay = replayed(DataLoader(Counted(), batch_size=5))
    for _ in range(3):
        for t in (1, 2):
            replay(t)
    assert len(asked) == 10


class Streams(IterableDataset):
    def __iter__(self):
        return iter([])


class Moody(Sampler):
    """A sampler with a hidden state."""

    def __init__(self):
        self.calls = 0

    def __iter__(self):
        self.calls += 1
        return iter([(self.calls + i) % 10 for i in range(10)])

    def __len__(self):
        return 10


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (DataLoader(Streams()), "Streams, a stream"),
        (DataLoader(Pictures(), batch_size=2, sampler=Moody()), "Moody, gives a different order each time"),
        (DataLoader(TensorDataset(torch.zeros(3, 2), torch.zeros(3)), batch_size=5, drop_last=True), "no batches"),
        (DataLoader(TensorDataset(torch.zeros(0, 2), torch.zeros(0))), "no batches"),
        ((torch.zeros(0, 2), torch.zeros(0)), "no examples"),
        (torch.zeros(3), "is not data"),
        (DataLoader([torch.zeros(2)] * 4, batch_size=2), "must be a pair"),
    ],
)
def test_data_that_cannot_be_replayed_is_refused(given, says):
    with pytest.raises(BilevelError, match=says):
        data = training_data(given, 0, LIKE, 3)
        data(1)
