"""Transforms are invertible, stay in their range, and are found by their names."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel.errors import BilevelError
from bilevel.tuning.transforms import TRANSFORMS, as_transform

RANGES = {"log": (1e-4, 50.0), "logit": (-2.0, 3.0), "softplus": (0.5, 40.0), None: (-3.0, 7.0)}
leaves = st.lists(st.floats(-8, 8), min_size=1, max_size=6)


@pytest.mark.parametrize("word", RANGES)
@settings(deadline=None)
@given(numbers=leaves)
def test_value_and_leaf_are_inverse_and_values_stay_in_the_range(word, numbers):
    kind = as_transform("x", word, RANGES[word])
    low, high = kind.leaf_range()
    leaf = kind.constraint().project(torch.tensor(numbers))
    value = kind.value(leaf)
    assert bool((leaf >= low).all()) and bool((leaf <= high).all())
    assert bool((value >= RANGES[word][0] - 1e-12).all()) and bool((value <= RANGES[word][1] + 1e-9).all())
    torch.testing.assert_close(kind.leaf(value), leaf, rtol=1e-7, atol=1e-7)


@settings(deadline=None)
@given(numbers=st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_simplex_weights_add_up_and_are_invertible_on_centred_leaves(numbers):
    kind = as_transform("x", "simplex", None)
    leaf = torch.tensor(numbers)
    value = kind.value(leaf)
    assert abs(float(value.sum()) - 1) < 1e-12
    torch.testing.assert_close(kind.leaf(value), leaf - leaf.mean())


@pytest.mark.parametrize("word", TRANSFORMS)
def test_values_are_differentiable_in_the_leaf(word):
    kind = as_transform("x", word, RANGES.get(word))
    leaf = torch.linspace(-1, 1, 4, requires_grad=True)
    assert torch.autograd.gradcheck(kind.value, leaf)


def test_the_ends_are_where_the_range_says():
    assert as_transform("x", "log", (1e-3, 10)).leaf_range() == (math.log(1e-3), math.log(10))
    assert as_transform("x", None, (None, 2)).leaf_range() == (-math.inf, 2)
    assert as_transform("x", None, None).constraint() is None
    assert as_transform("x", None, (0, 5)).unit(torch.tensor(1.0)) == 0.5
    assert float(as_transform("x", "softplus", (0, 3)).value(torch.tensor(20.0).clamp(max=2.95))) < 3.1


@pytest.mark.parametrize("word", RANGES)
def test_a_tuning_can_go_on_from_an_end_of_the_range(word):
    """The value at an end is beyond it by rounding error: exp(log 10) > 10."""
    for ends in (RANGES[word], (1e-5, 10.0), (1e-8, 1e2)):
        kind = as_transform("x", word, ends)
        assert kind.contains(kind.value(torch.tensor(kind.leaf_range())))
        assert not kind.contains(torch.tensor(ends[1] * (1 + 1e-9)))


@pytest.mark.parametrize(
    ("word", "ends", "says"),
    [
        ("cube", None, "'cube', which is not known. Pass one of 'log', 'logit', 'simplex', 'softplus'"),
        ("log", (0, 1), "logarithm of 0.0 does not exist"),
        ("logit", (0, float("inf")), "two finite ends"),
        ("simplex", (0, 3), "Leave the range out"),
        (None, (2, 1), "empty range"),
        (None, 3, "Pass a pair"),
        (as_transform("x", "log", None), (1, 2), "its own range"),
    ],
)
def test_what_cannot_work_is_said(word, ends, says):
    with pytest.raises(BilevelError, match="'x'") as error:
        as_transform("x", word, ends)
    assert says in str(error.value)
