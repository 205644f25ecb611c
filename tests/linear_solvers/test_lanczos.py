"""Extreme eigenvalues by Lanczos against `torch.linalg.eigvalsh`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel.linear_solvers.base import Operator, largest_eigenvalue
from bilevel.linear_solvers.lanczos import lanczos


def symmetric(size, seed):
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return (noise + noise.T) / 2


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 25), seed=st.integers(0, 1000))
def test_all_directions_give_the_extreme_eigenvalues(size, seed):
    matrix = symmetric(size, seed)
    spectrum = lanczos(Operator(lambda v: matrix @ v), torch.zeros(size))
    values = torch.linalg.eigvalsh(matrix)
    assert spectrum.complete and spectrum.products <= size
    assert spectrum.smallest == pytest.approx(float(values[0]), abs=1e-9)
    assert spectrum.largest == pytest.approx(float(values[-1]), abs=1e-9)


def test_few_products_give_bounds_that_hold_for_the_outer_eigenvalues():
    matrix = torch.diag(torch.cat([torch.linspace(1, 2, 200), torch.tensor([10.0, -5.0])]))
    spectrum = lanczos(Operator(lambda v: matrix @ v), torch.zeros(202), products=20)
    assert not spectrum.complete and spectrum.products == 20
    assert spectrum.largest >= 10 - 1e-9 and spectrum.smallest <= -5 + 1e-9
    assert spectrum.largest == pytest.approx(10, abs=1e-3) and spectrum.smallest == pytest.approx(-5, abs=1e-3)


def test_power_iteration_underestimates_the_norm_a_little():
    matrix = symmetric(30, 4)
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    assert 0.8 * norm < largest_eigenvalue(Operator(lambda v: matrix @ v), torch.zeros(30)) <= norm * (1 + 1e-12)


def test_lanczos_stops_when_it_knows_everything():
    matrix = torch.diag(torch.tensor([1.0, 1.0, 1.0, 5.0, 5.0]))
    spectrum = lanczos(Operator(lambda v: matrix @ v), torch.zeros(5))
    assert spectrum.complete and spectrum.products <= 3
    assert spectrum.smallest == pytest.approx(1.0) and spectrum.largest == pytest.approx(5.0)
