import signal

import pytest


@pytest.fixture(autouse=True)
def signals_as_before():
    """Ray and Lightning put handlers of their own in place, which the tests of Ctrl-C must not meet."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
