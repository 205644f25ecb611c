"""Held-out validation examples: the losses are those of the models, and a warning if the validation examples alone are
as good."""

import pytest
import torch
import torch.nn.functional as F
from tuning_examples import classes, network

import bilevel as bl
from asking import refused
from bilevel.errors import BilevelWarning
from bilevel.tuning import ExampleWeights, WeightDecay
from bilevel.tuning.holdout import split_validation


def data(train=200, val=60, wrong=0.0):
    x, y = classes(train + val, seed=3)
    bad = torch.rand(train, generator=torch.Generator().manual_seed(0)) < wrong
    labels = torch.where(bad, (y[:train] + 1) % 3, y[:train])
    return (x[:train], labels), (x[train:], y[train:])


def test_the_held_out_losses_are_those_of_the_models():
    train, val = data()
    run = {"steps": 30, "lr": 0.5, "seed": 4}
    found = bl.tune(network(), F.cross_entropy, WeightDecay(0.1), train, val, holdout=0.5, iterations=5, **run)
    rest, held = split_validation(val, 0.5, torch.zeros(()), 4)
    assert found.held_out.count == 30 == len(rest[0])
    both = torch.cat([rest[0], held[0]])
    assert sorted(both[:, 0].tolist()) == sorted(val[0][:, 0].tolist())
    # Trained on the rest alone, and evaluated on the held-out examples.
    same = bl.tune(network(), F.cross_entropy, WeightDecay(0.1), train, rest, iterations=5, **run)
    assert found.value == same.value
    assert found.held_out.tuned == pytest.approx(F.cross_entropy(same.model(held[0]), held[1]).item())
    before = bl.tune(network(), F.cross_entropy, WeightDecay(0.1), train, rest, iterations=0, **run)
    assert found.held_out.start == pytest.approx(F.cross_entropy(before.model(held[0]), held[1]).item())
    alone = bl.tune(network(), F.cross_entropy, WeightDecay(0.1), rest, held, iterations=0, **run)
    assert found.held_out.val_alone == pytest.approx(alone.value)
    assert str(found.held_out) in str(found) and "30 held-out examples" in str(found)
    assert "holdout=0.3 measures it on others" in str(same) and "holdout=" not in str(found)
    assert "`.search` tells" in str(same) and str(same.search) in str(same) and "`.search`" not in str(same)


def test_it_warns_if_the_validation_set_alone_would_do():
    """Most training labels are wrong, so weights for the training examples are no better than training on `val`."""
    train, val = data(val=120, wrong=0.6)
    run = {"steps": 60, "lr": 0.5, "iterations": 1, "outer_lr": 0.01, "holdout": 0.5}
    with pytest.warns(BilevelWarning, match="validation examples alone is as good"):
        found = bl.tune(network(), F.cross_entropy, ExampleWeights(), train, val, **run)
    assert found.held_out.val_alone <= found.held_out.tuned


@pytest.mark.parametrize("share", [0, 1, -0.5, "half", 0.001])
def test_a_share_that_leaves_nothing_is_refused(share):
    train, val = data()
    with refused("holdout="):
        bl.tune(network(), F.cross_entropy, WeightDecay(0.1), train, val, holdout=share, steps=2, iterations=1)


def test_the_same_data_for_both_is_refused():
    train, _ = data()
    for holdout in (None, 0.5):
        with refused("train and val are the same data"):
            bl.tune(network(), F.cross_entropy, WeightDecay(0.1), train, train, holdout=holdout, steps=2, iterations=1)
        with refused("not data"):
            bl.tune(network(), F.cross_entropy, WeightDecay(0.1), train, (*train, train[1]), holdout=holdout, steps=2)


def test_examples_that_train_and_val_share_are_warned_of():
    train, val = data()
    mixed = tuple(torch.cat([a[:20], b[20:]]) for a, b in zip(train, val, strict=True))
    with pytest.warns(BilevelWarning, match=f"20 of {len(mixed[0])} examples of val are in train too"):
        bl.tune(network(), F.cross_entropy, WeightDecay(0.1), train, mixed, steps=2, iterations=1)


def test_data_that_repeat_themselves_are_not_warned_of():
    """The suite turns warnings into errors."""
    train, _ = data()
    few = tuple(part[:4].repeat(len(part) // 4, *[1] * (part.ndim - 1)) for part in train)
    bl.tune(network(), F.cross_entropy, WeightDecay(0.1), few, tuple(p[:8] for p in train), steps=2, iterations=1)
