"""Serves the page for people at ``/``, and keeps open pages up to date by server-sent events.

One task reads the cluster for all pages, only while a page is open or was just asked for. It uses
the readings of ``ClusterReader``, so the page and the API show the same numbers. Each client gets
the sections that differ from what it was sent last. A client that cannot take a message in
``WRITE_S`` is disconnected; the browser connects again and gets all sections.
"""

from __future__ import annotations

import asyncio
import base64
import operator
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files

import msgspec
import structlog
from aiohttp import web

from daemon.admin_session import AdminSession
from daemon.cli.progress import Eta
from daemon.http import api, page
from daemon.http.access import Access, Refusal, is_from_this_host
from daemon.http.cluster_reader import ClusterReader, Reading
from daemon.http.health import ready
from daemon.http.metrics import package_version
from daemon.http.page import Sample, View
from daemon.http.tls import has_certificate
from daemon.operations.bookies import BookieRow, gather_bookies
from daemon.operations.checks import Checks, read_checks
from daemon.role_state import NodeService
from daemon.settings import Settings
from daemon.status.state import Status
from ledgers.clock import SystemClock
from ledgers.errors import BookmenderError
from ledgers.model import BookieId
from ledgers.tasks import in_daemon_thread
from replication.history import RecordedHistory
from replication.racks import remembered_racks

log = structlog.get_logger()

