"""The addresses of the page: its files, the pictures on the desk, and the actions."""

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
# The script that switches between light and dark is shared with the report.
THEME = Path(__file__).parent.parent / "report" / "templates" / "theme.js"
FILES = {
    "": PAGE / "index.html",
    "theme.js": THEME,
    **{file.name: file for file in sorted(PAGE.iterdir()) if file.suffix in (".css", ".js", ".svg")},
}
# Headers with the name of a picture's file and of a new class. They are percent-encoded, because headers are ASCII.
PICTURE_NAME, CLASS_NAME = "x-picture-name", "x-class-name"

Work = Callable[[Desk, Request, bytes], Any]


def application(desk: Desk) -> Starlette:
    """The ASGI application that serves the page of a desk."""

    def answers(work: Work) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that answers with the result of `work`, as JSON unless it is a response."""

        async def endpoint(request: Request) -> Response:
            body = await request.body()
            try:
                result = await run_in_threadpool(work, desk, request, body)
            except BilevelError as error:
                return JSONResponse({"error": str(error)}, 400)
            return result if isinstance(result, Response) else JSONResponse(result)

        return endpoint

    def changes(work: Work) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that answers with the new state of the page, and the result of `work` as `made`."""

        def with_state(desk: Desk, request: Request, body: bytes) -> dict[str, Any]:
            made = work(desk, request, body)
            return {**desk.state(), "made": made}

        return answers(with_state)

    return Starlette(
        routes=[
            Route("/state", answers(lambda desk, request, body: desk.state())),
            Route("/settings", changes(_settings), methods=["PUT"]),
            Route("/ask", answers(lambda desk, request, body: desk.ask(body, _name(request))), methods=["POST"]),
            Route("/classes", changes(_new_class), methods=["POST"]),
            Route("/classes", changes(lambda desk, request, body: desk.clear()), methods=["DELETE"]),
            Route("/classes/{number:int}", changes(_rename), methods=["PUT"]),
            Route(
                "/classes/{number:int}",
                changes(lambda desk, request, body: desk.remove_class(request.path_params["number"])),
                methods=["DELETE"],
            ),
            Route("/classes/{number:int}/pictures", changes(_new_picture), methods=["POST"]),
            Route("/pictures/{number:int}/{kind}.png", answers(_picture)),
            Route(
                "/pictures/{number:int}",
                changes(lambda desk, request, body: desk.remove_picture(request.path_params["number"])),
                methods=["DELETE"],
            ),
            Route("/undo", changes(lambda desk, request, body: desk.undo()), methods=["POST"]),
            Route("/classifier.safetensors", answers(_classifier)),
            Route("/{file}", _file),
            Route("/", _file),
        ],
        middleware=[Middleware(Guard, most_bytes=desk.limits.picture_bytes)],
        exception_handlers={HTTPException: _http_error},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse({"error": f"There is no {request.method} {request.url.path} on this server."}, status)


async def _file(request: Request) -> Response:
    name = request.path_params.get("file", "")
    if name not in FILES:
        raise HTTPException(404)
    return FileResponse(FILES[name])


def _fields(body: bytes, **kinds: Any) -> dict[str, Any]:
    """The fields of a JSON object; a missing field is None."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BilevelError(f"The request is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise BilevelError("The request is not a JSON object.")
    for name, kind in kinds.items():
        value = values.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise BilevelError(f"The field {name} of the request is {str(value)[:40]!r}, which has the wrong type.")
    return {name: values.get(name) for name in kinds}


def _name(request: Request) -> str:
    name = unquote(request.headers.get(PICTURE_NAME, ""))[-80:]
    return "".join(letter for letter in name if letter.isprintable()).strip() or "the picture"


def _settings(desk: Desk, request: Request, body: bytes) -> None:
    changes = _fields(body, model=str, rate=(int, float))
    models = desk.state()["models"]
    if changes["model"] is not None and changes["model"] not in models:
        raise BilevelError(f"There is no model {changes['model'][:80]!r}; choose one of {', '.join(models)}.")
    desk.choose(**changes)


def _new_class(desk: Desk, request: Request, body: bytes) -> int:
    return desk.add_class(unquote(request.headers.get(CLASS_NAME, "")), body, _name(request))


def _rename(desk: Desk, request: Request, body: bytes) -> None:
    desk.rename(request.path_params["number"], _fields(body, name=str)["name"] or "")


def _new_picture(desk: Desk, request: Request, body: bytes) -> int:
    return desk.add_picture(request.path_params["number"], body, _name(request))


def _picture(desk: Desk, request: Request, body: bytes) -> Response:
    kind = request.path_params["kind"]
    if kind not in ("shown", "seen"):
        raise BilevelError(f"There is no version {kind[:20]!r} of a picture; pass `shown` or `seen`.")
    return Response(desk.shown(request.path_params["number"], seen=kind == "seen"), media_type="image/png")


def _classifier(desk: Desk, request: Request, body: bytes) -> Response:
    headers = {"Content-Disposition": 'attachment; filename="my.safetensors"'}
    return Response(desk.saved(), media_type="application/octet-stream", headers=headers)
