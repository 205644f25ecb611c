"""The server of the page. It listens on 127.0.0.1 only, and writes no log and no files."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from bilevel.app.desk import Desk
from bilevel.app.routes import application
from bilevel.errors import BilevelError

ADDRESS = "127.0.0.1"
# The port of the page, unless it is in use.
PORT = 8642


def listen(port: int | None) -> socket.socket:
    """A socket on 127.0.0.1. For port None it has the usual port, or any free one if that is in use.

    >>> with listen(0) as opened:
    ...     opened.getsockname()[0]
    '127.0.0.1'
    """
    for candidate in (port,) if port is not None else (PORT, 0):
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((ADDRESS, candidate))
            return opened
        except OSError as error:
            opened.close()
            reason = error.strerror or str(error)
    raise BilevelError(f"The page cannot be served on port {port}: {reason}. Leave --port out to use a free one.")


class PageServer(uvicorn.Server):
    """The server of a desk's page. `run` ends with Ctrl-C, or once `should_exit` is true.

    Args:
        desk: the state of the page.
        opened: the socket on which it listens.
        ready: called with the address of the page as soon as it can be opened.
    """

    def __init__(self, desk: Desk, opened: socket.socket, ready: Callable[[str], None] = lambda address: None) -> None:
        self.opened, self.ready = opened, ready
        super().__init__(
            uvicorn.Config(
                application(desk),
                log_level="error",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                limit_concurrency=64,
                timeout_graceful_shutdown=2,
            )
        )

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.opened.getsockname()[1]}/"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [self.opened])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready(self.address)
