import json

import pytest
import torch
import total_script

from bilevel.distributed import World, _ranges
from forking import run_ranks


@pytest.mark.parametrize("count", [2, 3])
def test_a_total_has_the_same_bits_for_any_number_of_processes(tmp_path, count):
    run_ranks(total_script.__file__, tmp_path, count=count)
    for rank in range(count):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == total_script.sums()


def test_a_total_is_the_sum_of_its_terms():
    terms = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(World().total(terms.__getitem__, 7, terms[0]), terms.sum(0), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_power_of_two_of_processes_sends_one_partial_sum_each(size):
    assert len(_ranges(0, 16, size)) == size
