import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Every test decodes into a cache of its own."""
    monkeypatch.setenv("BILEVEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
