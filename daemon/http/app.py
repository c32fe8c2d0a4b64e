"""Handles requests: one handler for each endpoint, within limits that protect the node.

``_guarded`` surrounds every handler. It checks who asks, how many ask at once and how long it
takes, and it turns errors into JSON. Handlers of the API take values from ``ClusterReader``; each
change opens a session of its own, one after the other.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog
from aiohttp import web

from daemon.admin_session import AdminSession
from daemon.cli.hold import read_hold
from daemon.cli.option_types import parse_duration_s
from daemon.cli.switch import set_recovery_delay
from daemon.http import api, changes, java, openapi
from daemon.http.access import Access, Refusal
from daemon.http.changes import UnknownBookieError, WrongRequestError
from daemon.http.cluster_reader import ClusterReader, OpenCluster, Reading
from daemon.http.connections import CONNECTION
from daemon.http.endpoints import (
    DELAY_MAX_S,
    ENDPOINTS,
    EVENTS_MAX,
    HISTORY_DEFAULT_S,
    HISTORY_MAX_S,
    Endpoint,
    Kind,
)
from daemon.http.health import alive, ready
from daemon.http.live import LivePage
from daemon.http.metrics import HTTP_S, MetricsText
from daemon.http.records import (
    DrainOrderRecord,
    ErrorRecord,
    HealthRecord,
    HoldOrderRecord,
    MaintenanceOrderRecord,
)
from daemon.http.tls import has_certificate
from daemon.role_state import NodeService
from daemon.settings import Settings
from daemon.status.report import to_json
from ledgers.clock import SystemClock
from ledgers.codec.registration import parse_bookie_id
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    CorruptionError,
    RejectedError,
    SessionLostError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
)
from ledgers.model import BookieId
from ledgers.tasks import in_daemon_thread
from replication import history

log = structlog.get_logger()

T = TypeVar("T")
Start = Callable[[Coroutine[Any, Any, None]], object]
Handler = Callable[[web.Request], Awaitable[web.Response]]

BODY_BYTES_MAX = 65_536
REQUESTS_MAX = 32
"""Requests to the API that are handled at a time. Further ones get 503."""
REQUEST_S = 15.0
CHANGE_S = 45.0
"""Time limits of a request. Before a maintenance window begins, metadata may be read for 15 s."""
RETRY_AFTER_S = 2
BOOKIES_MAX = 100
"""Bookies in one request of BookKeeper's path for recovery."""
JSON = "application/json"
HEADERS_OF_BROWSERS = ("Origin", "Sec-Fetch-Site")
"""Browsers send one of them with each request that changes something."""
TRUE_OR_FALSE = ("true", "false")


