import gc
import os
import signal
from pathlib import Path

import pytest
import torch

# Mathematics is asserted in double precision; tests that are about float32 switch, and the fixture switches back.
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

CACHE = os.environ.get("BILEVEL_CACHE")  # before a test changes it

# Folders and files whose tests train, compile, start processes or draw pages: `make test-quick` leaves them out. Single
# tests elsewhere that take more than a few seconds carry the mark themselves.
SLOW_FOLDERS = {
    *("app", "benchmarks", "cli", "docs", "estimators", "examples", "experiments", "interoperation", "peers", "report"),
    *("search", "tabular", "training", "tuning"),
}
SLOW_FILES = {
    *("batteries", "compile", "compiled_objectives", "costs", "cross_validation", "data_glyphs", "dynamics_mutants"),
    *("implicit", "learner_battery", "meta_training", "method_mutants", "outer_loop", "readme", "reversible"),
    *("second_derivatives", "zoo"),
}


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Collect without the garbage collector, and exempt what collection leaves (750,000 objects) from it.

    Collection takes 12 s of processor time instead of 18 s, and `gc.collect()` in a test 1 ms instead of 0.8 s.
    """
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    for item in items:
        path = item.path.relative_to(item.config.rootpath)
        if SLOW_FOLDERS & set(path.parts[1:-1]) or path.stem in {f"test_{name}" for name in SLOW_FILES}:
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
def shared_cache(monkeypatch):
    """The user's cache, also where a fixture has set another: large data sets are decoded once for all tests."""
    if CACHE is None:
        monkeypatch.delenv("BILEVEL_CACHE", raising=False)
    else:
        monkeypatch.setenv("BILEVEL_CACHE", CACHE)


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
