import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Every test decodes into a cache of its own."""
    monkeypatch.setenv("BILEVEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