class App:
    """The handlers, and what they share."""

    def __init__(
        self,
        settings: Settings,
        roles: Sequence[NodeService],
        *,
        reader: ClusterReader,
        open_cluster: OpenCluster,
        start: Start,
    ) -> None:
        """``open_cluster``: opens a session for one change. ``start``: starts work that goes on
        after its request."""
        self._settings = settings
        self._roles = roles
        self._reader = reader
        self._open_cluster = open_cluster
        self._start = start
        self._decommissioning: tuple[BookieId, ...] = ()
        self._access = Access(settings.http, observes=settings.node.mode == "observe")
        self._metrics_text = MetricsText([each.state for each in roles])
        self._started_ms = SystemClock().wall_ms()
        self._at_work_count = 0
        self._changing = asyncio.Lock()

    def build(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._answer_unrouted])
        for endpoint in ENDPOINTS:
            handler = getattr(self, f"_{endpoint.name}")
            guarded = self._guarded(endpoint, handler)
            app.router.add_route(endpoint.method, endpoint.path, guarded)
            if endpoint.method == "GET":
                app.router.add_route("HEAD", endpoint.path, guarded)
        # As Java's server does: any other method is answered with 404 and a sentence.
        java_paths: dict[str, list[str]] = {}
        for endpoint in ENDPOINTS:
            if endpoint.kind is Kind.JAVA:
                java_paths.setdefault(endpoint.path, []).append(endpoint.method)
        for path, methods in java_paths.items():
            app.router.add_route("*", path, _wrong_method(methods))
        page = LivePage(self._settings, self._roles, reader=self._reader, access=self._access)
        page.add_to(app)
        app.on_response_prepare.append(_add_headers)
        return app

    # --- Limits and errors ------------------------------------------------------------------------

    def _guarded(self, endpoint: Endpoint, handler: Handler) -> Handler:
        """Return the handler within the limits, with errors turned into answers."""
        is_limited = endpoint.kind in (Kind.API, Kind.JAVA)
        time_max_s = CHANGE_S if endpoint.changes else REQUEST_S
        seconds = HTTP_S.labels(endpoint=endpoint.kind.value)

        async def guarded(request: web.Request) -> web.Response:
            began_s = time.perf_counter()
            self._at_work_count += is_limited
            try:
                self._access.check_host(request.headers.get("Host", ""))
                async with asyncio.timeout(time_max_s):
                    if is_limited:
                        await self._check_access(endpoint, request)
                    if is_limited and self._at_work_count > REQUESTS_MAX:
                        raise UnavailableError("too many requests at a time. Try again later")
                    if endpoint.kind is Kind.API:
                        _check_parameters(request, endpoint)
                    if endpoint.changes and CONNECTION in request:
                        request[CONNECTION].changes = True
                    response = await handler(request)
            except TimeoutError:
                response = _error(503, "the request took too long. Try again later")
            except web.HTTPException:  # the body is too large
                raise
            except Exception as error:
                response = _answer_to(error, endpoint)
            finally:
                self._at_work_count -= is_limited
                seconds.observe(time.perf_counter() - began_s)
            if endpoint.changes and response.status == 200:
                log.info("http.changed", endpoint=endpoint.name, path=request.path_qs)
            return response

        return guarded

    async def _check_access(self, endpoint: Endpoint, request: web.Request) -> None:
        """Check the token. Raises Refusal."""
        authorization, is_known = request.headers.get("Authorization", ""), has_certificate(request)
        await self._access.refresh(authorization)
        if endpoint.changes:
            is_of_browser = not request.headers.keys().isdisjoint(HEADERS_OF_BROWSERS)
            self._access.check_change(
                authorization, has_certificate=is_known, is_of_browser=is_of_browser
            )
        else:
            self._access.check_read(authorization, has_certificate=is_known)

    @web.middleware
    async def _answer_unrouted(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer requests that have no handler (404, 405), and bodies that are too large, as
        JSON."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            told = f"{error.status}: {error.reason}. /api/v1/openapi.json lists all paths"
            if isinstance(error, web.HTTPRequestEntityTooLarge):
                told = f"the body is too large. Send at most {BODY_BYTES_MAX:,} bytes"
            return _error(error.status, told, headers=headers)

    # --- Node -------------------------------------------------------------------------------------

    async def _metrics(self, request: web.Request) -> web.Response:
        text, content_type = self._metrics_text.text(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _healthz(self, request: web.Request) -> web.Response:
        return _health(alive(self._roles))

    async def _readyz(self, request: web.Request) -> web.Response:
        return _health(ready(self._roles))

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=openapi.document(), content_type=JSON)

    async def _node(self, request: web.Request) -> web.Response:
        return _json(api.node_record(self._settings, self._roles, started_ms=self._started_ms))

    # --- Reading ----------------------------------------------------------------------------------

    async def _read_status(self) -> Reading:
        return await self._reader.read("status", api.read_status)

    async def _status(self, request: web.Request) -> web.Response:
        return _body(await (await self._read_status()).json("status", to_json))

    async def _conditions(self, request: web.Request) -> web.Response:
        return _body(await (await self._read_status()).json("conditions", api.conditions_record))

    async def _blocked(self, request: web.Request) -> web.Response:
        return _body(await (await self._read_status()).json("blocked", api.blocked_ledgers_record))

    async def _bookies(self, request: web.Request) -> web.Response:
        return await self._read_json("bookies", api.read_bookies)

    async def _queue(self, request: web.Request) -> web.Response:
        return await self._read_json("queue", api.read_queue)

    async def _checks(self, request: web.Request) -> web.Response:
        return await self._read_json("checks", api.read_checks_record)

    async def _hold(self, request: web.Request) -> web.Response:
        return await self._read_json("hold", _hold_record)

    async def _history(self, request: web.Request) -> web.Response:
        since_s, limit, kinds = _since_s(request), _limit(request), _event_kinds(request)
        recorded = (await api.read_recent_history(self._reader, since_s)).value
        make = partial(
            api.recent_history_record, recorded, since_s=since_s, kinds=kinds, limit=limit
        )
        return await in_daemon_thread(lambda: _json(make()))

    async def _read_json(
        self, name: str, read: Callable[[AdminSession], Awaitable[Any]]
    ) -> web.Response:
        reading = await self._reader.read(name, read)
        return _body(await reading.json(name, lambda value: value))

    # --- Changing ---------------------------------------------------------------------------------

    async def _change(self, change: Callable[[AdminSession], Awaitable[T]]) -> T:
        """Run a change in a session of its own. Readings from before are forgotten."""
        async with self._changing:
            try:
                return await self._reader.on_thread(self._changed(change))
            finally:
                self._reader.forget()

    async def _changed(self, change: Callable[[AdminSession], Awaitable[T]]) -> T:
        async with self._changing_session() as cluster:
            return await change(cluster)

    @asynccontextmanager
    async def _changing_session(self) -> AsyncIterator[AdminSession]:
        """Open a session whose orders the history tells as given over HTTP to this host."""
        async with self._open_cluster() as cluster:
            yield replace(cluster, by=f"http@{socket.gethostname()}")

    async def _begin_hold(self, request: web.Request) -> web.Response:
        order = await _order(request, HoldOrderRecord)
        return _json((await self._change(lambda c: changes.begin(c, order))).to_json())

    async def _end_hold(self, request: web.Request) -> web.Response:
        accepts = _flag(request, "accept_lost")
        return _json((await self._change(lambda c: changes.end(c, accepts_lost=accepts))).to_json())

    async def _disable(self, request: web.Request) -> web.Response:
        return _json(await self._change(changes.disable))

    async def _enable(self, request: web.Request) -> web.Response:
        return _json(await self._change(changes.enable))

    async def _begin_drain(self, request: web.Request) -> web.Response:
        bookie, order = _bookie(request), await _order(request, DrainOrderRecord)
        return _json(await self._change(lambda c: changes.begin_drain(c, bookie, order)))

    async def _end_drain(self, request: web.Request) -> web.Response:
        bookie = _bookie(request)
        return _json(await self._change(lambda c: changes.end_drain(c, bookie)))

    async def _begin_maintenance(self, request: web.Request) -> web.Response:
        bookie, order = _bookie(request), await _order(request, MaintenanceOrderRecord)
        return _json(await self._change(lambda c: changes.begin_maintenance(c, bookie, order)))

    async def _end_maintenance(self, request: web.Request) -> web.Response:
        bookie = _bookie(request)
        return _json(await self._change(lambda c: changes.end_maintenance(c, bookie)))

    # --- BookKeeper's own paths -------------------------------------------------------------------

    async def _java_status(self, request: web.Request) -> web.Response:
        enabled = (await self._reader.read("java_status", java.is_enabled)).value
        return _java_json({"enabled": enabled})

    async def _java_set_status(self, request: web.Request) -> web.Response:
        given = request.query.get("enabled")
        if given is None:
            return web.Response(text="Param 'enabled' not found in {}", status=400)
        if given.lower() not in TRUE_OR_FALSE:
            told = f"Param 'enabled' must be true or false, not {given!r}"
            return web.Response(text=told, status=400)
        wanted = given.lower() == "true"
        enabled = await self._change(lambda c: java.set_enabled(c, wanted))
        return _java_json({"enabled": enabled})

    async def _java_list_marked(self, request: web.Request) -> web.Response:
        query = request.query
        including = query.get("missingreplica", "").strip()
        excluding = query.get("excludingmissingreplica", "").strip()
        shows_missing = "printmissingreplica" in query
        if not (including or excluding or shows_missing):
            ledger_ids = (await self._reader.read("java_marked", java.read_marked)).value
            make = partial(java.marked_text, ledger_ids)
        else:
            marks = (await self._reader.read("java_marks", java.read_all_marks)).value
            make = partial(
                java.chosen_text,
                marks,
                including=including,
                excluding=excluding,
                shows_missing=shows_missing,
            )
        text = await in_daemon_thread(make)
        if not text:
            return web.Response(text=java.NO_LEDGERS, status=404)
        return web.Response(text=text, content_type=JSON)

    async def _java_auditor(self, request: web.Request) -> web.Response:
        leader = (await self._reader.read("java_auditor", java.leader)).value
        if leader is None:
            return web.Response(text=java.NO_LEADER, status=404)
        return web.Response(text=f"Auditor: {leader}")

    async def _java_trigger_audit(self, request: web.Request) -> web.Response:
        refusal = await self._change(java.trigger_audit)
        if refusal:
            return web.Response(text=f"Exception when do operation.{refusal}", status=404)
        return web.Response(text=java.AUDIT_ASKED)

    async def _java_delay(self, request: web.Request) -> web.Response:
        delay_s = (await self._reader.read("java_delay", java.recovery_delay_s)).value
        if delay_s is None:
            told = "Exception when get lostBookieRecoveryDelay.no readable znode"
            return web.Response(text=told, status=404)
        return web.Response(text=f"lostBookieRecoveryDelay value: {delay_s}")

    async def _java_set_delay(self, request: web.Request) -> web.Response:
        order = await _order(request, dict[str, Any])
        delay_s = order.get("delay_seconds")
        if type(delay_s) is not int or not 0 <= delay_s <= DELAY_MAX_S:
            raise WrongRequestError('the body must be {"delay_seconds": SECONDS}')
        await self._change(lambda c: set_recovery_delay(c, delay_s))
        return web.Response(text=f"Success set lostBookieRecoveryDelay to {delay_s}")

    async def _java_decommission(self, request: web.Request) -> web.Response:
        order = await _order(request, dict[str, Any])
        bookie, deletes_cookie = _bookie_id(order.get("bookie_src")), _deletes_cookie(order)
        refusal = await self._begin_decommission([bookie], deletes_cookie=deletes_cookie)
        if refusal:
            told = f"Exception when send decommission command.{refusal}"
            return web.Response(text=told, status=404)
        return web.Response(text=f"Success send decommission Bookie command {bookie}")

    async def _java_recover(self, request: web.Request) -> web.Response:
        order = await _order(request, dict[str, Any])
        given, destinations = order.get("bookie_src"), order.get("bookie_dest", [])
        if not (isinstance(given, list) and 0 < len(given) <= BOOKIES_MAX):
            raise WrongRequestError(f"bookie_src: a list of 1 to {BOOKIES_MAX} bookie IDs")
        if not isinstance(destinations, list):
            raise WrongRequestError("bookie_dest: a list, which is ignored")
        bookies, deletes_cookie = [_bookie_id(each) for each in given], _deletes_cookie(order)
        refusal = await self._begin_decommission(bookies, deletes_cookie=deletes_cookie)
        if refusal:
            return web.Response(text=f"Exception when do operation.{refusal}", status=404)
        return web.Response(text=java.RECOVERY_SENT)

    async def _begin_decommission(
        self, bookies: Sequence[BookieId], *, deletes_cookie: bool
    ) -> str:
        """Start the work on stopped bookies. Return why that is impossible; empty if it began."""
        for bookie in bookies:
            if refusal := await self._change(partial(java.check_stopped, bookie=bookie)):
                return refusal
        if self._decommissioning:
            names = ", ".join(self._decommissioning)
            return f"the work on {names} is not done. Try again when it is"
        self._decommissioning = tuple(bookies)
        self._start(self._decommission(bookies, deletes_cookie=deletes_cookie))
        return ""

    async def _decommission(self, bookies: Sequence[BookieId], *, deletes_cookie: bool) -> None:
        """Work until the bookies are decommissioned, or cannot be. It ends with the node; then ask
        again."""
        try:
            for bookie in bookies:
                decommission = partial(
                    java.decommission, bookie=bookie, deletes_cookie=deletes_cookie
                )
                await self._reader.on_thread(self._changed(decommission))
        except BookmenderError as error:
            log.warning("decommission.failed", bookie=bookie, error=str(error))
        except Exception:  # a defect must not end the server
            log.exception("http.crashed", endpoint="java_decommission")
        finally:
            self._decommissioning = ()
            self._reader.forget()

    async def _java_list_bookies(self, request: web.Request) -> web.Response:
        view = (await self._reader.read("java_bookies", java.read_view)).value
        return _java_json(
            java.bookies(
                view,
                read_only=request.query.get("type") == "ro",
                with_hosts=request.query.get("print_hostnames") == "true",
            )
        )


async def _hold_record(cluster: AdminSession) -> dict[str, Any]:
    return (await read_hold(cluster, clock=SystemClock())).to_json()


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
        case UnavailableError() | SessionLostError() | UnauthorizedError() | UnsupportedError():
            return _error(503, str(error), headers={"Retry-After": str(RETRY_AFTER_S)})
        case ConflictError():
            return _error(409, f"another client changed it at the same time. Try again ({error})")
        case RejectedError() | SettingsError():
            return _error(409, str(error))
        case BookmenderError():
            return _error(500, str(error))
    log.exception("http.crashed", endpoint=endpoint.name)
    return _error(500, "a defect in bookmender; the log has more")


def _error(status: int, text: str, *, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(ErrorRecord(error=text)),
        status=status,
        content_type=JSON,
        headers=headers or {},
    )


def _json(value: Any) -> web.Response:
    return _body(msgspec.json.encode(value))


def _body(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=JSON)


def _java_json(value: Any) -> web.Response:
    return web.Response(text=java.to_json(value), content_type=JSON)


def _health(record: HealthRecord) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(record), status=200 if record.is_ok else 503, content_type=JSON
    )


