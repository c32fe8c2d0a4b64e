"""Routes requests to their handlers, within limits that protect the node.

``_guarded`` surrounds every handler. It checks who asks, how many ask at once and how long it
takes, and it turns values and errors into answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import structlog
from aiohttp import web

from daemon.http import java
from daemon.http import openapi as _  # noqa: F401  # with it, all endpoints are defined
from daemon.http.access import Access, Refusal, check_request
from daemon.http.changes import UnknownBookieError, WrongRequestError
from daemon.http.cluster_reader import ClusterReader, NotReadError, OpenCluster
from daemon.http.connections import CONNECTION
from daemon.http.endpoints import ENDPOINTS, JSON, Endpoint, Kind, Shared, Start
from daemon.http.metrics import HTTP_S
from daemon.http.page import Page, unless_known
from daemon.http.records import ErrorRecord
from daemon.role_state import NodeService
from daemon.settings import Settings
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    RejectedError,
    SessionLostError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
)

log = structlog.get_logger()

Handler = Callable[[web.Request], Awaitable[web.Response]]

BODY_BYTES_MAX = 65_536
REQUESTS_MAX = 32
"""Requests to the API that are handled at a time. Further ones get 503."""
REQUEST_S = 15.0
CHANGE_S = 45.0
"""Time limits of a request. Before a maintenance window begins, metadata may be read for 15 s."""
RETRY_LATER = {"Retry-After": "2"}


class App:
    """The routes and their limits."""

    def __init__(
        self,
        settings: Settings,
        roles: Sequence[NodeService],
        *,
        reader: ClusterReader,
        open_cluster: OpenCluster,
        start: Start,
    ) -> None:
        self._shared = Shared(
            settings, roles, reader=reader, open_cluster=open_cluster, start=start
        )
        self._access = Access(settings.http, observes=settings.node.mode == "observe")
        self._at_work_count = 0

    def build(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_answer_unrouted])
        for endpoint in ENDPOINTS:
            guarded = self._guarded(endpoint)
            app.router.add_route(endpoint.method, endpoint.path, guarded)
            if endpoint.method == "GET":
                app.router.add_route("HEAD", endpoint.path, guarded)
        # As Java's server does: any other method is answered with 404 and a sentence.
        methods_of: dict[str, list[str]] = {}
        for endpoint in ENDPOINTS:
            if endpoint.kind is Kind.JAVA:
                methods_of.setdefault(endpoint.path, []).append(endpoint.method)
        for path, methods in methods_of.items():
            app.router.add_route("*", path, _wrong_method(methods))
        Page(self._access).add_to(app)
        app.on_response_prepare.append(_add_headers)
        return app

    def _guarded(self, endpoint: Endpoint) -> Handler:
        """Return the handler within the limits, with errors turned into answers."""
        time_max_s = CHANGE_S if endpoint.changes else REQUEST_S
        seconds = HTTP_S.labels(endpoint=endpoint.kind.value)

        async def guarded(request: web.Request) -> web.Response:
            began_s = time.perf_counter()
            self._at_work_count += endpoint.is_limited
            try:
                self._access.check_host(request.headers.get("Host", ""))
                async with asyncio.timeout(time_max_s):
                    if endpoint.is_limited:
                        await check_request(self._access, request, changes=endpoint.changes)
                    if endpoint.is_limited and self._at_work_count > REQUESTS_MAX:
                        raise UnavailableError("too many requests at a time. Try again later")
                    if endpoint.kind is Kind.API:
                        _check_parameters(request, endpoint)
                    if endpoint.changes and CONNECTION in request:
                        request[CONNECTION].changes = True
                    response = _answer(await endpoint.handler(self._shared, request))
                    if endpoint.kind is Kind.API and not endpoint.changes:
                        response = unless_known(request, response)
            except TimeoutError:
                response = _error(503, "the request took too long. Try again later")
            except web.HTTPException:  # the body is too large
                raise
            except Exception as error:
                response = _answer_to(error, endpoint)
            finally:
                self._at_work_count -= endpoint.is_limited
                seconds.observe(time.perf_counter() - began_s)
            if endpoint.changes and response.status == 200:
                log.info("http.changed", endpoint=endpoint.name, path=request.path_qs)
            return response

        return guarded


def _check_parameters(request: web.Request, endpoint: Endpoint) -> None:
    """Refuse parameters that the endpoint does not have: a misspelled one would be ignored. Raises
    WrongRequestError."""
    known = [each["name"] for each in endpoint.parameters if each["in"] == "query"]
    if unknown := [name for name in request.query if name not in known]:
        raise WrongRequestError(
            f"there is no parameter {unknown[0]!r}. This path has {', '.join(known) or 'none'}."
        )


def _answer(result: Any) -> web.Response:
    """Return the response of a handler's result: a response, JSON as bytes, or a value."""
    if isinstance(result, web.Response):
        return result
    body = result if isinstance(result, bytes) else msgspec.json.encode(result)
    return web.Response(body=body, content_type=JSON)


def _answer_to(error: Exception, endpoint: Endpoint) -> web.Response:
    """Return the answer to an error: what happened, and what to do."""
    match error:
        case Refusal():
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            return _error(error.status, str(error), headers=headers)
        case WrongRequestError():
            return _error(400, str(error))
        case UnknownBookieError():
            return _error(404, str(error))
        case NotReadError():
            return _error(503, str(error), headers=RETRY_LATER, taken_ms=error.taken_ms)
        case UnavailableError() | SessionLostError() | UnauthorizedError() | UnsupportedError():
            return _error(503, str(error), headers=RETRY_LATER)
        case ConflictError():
            return _error(409, f"another client changed it at the same time. Try again ({error})")
        case RejectedError() | SettingsError():
            return _error(409, str(error))
        case BookmenderError():
            return _error(500, str(error))
    log.exception("http.crashed", endpoint=endpoint.name)
    return _error(500, "a defect in bookmender; the log has more")


def _error(
    status: int,
    text: str,
    *,
    headers: dict[str, str] | None = None,
    taken_ms: int | None = None,
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(ErrorRecord(error=text, taken_ms=taken_ms)),
        status=status,
        content_type=JSON,
        headers=headers or {},
    )


@web.middleware
async def _answer_unrouted(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer requests that have no handler (404, 405), and bodies that are too large, as JSON."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        told = f"{error.status}: {error.reason}. /api/v1/openapi.json lists all paths"
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            told = f"the body is too large. Send at most {BODY_BYTES_MAX:,} bytes"
        return _error(error.status, told, headers=headers)


def _wrong_method(methods: Sequence[str]) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        told = java.WRONG_METHOD.format(" or ".join(sorted(methods)))
        return web.Response(text=told, status=404)

    return answer


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "bookmender"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.setdefault("Cache-Control", "no-store")
