import os
import signal
from pathlib import Path

import pytest
import torch

# Mathematics is asserted in double precision; tests that are about float32 switch, and the fixture switches back.
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

# Folders and files whose tests train, compile, start processes or draw pages: `make test-quick` leaves them out.
SLOW = {
    *(
        "benchmarks",
        "cli",
        "data",
        "docs",
        "estimators",
        "examples",
        "experiments",
        "interoperation",
        "peers",
        "report",
    ),
    *("tabular", "training", "tuning", "search"),
    *(
        "test_batteries.py",
        "test_battery_mutants.py",
        "test_compiled.py",
        "test_compiled_objectives.py",
        "test_costs.py",
    ),
    *("test_implicit.py", "test_readme.py", "test_second_derivatives.py", "test_solve.py", "test_zoo.py"),
    *("test_cross_validation.py", "test_meta_training.py", "test_reversible.py", "test_spectral_compiled.py"),
}


def pytest_collection_modifyitems(items):
    for item in items:
        if SLOW & set(item.path.relative_to(item.config.rootpath).parts):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def double_precision():
    torch.manual_seed(0)  # no test may depend on what was drawn before it
    yield
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt, also where it is ignored: under nohup, or in a script's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def real():
    """`real("omniglot/images_background.zip", …)`: the data root, if BILEVEL_DATA names one that has these files."""

    def root(*files):
        given = os.environ.get("BILEVEL_DATA")
        if not given:
            pytest.skip("BILEVEL_DATA is not set")
        missing = [file for file in files if not (Path(given) / file).exists()]
        if missing:
            pytest.skip(f"BILEVEL_DATA has no {missing[0]}")
        return Path(given)

    return root
