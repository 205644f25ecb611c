"""The page of a desk, served as `bilevel app` serves it."""

import threading
from types import SimpleNamespace

import pytest
import torch

from bilevel.app.desk import Desk
from bilevel.app.server import PageServer, listen


@pytest.fixture(scope="session")
def served():
    """A desk, its server and its address; one for all tests, which clear the desk."""
    desk, ready = Desk(), threading.Event()
    server = PageServer(desk, listen(0), lambda address: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(30)
    yield SimpleNamespace(desk=desk, address=server.address, port=server.opened.getsockname()[1])
    server.should_exit = True
    thread.join(30)
    server.opened.close()


@pytest.fixture
def page_of_desk(served):
    """The same with an empty desk, in single precision as in a process of its own."""
    torch.set_default_dtype(torch.float32)
    served.desk.clear()
    served.desk.choose("automatic", 0.05)
    return served