def _bookie(request: web.Request) -> BookieId:
    return _bookie_id(request.match_info["bookie"])


def _bookie_id(given: object) -> BookieId:
    """Return the bookie ID that a request names. Raises WrongRequestError."""
    try:
        return parse_bookie_id(str(given or ""))
    except CorruptionError as error:
        raise WrongRequestError("the request names no bookie ID, as in 10.0.0.1:3181") from error


def _deletes_cookie(order: dict[str, Any]) -> bool:
    given = str(order.get("delete_cookie", "false")).lower()
    if given not in TRUE_OR_FALSE:
        raise WrongRequestError("delete_cookie: true or false")
    return given == "true"


def _flag(request: web.Request, name: str) -> bool:
    given = request.query.get(name, "false")
    if given not in TRUE_OR_FALSE:
        raise WrongRequestError(f"{name}: true or false")
    return given == "true"


def _since_s(request: web.Request) -> int:
    if "since" not in request.query:
        return HISTORY_DEFAULT_S
    try:
        since_s = parse_duration_s(request.query["since"])
    except ValueError as error:
        raise WrongRequestError(f"since: {error}") from error
    if since_s > HISTORY_MAX_S:
        raise WrongRequestError(
            "since: at most 7d. For a longer period run `bookmender history --since 30d`."
        )
    return since_s


