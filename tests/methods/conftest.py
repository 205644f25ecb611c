import pytest

from bilevel.engine import checks


@pytest.fixture
def counted_checks(monkeypatch):
    """A list with an entry for every time that a problem was checked."""
    calls, check = [], checks.check_purity
    monkeypatch.setattr(checks, "check_purity", lambda *arguments: calls.append(1) or check(*arguments))
    return calls
