"""Only the page of this server may use the server: requests of other web pages and too large bodies are refused.

A browser lets any web page send requests to 127.0.0.1. Three headers distinguish them from requests of our page:

- `Host` must name this machine. A site whose name was made to point to 127.0.0.1 (DNS rebinding) sends its own name.
- `Origin` must be that host. Browsers send it with every request that could change something.
- `Sec-Fetch-Site` must not name another site. A link on another site may open the page, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Names of this machine, with any port, so that the page can be used through a forwarded port.
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
    """The body of a request has too many bytes."""


class Guard:
    """An ASGI middleware that checks requests and adds security headers.

    Args:
        app: the application.
        most_bytes: the largest body of a request.
    """

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self.app, self.most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers, answered = Headers(scope=scope), False
        too_large = f"The picture has more than {self.most_bytes / 1e6:.0f} MB, which is the limit."

        async def answer(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                added = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    added.setdefault(name, value)
            await send(message)

        async def refuse(status: int, why: str) -> None:
            # The rest of the body is not read, so the connection cannot be used again.
            await JSONResponse({"error": why}, status, headers={"Connection": "close"})(scope, receive, answer)

        reason = refusal(scope["method"], scope["path"], headers)
        if reason:
            return await refuse(403, reason)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.most_bytes:
            return await refuse(413, too_large)
        bytes_read = 0

        async def counted() -> Message:
            nonlocal bytes_read
            message = await receive()
            bytes_read += len(message.get("body", b""))
            if bytes_read > self.most_bytes:
                raise BodyTooLarge
            return message

        try:
            await self.app(scope, counted, answer)
        except BodyTooLarge:
            if not answered:
                await refuse(413, too_large)


def refusal(method: str, path: str, headers: Mapping[str, str]) -> str:
    """The reason to refuse a request; "" if it is allowed.

    >>> refusal("GET", "/", {"host": "127.0.0.1:8642"})
    ''
    >>> refusal("POST", "/ask", {"host": "127.0.0.1:8642", "origin": "https://example.org"})
    'Only the page of this server may use it; the request came from https://example.org.'
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not HOST.fullmatch(host):
        return f"This server answers requests to 127.0.0.1 and localhost, and not to {host or 'an empty host'}."
    if origin is not None and origin != f"http://{host}":
        return f"Only the page of this server may use it; the request came from {origin}."
    opened = method == "GET" and path == "/" and headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not opened:
        return "Only the page of this server may use it; the request came from another page."
    return ""
