"""`fit`: a module of one's own, trained from Python."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import bilevel as bl
from bilevel import BilevelError
from bilevel.data.preparation import Preparation
from bilevel.learners import fit, library
from bilevel.learners.catalogue.maml import MAML

HOW = {"ways": 3, "queries": 2, "meta_batch": 2, "validation_episodes": 4, "validate_every": 2, "progress": False}


def learner(kind=bl.HyperRepresentation):
    torch.manual_seed(0)
    return kind(nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten()), (1, 16, 16), steps=2)


@pytest.mark.parametrize("kind", [bl.HyperRepresentation, MAML])
def test_it_goes_on_bit_for_bit_and_reads_what_is_finished(data, tmp_path, kind):
    whole, halves = learner(kind), learner(kind)
    ending = fit(whole, data, tmp_path / "whole", iterations=4, **HOW)
    assert ending.iteration == 4 and 0 <= ending.best <= 1
    fit(halves, data, tmp_path / "halves", iterations=2, **HOW)
    halves = learner(kind)
    fit(halves, data, tmp_path / "halves", iterations=4, **HOW)
    read = learner(kind)
    fit(read, data, tmp_path / "whole", iterations=4, **HOW)
    for other in (halves, read):
        assert all(torch.equal(whole.lam[name], other.lam[name]) for name in whole.lam)
    with pytest.raises(BilevelError, match="was built with a module"):
        library.find(str(tmp_path / "whole"))


def test_the_card_says_how_the_pictures_of_the_data_are_prepared(data, tmp_path):
    how = Preparation("drawing", 1, 16, 16)
    trained = learner()
    fit(trained, replace(data, preparation=how), tmp_path / "run", iterations=1, **HOW)
    trained.save(tmp_path / "model")
    assert bl.HyperRepresentation.load(tmp_path / "model", module=learner().module).preparation == how


def test_wrong_settings(data, tmp_path):
    with pytest.raises(BilevelError, match="takes steps from the learner"):
        fit(learner(), data, tmp_path / "run", steps=3)
    with pytest.raises(BilevelError, match="There is no setting epochs"):
        fit(learner(), data, tmp_path / "run", epochs=3)
    with pytest.raises(BilevelError, match="has another configuration"):
        fit(learner(), data, tmp_path / "run", iterations=1, **HOW)
        fit(learner(), data, tmp_path / "run", iterations=1, seed=1, **HOW)
