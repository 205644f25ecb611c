"""Batch norm's modes, against torch's layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bilevel.errors import BilevelError
from bilevel.models.batch_norm import MEANING, MODES, BatchNorm, converted, layers, statistics, using


def pair(shape: tuple[int, ...]) -> tuple[nn.Module, BatchNorm, Tensor]:
    """torch's layer, ours with the same numbers, and a batch."""
    theirs = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1], eps=1e-3)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    nn.init.uniform_(theirs.running_mean)
    nn.init.uniform_(theirs.running_var, 0.5, 2)
    ours = converted(theirs)
    assert isinstance(ours, BatchNorm)
    return theirs, ours, torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("shape", [(6, 3, 4, 5), (6, 3)])
@pytest.mark.parametrize("by", ["own", "sets", "keep", "kept", "running"])
def test_values_and_gradients_are_torchs(shape, by):
    theirs, ours, x = pair(shape)
    norms = {"": ours}
    expected = theirs.eval()(x) if by == "running" else theirs.train()(x)
    if by == "kept":
        with using(norms, "keep"):
            ours(x)
    with using(norms, *{"sets": ("own", [len(x)])}.get(by, (by,))):
        found = ours(x)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    inputs = (x, ours.weight, ours.bias)
    for one, other in zip(*(torch.autograd.grad(y.sin().sum(), inputs) for y in (found, expected)), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_queries_by_the_support_sets_statistics_stand_for_themselves():
    _, ours, support = pair((6, 3, 4, 5))
    query = torch.randn(4, 3, 4, 5)

    def normalised(rows: Tensor) -> Tensor:
        with using({"": ours}, "keep"):
            ours(support)
        with using({"": ours}, "kept"):
            return ours(rows)

    assert torch.allclose(normalised(query)[:1], normalised(query[:1]))
    mean, var = statistics(support)
    shape = 1, 3, 1, 1
    by_hand = (query - mean.view(shape)) / (var.view(shape) + ours.eps).sqrt()
    by_hand = by_hand * ours.weight.view(shape) + ours.bias.view(shape)
    assert torch.allclose(normalised(query), by_hand)
    # The statistics are part of the representation, so the support set is differentiated through them.
    assert torch.autograd.grad(normalised(query).sin().sum(), support)[0].abs().max() > 1e-3


def test_the_paper_has_a_bias_and_no_scale():
    assert [name for name, _ in BatchNorm(4).named_parameters()] == ["bias"]


@pytest.mark.parametrize("sizes", [None, [2, 4]])
def test_statistics_are_noted_where_somebody_wants_to_know(sizes):
    _, ours, x = pair((6, 3, 4, 5))
    ours.seen = []
    with using({"": ours}, "own", sizes):
        ours(x)
    parts = x.split(sizes or 6)
    assert len(ours.seen) == len(parts)
    for (mean, var), part in zip(ours.seen, parts, strict=True):
        assert not mean.requires_grad
        expected_var, expected_mean = torch.var_mean(part, (0, 2, 3), correction=0)
        assert torch.allclose(mean, expected_mean)
        assert torch.allclose(var, expected_var)


def test_after_the_block_everything_is_as_before():
    norms = layers(converted(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))))
    with pytest.raises(ZeroDivisionError), using(norms, "running", [1, 2]):
        raise ZeroDivisionError
    assert all((norm.by, norm.sizes) == ("own", None) for norm in norms.values())


@pytest.mark.parametrize("sizes", [None, [3, 1]])
def test_one_value_per_channel_has_no_statistics(sizes):
    norm = BatchNorm(3)
    with pytest.raises(BilevelError, match="One value per channel"), using({"": norm}, "own", sizes):
        norm(torch.randn(1 if sizes is None else 4, 3, 1, 1))


def test_every_mode_is_explained():
    assert set(MEANING) == set(MODES)


@pytest.mark.parametrize("scale", [True, False])
def test_sets_are_normalised_each_by_its_own_statistics(scale):
    norm, x = BatchNorm(3, scale=scale), torch.randn(5, 3, 4, 4)
    expected = torch.cat([norm(part) for part in x.split([2, 3])])
    norm.seen = []
    with using({"norm": norm}, "own", [2, 3]):
        assert torch.equal(norm(x), expected)
    for part, (mean, variance) in zip(x.split([2, 3]), norm.seen, strict=True):
        var, centre = torch.var_mean(part, (0, 2, 3), correction=0)
        assert torch.allclose(mean, centre) and torch.allclose(variance, var)


@pytest.mark.parametrize("shape", [(6, 3, 4, 5), (6, 3)])
def test_recorded_statistics_are_those_of_the_batch(shape):
    _, ours, x = pair(shape)
    ours.seen = []
    ours(x)
    with using({"": ours}, "own", [2, 4]):
        ours(x)
    expected = [statistics(part) for part in (x, x[:2], x[2:])]
    for (mean, variance), (their_mean, their_variance) in zip(ours.seen, expected, strict=True):
        assert torch.allclose(mean, their_mean, rtol=1e-12) and torch.allclose(variance, their_variance, rtol=1e-12)
        assert not mean.requires_grad and not variance.requires_grad
