import signal

import pytest

# As they are when tests are collected, before a fixture starts Ray.
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


@pytest.fixture(autouse=True)
def signals_as_before():
    """Ray and Lightning put handlers of their own in place, which the tests of Ctrl-C must not meet."""
    yield
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
