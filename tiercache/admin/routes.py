"""HTTP to `Control` and back: translation only.

    GET  /v1/status           Status
    POST /v1/where            Paths -> WhereAnswer
    POST /v1/refresh          Paths -> RefreshAnswer
    POST /v1/pin              PinRequest -> PinAnswer
    POST /v1/unpin            Paths -> Unpinned
    GET  /v1/pins             Pins
    POST /v1/pins/progress    Paths -> PinProgress
    POST /v1/evict            EvictRequest -> JobStarted
    POST /v1/scrub            ScrubRequest -> JobStarted
    POST /v1/rebuild-index    JobStarted
    GET  /v1/jobs/NUMBER      JobStatus
    GET  /v1/targets          TargetsAnswer
    POST /v1/stop             Stopping
    POST /v1/upgrade          HandingOver
    GET  /metrics             Prometheus text

An error is an `ErrorAnswer` with the status of its class. Anything else that is raised is a bug: the
server answers 500 without details and logs the traceback; the mount goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tiercache.admin.control import Control
from tiercache.admin.messages import (
    ErrorAnswer,
    EvictRequest,
    Failure,
    Paths,
    PinRequest,
    RefreshAnswer,
    ScrubRequest,
    Stopping,
    WhereAnswer,
    decode,
    encode,
)
from tiercache.errors import AccessDenied, NotFound, TiercacheError, Unavailable, UsageError, VersionChanged

MAX_BODY_BYTES = 4 * 1024 * 1024  # more than all the paths that one command line can hold (ARG_MAX is 2 MiB)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STATUS_CODES: tuple[tuple[type[TiercacheError], int], ...] = (
    (UsageError, 400),
    (AccessDenied, 403),
    (NotFound, 404),
    (VersionChanged, 409),
    (Unavailable, 503),
)

Body = TypeVar("Body", bound=msgspec.Struct)
Found = TypeVar("Found")
Endpoint = Callable[[Request], Awaitable[Response]]


def admin_app(control: Control) -> Starlette:
    """Everything, for the unix socket."""

    async def status(_: Request) -> Response:
        return _answer(control.status())

    async def where(request: Request) -> Response:
        found, failures = await _each(await _body(request, Paths), control.where)
        return _answer(WhereAnswer(found, failures))

    async def refresh(request: Request) -> Response:
        refreshed, failures = await _each(await _body(request, Paths), control.refresh)
        return _answer(RefreshAnswer(refreshed, failures))

    async def pin(request: Request) -> Response:
        return _answer(await control.pin(await _body(request, PinRequest)))

    async def unpin(request: Request) -> Response:
        return _answer(await control.unpin((await _body(request, Paths)).paths))

    async def pins(_: Request) -> Response:
        return _answer(control.pins())

    async def progress(request: Request) -> Response:
        return _answer(await control.pin_progress((await _body(request, Paths)).paths))

    async def stop(_: Request) -> Response:
        present = control.status()
        await control.stop()
        return _answer(Stopping(present.pid, present.mountpoint))

    async def upgrade(_: Request) -> Response:
        return _answer(await control.hand_over())

    return _application(
        [
            Route("/v1/status", status, methods=["GET"]),
            Route("/v1/where", where, methods=["POST"]),
            Route("/v1/refresh", refresh, methods=["POST"]),
            Route("/v1/pin", pin, methods=["POST"]),
            Route("/v1/unpin", unpin, methods=["POST"]),
            Route("/v1/pins", pins, methods=["GET"]),
            Route("/v1/pins/progress", progress, methods=["POST"]),
            Route("/v1/stop", stop, methods=["POST"]),
            Route("/v1/upgrade", upgrade, methods=["POST"]),
            *_work_routes(control),
            _metrics_route(control),
        ]
    )


def _work_routes(control: Control) -> list[Route]:
    async def evict(request: Request) -> Response:
        return _answer(control.work.evict(await _body(request, EvictRequest)))

    async def scrub(request: Request) -> Response:
        return _answer(control.work.scrub(await _body(request, ScrubRequest)))

    async def rebuild_index(_: Request) -> Response:
        return _answer(control.work.rebuild_index())

    async def job(request: Request) -> Response:
        return _answer(control.work.job(request.path_params["number"]))

    async def targets(_: Request) -> Response:
        return _answer(control.work.targets())

    return [
        Route("/v1/evict", evict, methods=["POST"]),
        Route("/v1/scrub", scrub, methods=["POST"]),
        Route("/v1/rebuild-index", rebuild_index, methods=["POST"]),
        Route("/v1/jobs/{number:int}", job, methods=["GET"]),
        Route("/v1/targets", targets, methods=["GET"]),
    ]


def metrics_app(control: Control) -> Starlette:
    """Only `/metrics`: what any user of the machine may read over loopback TCP."""
    return _application([_metrics_route(control)])


def _metrics_route(control: Control) -> Route:
    async def metrics(_: Request) -> Response:
        return Response(control.metrics(), headers={"content-type": METRICS_TYPE})

    return Route("/metrics", metrics, methods=["GET"])


def _application(routes: list[Route]) -> Starlette:
    return Starlette(routes=routes, exception_handlers={TiercacheError: _refused, HTTPException: _not_served})


async def _each(request: Paths, ask: Callable[[str], Awaitable[Found]]) -> tuple[list[Found], list[Failure]]:
    """One after the other: an operator's question must not become a burst of requests to the store."""
    found: list[Found] = []
    failures: list[Failure] = []
    for path in request.paths:
        try:
            found.append(await ask(path))
        except TiercacheError as error:
            failures.append(Failure(path, type(error).__name__, str(error), error.hint))
    return found, failures


async def _body(request: Request, kind: type[Body]) -> Body:
    raw = bytearray()
    async with aclosing(request.stream()) as pieces:
        async for piece in pieces:
            raw += piece
            if len(raw) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the request is longer than {MAX_BODY_BYTES} bytes")
    try:
        return decode(bytes(raw), kind)
    except ValueError as error:
        raise UsageError(f"the request to {request.url.path} is not a {kind.__name__}: {error}") from error


def _answer(message: msgspec.Struct) -> Response:
    return Response(encode(message), media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, TiercacheError)
    code = next((code for kind, code in _STATUS_CODES if isinstance(error, kind)), 500)
    message = ErrorAnswer(str(error), error.hint, type(error).__name__)
    return Response(encode(message), status_code=code, media_type="application/json")


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = ErrorAnswer(f"{request.method} {request.url.path}: {error.detail}", kind=UsageError.__name__)
    return Response(encode(message), status_code=error.status_code, headers=error.headers, media_type="application/json")
