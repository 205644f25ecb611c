"""`torchrun script.py` with estimators: processes share the work, and get the bits that one process gets."""

import functools
import json

import estimator_script
import numpy as np
import pytest
import torch

from bilevel.methods.linear_models import _shared_work
from forking import run_ranks

# The closed form of the leave-one-out error has one fold.
NOT_SHARED = {"left-out"}


def processes(folder, count, cases):
    run_ranks(estimator_script.__file__, folder, cases, count=count)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes found."""
    return processes(tmp_path_factory.mktemp("two"), 2, ",".join([*estimator_script.CASES, "failing"]))


@pytest.fixture
def one_thread():
    before, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_num_threads(before)
    torch.set_default_dtype(dtype)


@functools.cache
def alone(case, least_operations=1):
    """What this process finds alone; call it with `one_thread`."""
    return estimator_script.run(case, least_operations)


@pytest.mark.parametrize("case", [case for case in estimator_script.CASES if case != "large"])
def test_two_processes_share_the_work_and_return_what_one_returns(two, case, one_thread):
    one = alone(case)
    assert one["numbers"] == two[0][case]["numbers"] == two[1][case]["numbers"]
    shares = [rank[case]["parts"] for rank in two]
    if case in NOT_SHARED:
        return
    assert sum(shares) == one["parts"] > 0 and min(shares) > one["parts"] / 4


@pytest.mark.parametrize("case", ["stale", "poisson", "large"])
def test_hessians_are_updated_only_when_needed(case, one_thread):
    """The method of large tables, which the small tables of these tests have too."""
    usual = _shared_work.LEAST_OPERATIONS
    found = alone(case, usual) if case == "large" else alone(case)
    assert "updated only when needed" in found["method"]


def test_a_table_of_usual_size_is_shared_too(two, one_thread):
    one = alone("large", _shared_work.LEAST_OPERATIONS)
    assert one["numbers"] == two[0]["large"]["numbers"] == two[1]["large"]["numbers"]
    assert sum(rank["large"]["parts"] for rank in two) == one["parts"] > 0


def test_an_error_of_one_process_ends_both_with_its_message(two):
    for rank in two:
        assert rank["failing"] == {"error": "The matrices of rank 1 are out of order."}


@pytest.mark.parametrize("case", ["stale", "classes", "dense", "sparse", "poisson", "ridge", "kernel", "lasso"])
def test_parts_change_no_result_beyond_rounding(case, one_thread):
    """The penalties are rounded to four decimals of their logarithm, so that they are the same."""
    whole, parts = alone(case, np.inf)["numbers"], alone(case)["numbers"]
    for a, b in zip(whole, parts, strict=True):
        assert float.fromhex(a) == pytest.approx(float.fromhex(b), rel=1e-5, abs=1e-7)


def test_three_processes_return_what_one_returns(tmp_path, one_thread):
    """Folds that cannot be divided evenly."""
    three = processes(tmp_path, 3, "ridge,lasso,dense")
    for case in ("ridge", "lasso", "dense"):
        one = alone(case)["numbers"]
        assert all(rank[case]["numbers"] == one for rank in three)


def test_all_rows_are_in_one_block():
    for rows in (8, 9, 64, 65, 1001):
        blocks = _shared_work.row_blocks(rows, 1e12).slices
        assert np.concatenate([np.arange(rows)[block] for block in blocks]).tolist() == list(range(rows))
        assert len({block.stop - block.start for block in blocks[:-1]}) <= 1