def _limit(request: web.Request) -> int:
    given = request.query.get("limit", str(EVENTS_MAX))
    # Python refuses to convert a number of very many digits.
    is_short = given.isascii() and given.isdecimal() and len(given) <= len(str(EVENTS_MAX))
    if not (is_short and 1 <= int(given) <= EVENTS_MAX):
        raise WrongRequestError(f"limit: a number from 1 to {EVENTS_MAX}")
    return int(given)


def _event_kinds(request: web.Request) -> list[str]:
    kinds, known = request.query.getall("kind", []), [kind.value for kind in history.Kind]
    if not set(kinds) <= set(known):
        raise WrongRequestError(f"kind: one of {', '.join(known)}")
    return kinds


def _check_parameters(request: web.Request, endpoint: Endpoint) -> None:
    """Refuse parameters that the endpoint does not have: a misspelled one would be ignored. Raises
    WrongRequestError."""
    known = [each.name for each in endpoint.parameters if not each.in_path]
    if unknown := [name for name in request.query if name not in known]:
        raise WrongRequestError(
            f"there is no parameter {unknown[0]!r}. This path has {', '.join(known) or 'none'}."
        )


async def _order(request: web.Request, kind: type[T]) -> T:
    """Return the body of the request. An empty one is an empty object. Raises WrongRequestError."""
    try:
        given = msgspec.json.decode(await request.read() or b"{}")
        if isinstance(given, dict):  # JSON knows one kind of number: 60.0 is the integer 60
            given = {
                key: int(value) if isinstance(value, float) and value.is_integer() else value
                for key, value in given.items()
            }
        return msgspec.convert(given, kind)
    except (ValueError, RecursionError) as error:  # deep nesting is a RecursionError
        raise WrongRequestError(f"the body is wrong: {error}") from error


def _wrong_method(methods: Sequence[str]) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        told = java.WRONG_METHOD.format(" or ".join(sorted(methods)))
        return web.Response(text=told, status=404)

    return answer


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "bookmender"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cache-Control"] = "no-store"
