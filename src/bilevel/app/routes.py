"""The addresses of the page: its files, the pictures on the desk, and what can be done with them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from bilevel.app.desk import Desk
from bilevel.app.guard import Guard
from bilevel.errors import BilevelError

PAGE = Path(__file__).parent / "page"
# The switch between light and dark is that of the report.
THEME = Path(__file__).parent.parent / "report" / "templates" / "theme.js"
FILES = {
    "": PAGE / "index.html",
    "theme.js": THEME,
    **{file.name: file for file in sorted(PAGE.iterdir()) if file.suffix in (".css", ".js", ".svg")},
}
# The name of a picture's file, and that of a new class; percent-encoded, because headers are ASCII.
PICTURE_NAME, CLASS_NAME = "x-picture-name", "x-class-name"

Work = Callable[[Desk, Request, bytes], Any]


def application(desk: Desk) -> Starlette:
    """The page of a desk as an ASGI application."""

    def does(work: Work) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            body = await request.body()
            try:
                done = await run_in_threadpool(work, desk, request, body)
            except BilevelError as error:
                return JSONResponse({"error": str(error)}, 400)
            return done if isinstance(done, Response) else JSONResponse(done)

        return endpoint

    def changes(work: Work) -> Callable[[Request], Awaitable[Response]]:
        """Work whose answer is the new state of the page, and the number of what was made."""

        def then(desk: Desk, request: Request, body: bytes) -> dict[str, Any]:
            made = work(desk, request, body)
            return {**desk.state(), "made": made}

        return does(then)

    return Starlette(
        routes=[
            Route("/state", does(lambda desk, request, body: desk.state())),
            Route("/settings", changes(_settings), methods=["PUT"]),
            Route("/ask", does(lambda desk, request, body: desk.ask(body, _name(request))), methods=["POST"]),
            Route("/classes", changes(_new_class), methods=["POST"]),
            Route("/classes", changes(lambda desk, request, body: desk.clear()), methods=["DELETE"]),
            Route("/classes/{number:int}", changes(_rename), methods=["PUT"]),
            Route(
                "/classes/{number:int}",
                changes(lambda desk, request, body: desk.remove_class(request.path_params["number"])),
                methods=["DELETE"],
            ),
            Route("/classes/{number:int}/pictures", changes(_new_picture), methods=["POST"]),
            Route("/pictures/{number:int}/{kind}.png", does(_picture)),
            Route(
                "/pictures/{number:int}",
                changes(lambda desk, request, body: desk.remove_picture(request.path_params["number"])),
                methods=["DELETE"],
            ),
            Route("/undo", changes(lambda desk, request, body: desk.undo()), methods=["POST"]),
            Route("/classifier.safetensors", does(_classifier)),
            Route("/{file}", _file),
            Route("/", _file),
        ],
        middleware=[Middleware(Guard, most_bytes=desk.limits.picture_bytes)],
        exception_handlers={HTTPException: _http_error},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse({"error": f"{request.method} {request.url.path} is not known here."}, status)


async def _file(request: Request) -> Response:
    name = request.path_params.get("file", "")
    if name not in FILES:
        raise HTTPException(404)
    return FileResponse(FILES[name])


def _fields(body: bytes, **kinds: Any) -> dict[str, Any]:
    """The fields of a JSON object; None where one is missing."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BilevelError(f"The request is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise BilevelError("The request is not a JSON object.")
    for name, kind in kinds.items():
        value = values.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise BilevelError(f"The field {name} of the request is {str(value)[:40]!r}, which is of the wrong type.")
    return {name: values.get(name) for name in kinds}


def _name(request: Request) -> str:
    name = unquote(request.headers.get(PICTURE_NAME, ""))[-80:]
    return "".join(letter for letter in name if letter.isprintable()).strip() or "the picture"


def _settings(desk: Desk, request: Request, body: bytes) -> None:
    asked = _fields(body, model=str, rate=(int, float))
    known = desk.state()["models"]
    if asked["model"] is not None and asked["model"] not in known:
        raise BilevelError(f"There is no model {asked['model'][:80]!r} here; take one of {', '.join(known)}.")
    desk.choose(**asked)


def _new_class(desk: Desk, request: Request, body: bytes) -> int:
    return desk.add_class(unquote(request.headers.get(CLASS_NAME, "")), body, _name(request))


def _rename(desk: Desk, request: Request, body: bytes) -> None:
    desk.rename(request.path_params["number"], _fields(body, name=str)["name"] or "")


def _new_picture(desk: Desk, request: Request, body: bytes) -> int:
    return desk.add_picture(request.path_params["number"], body, _name(request))


def _picture(desk: Desk, request: Request, body: bytes) -> Response:
    kind = request.path_params["kind"]
    if kind not in ("shown", "seen"):
        raise BilevelError(f"A picture can be had as `shown` and as `seen`, and not as {kind[:20]!r}.")
    return Response(desk.shown(request.path_params["number"], seen=kind == "seen"), media_type="image/png")


def _classifier(desk: Desk, request: Request, body: bytes) -> Response:
    where = {"Content-Disposition": 'attachment; filename="my.safetensors"'}
    return Response(desk.saved(), media_type="application/octet-stream", headers=where)