CLIENTS_MAX = 32
"""Open pages. Further ones are not live."""
REFRESH_S = 2.0
HEARTBEAT_S = 15.0
"""Also the time between two samples of the leader's queue while no page is open."""
WRITE_S = 10.0
FIRST_S = 0.12
"""How long the first view waits for a reading. After that, the page is served without it."""
FRESH_S = 5.0
WATCHED_S = 30.0
"""The cluster is read for this long after a page was asked for, even if no client stays."""
SAMPLE_GAP_MS = 2_000
SAMPLES_MAX = 3_600
"""Samples of the queue: at least two hours."""
FILES = {"page.css": "text/css", "page.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
ASK_PASSWORD = {"WWW-Authenticate": 'Basic realm="bookmender: the password is the token"'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """The data of the page besides the status."""

    bookies: Sequence[BookieRow]
    racks: dict[BookieId, str]
    checks: Checks


async def read_details(cluster: AdminSession) -> Details:
    clock = SystemClock()
    bookies, _ = await gather_bookies(cluster, clock=clock)
    return Details(
        bookies=bookies,
        racks=await remembered_racks(cluster.store, cluster.paths),
        checks=await read_checks(cluster, clock=clock),
    )


@dataclass(slots=True)
class QueueSamples:
    """The length of the queue over time, in memory. Times are wall-clock milliseconds."""

    _samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def add(self, ledger_count: int, *, time_ms: int) -> None:
        """Add a sample. It replaces the last one if that is close to the one before."""
        samples = self._samples
        if samples and time_ms <= samples[-1].time_ms:
            return
        if len(samples) > 1 and samples[-1].time_ms - samples[-2].time_ms < SAMPLE_GAP_MS:
            samples.pop()
        samples.append(Sample(time_ms=time_ms, ledger_count=ledger_count))

    def all(self) -> tuple[Sample, ...]:
        return tuple(self._samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The content of all pages. ``read_s``: when it was read, monotonic. ``parts``: markup by
    id."""

    title: str = "the cluster is being read"
    taken_ms: int | None = None
    problem: str | None = None
    read_s: float = float("-inf")
    parts: dict[str, str] = field(default_factory=dict)

    def message(self, sent: dict[str, str]) -> bytes:
        """Return the event that turns ``sent`` into ``parts``, and update ``sent``."""
        changed = {name: str(part) for name, part in self.parts.items() if sent.get(name) != part}
        sent.update(changed)
        state = {
            "title": self.title,
            "taken_ms": self.taken_ms,
            "problem": self.problem,
            "sections": changed,
        }
        return b"data: " + msgspec.json.encode(state) + b"\n\n"


class LivePage:
    """The handlers of the page, and the task that reads for them."""

    def __init__(
        self,
        settings: Settings,
        roles: Sequence[NodeService],
        *,
        reader: ClusterReader,
        access: Access,
    ) -> None:
        self._cluster = settings.metadata_service_uri
        self._roles = roles
        self._reader = reader
        self._access = access
        self._node = socket.gethostname(), os.getpid()
        self._samples, self._eta = QueueSamples(), Eta()
        self._read: tuple[Reading, ...] | None = None
        self._shown = Shown(parts={"notice": page.notice(problem=None, taken_ms=None)})
        self._asked, self._news = asyncio.Event(), asyncio.Event()
        self._watched_until_s = float("-inf")
        self._client_count = 0
        self._is_closing = False

    def add_to(self, app: web.Application) -> None:
        """Add the routes, and run the task while the application runs."""
        app.router.add_get("/", self._page)
        app.router.add_get("/events", self._events, allow_head=False)
        for name in FILES:
            _content(name)
            app.router.add_get(f"/{name}", self._file)
        app.cleanup_ctx.append(self._running)
        app.on_shutdown.append(self._close)

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _close(self, app: web.Application) -> None:
        """End the streams, so that no client delays the end of the server."""
        self._is_closing = True
        self._news.set()

    # --- Handlers ---------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        try:
            await self._check(request)
        except Refusal as refusal:
            return _refused(refusal)
        shown = await self._recent()
        text = page.document(
            shown.parts,
            title=f"{shown.title} - bookmender",
            cluster=self._cluster,
            node=self._node[0],
            version=package_version(),
        )
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.path.removeprefix("/")
        return web.Response(body=_content(name), content_type=FILES[name], charset="utf-8")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        try:
            await self._check(request)
        except Refusal as refusal:
            return _refused(refusal)
        if self._client_count >= CLIENTS_MAX:
            return web.Response(status=503, text="too many open pages")
        self._client_count += 1
        self._ask()
        response = web.StreamResponse(headers={**HEADERS, "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        try:
            async with asyncio.timeout(WRITE_S):
                await response.prepare(request)
            sent: dict[str, str] = {}
            while not self._is_closing:
                news = self._news
                await _write(response, self._shown.message(sent))
                while not await _is_set(news, within_s=HEARTBEAT_S):
                    await _write(response, b"event: beat\ndata: {}\n\n")
        except TimeoutError:  # the client does not read: free its buffer
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client has gone
        finally:
            self._client_count -= 1
        return response

    async def _check(self, request: web.Request) -> None:
        """Check as for reading the API. Raises Refusal."""
        self._access.check_host(request.headers.get("Host", ""))
        authorization = bearer(request.headers.get("Authorization", ""))
        await self._access.refresh(authorization)
        self._access.check_read(
            authorization,
            has_certificate=has_certificate(request),
            is_here=is_from_this_host(request.remote or "", request.headers),
        )

    # --- Reading ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read for the open pages until cancelled."""
        while True:
            if self._is_watched:
                await self._gather()
                await asyncio.sleep(REFRESH_S)
                continue
            self._asked.clear()
            self._sample_backlog()
            await _is_set(self._asked, within_s=HEARTBEAT_S)

    @property
    def _is_watched(self) -> bool:
        return self._client_count > 0 or time.monotonic() < self._watched_until_s

    def _ask(self) -> None:
        self._watched_until_s = time.monotonic() + WATCHED_S
        self._asked.set()

    async def _recent(self) -> Shown:
        """Return a recent state. If there is none in ``FIRST_S``, return the last one."""
        news = self._news
        self._ask()
        if time.monotonic() - self._shown.read_s > FRESH_S:
            await _is_set(news, within_s=FIRST_S)
        return self._shown

    def _sample_backlog(self) -> None:
        """Take the length of the queue from the leader, if it runs in this node. It costs
        nothing."""
        for each in self._roles:
            backlog = each.state.backlog
            size = None if backlog is None else backlog.size
            if size is not None:
                count = size.marked_count + size.private_count
                self._samples.add(count, time_ms=SystemClock().wall_ms())

    async def _gather(self) -> None:
        """Read and show the state, or why it cannot be read."""
        try:
            status = await self._reader.read("status", api.read_status)
            details = await self._reader.read("page", read_details)
            history = await api.read_recent_history(self._reader)
            read = status, details, history
            if self._read is None or any(map(operator.is_not, self._read, read)):
                self._read = read
                await self._show(status.value, details.value, history.value)
            else:
                self._publish(replace(self._shown, read_s=time.monotonic()))
        except BookmenderError as error:
            self._tell(str(error))
        except Exception:  # a defect in the page must not end the task
            log.exception("http.crashed", endpoint="page")
            self._tell("there is a defect in bookmender; the log has more")

    async def _show(self, status: Status, details: Details, history: RecordedHistory) -> None:
        queue = status.queue
        self._samples.add(queue.total, time_ms=status.taken_ms)
        remaining_s = self._eta.remaining_s(
            queue.total, now_s=status.taken_ms / 1000, waiting=queue.waiting_count
        )
        view = View(
            status=status,
            bookies=details.bookies,
            racks=details.racks,
            checks=details.checks,
            history=history,
            samples=self._samples.all(),
            remaining_s=remaining_s,
            node=self._node,
            node_problem=ready(self._roles).problem,
        )
        self._publish(await in_daemon_thread(partial(_shown, view)))

    def _tell(self, problem: str) -> None:
        """Keep the last state, and say why there is no newer one."""
        self._read = None
        notice = page.notice(problem=problem, taken_ms=self._shown.taken_ms)
        parts = {**self._shown.parts, "notice": notice}
        self._publish(replace(self._shown, problem=problem, parts=parts))

    def _publish(self, shown: Shown) -> None:
        self._shown = shown
        news, self._news = self._news, asyncio.Event()
        news.set()


def _shown(view: View) -> Shown:
    """Make the sections. With many notes of ledgers that takes a while."""
    taken_ms = view.status.taken_ms
    notice = page.notice(problem=None, taken_ms=taken_ms)
    return Shown(
        title=page.title_of(view.status),
        taken_ms=taken_ms,
        read_s=time.monotonic(),
        parts={**page.sections(view), "notice": notice},
    )


@cache  # the disk may hang later
def _content(name: str) -> bytes:
    return files("daemon.http").joinpath(name).read_bytes()


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_S):
        await response.write(data)


async def _is_set(event: asyncio.Event, *, within_s: float) -> bool:
    """Wait for the event, and return False if it was not set in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
    return event.is_set()


def bearer(authorization: str) -> str:
    """Return the header that ``Access`` expects. Browsers send a password, which is the token.

    Only reading the page accepts a password: browsers also send it with requests that another page
    makes, so it must not allow changes.
    """
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        return f"Bearer {base64.b64decode(given.strip(), validate=True).decode().partition(':')[2]}"
    except ValueError:  # neither base64 nor text
        return ""


def _refused(refusal: Refusal) -> web.Response:
    headers = {**HEADERS, **(ASK_PASSWORD if refusal.status == 401 else {})}
    return web.Response(text=f"{refusal}\n", status=refusal.status, headers=headers)
