"""Only the page itself may use the server: other web pages are refused, and so are bodies that are too large.

A browser lets any web page send requests to 127.0.0.1. Three things tell them from ours:

- `Host` must name this machine. A page of another site whose name was made to point to 127.0.0.1 (DNS rebinding) sends
  its own name.
- `Origin`, which browsers send with everything that could change something, must be that host.
- `Sec-Fetch-Site` must not say that another site asks. A link from elsewhere may open the page, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Names of this machine. Any port, so that the page can be used through a forwarded one.
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


class BodyTooLarge(Exception):
    """More bytes were sent than may be."""


class Guard:
    """An ASGI application around another.

    Args:
        app: the other.
        most_bytes: the largest body that is read.
    """

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self.app, self.most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers, answered = Headers(scope=scope), False
        too_large = f"A picture may have {self.most_bytes / 1e6:.0f} MB; this one has more."

        async def answer(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                added = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    added.setdefault(name, value)
            await send(message)

        async def refuse(status: int, why: str) -> None:
            # The rest of the body is not read, so the connection is of no more use.
            await JSONResponse({"error": why}, status, headers={"Connection": "close"})(scope, receive, answer)

        wrong = refusal(scope["method"], scope["path"], headers)
        if wrong:
            return await refuse(403, wrong)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.most_bytes:
            return await refuse(413, too_large)
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most_bytes:
                raise BodyTooLarge
            return message

        try:
            await self.app(scope, counted, answer)
        except BodyTooLarge:
            if not answered:
                await refuse(413, too_large)


def refusal(method: str, path: str, headers: Mapping[str, str]) -> str:
    """Why a request is refused; "" if it is not.

    >>> refusal("GET", "/", {"host": "127.0.0.1:8642"})
    ''
    >>> refusal("POST", "/ask", {"host": "127.0.0.1:8642", "origin": "https://example.org"})
    'Only the page of this server may use it; the request came from https://example.org.'
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not HOST.fullmatch(host):
        return f"This server answers to 127.0.0.1 and localhost, and not to {host or 'a request without a host'}."
    if origin is not None and origin != f"http://{host}":
        return f"Only the page of this server may use it; the request came from {origin}."
    opened = method == "GET" and path == "/" and headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not opened:
        return "Only the page of this server may use it; the request came from another page."
    return ""
