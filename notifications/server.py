"""The server of notifications: connections, ticks and limits, over aiohttp.

Clients connect by WebSocket (``protocol``) at ``/v1/notifications``. Browsers and curl read the
same as server-sent events at ``/v1/events``. All clients are told in ticks of 10 ms, each the
latest version of what changed meanwhile. A client that reads too slowly is told later, and then
only the latest versions.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final
from uuid import uuid4

import msgspec
import structlog
from aiohttp import WSMsgType, web

from ledgers.errors import BookmenderError, CorruptionError, SettingsError
from ledgers.tasks import wait_woken
from notifications import metrics
from notifications.discovery import STALE_S, ClientRecord, ServerRecord
from notifications.following import Follower
from notifications.matcher import Matcher
from notifications.protocol import (
    FRAME_BYTES_MAX,
    SILENT_S,
    SUBPROTOCOL,
    Beat,
    Changes,
    Goodbye,
    Hello,
    Key,
    Refused,
    Register,
    ResumePoint,
    ServerFrame,
    Welcome,
    check_key,
    decode_client_frame,
    encode,
    published,
)
from notifications.session import Session

log = structlog.get_logger()

TICK_S: Final = 0.01
"""Time between two ticks while there is news: what changes meanwhile is told together."""
QUIET_TICK_S: Final = 0.1
ROUND_S: Final = 5.0
"""In this time each connection is looked at once, whether or not it is told something. Each tick
looks at a few of them: all at once would delay what is to be told."""
TOLD_AT_ONCE: Final = 100
"""Clients that are told something before others are heard."""
EVENTS_CHECK_S: Final = 1.0
HELLO_S: Final = 10.0
"""How long a connection may take to say hello."""
HELLOS_PER_S: Final = 1_000
HELLOS_PER_S_TLS: Final = 300
"""More have to wait, so that a storm of clients does not delay those that are connected."""
ADMISSION_S: Final = 8.0
"""A client that would wait longer is turned away: the library waits 10 s for an answer."""
CLIENTS_MAX: Final = 20_000
BUFFER_BYTES_MAX: Final = 65_536
"""A client that has not read so much is told later."""
CONGESTED_S: Final = 45.0
RETURN_S: Final = 5.0
"""Clients that are sent away come back spread over this time."""
DRAINED_PER_S: Final = 500
EVENT_KEYS_MAX: Final = 1_000

Authorize = Callable[[web.Request, bool], Awaitable[None]]
"""Raises ``web.HTTPException`` if a request is not allowed. True: it changes something."""


class Channel(ABC):
    """The connection of a client."""

    def __init__(self, request: web.Request, session: Session, now_s: float) -> None:
        self.request, self.session = request, session
        self.heard_s = self.sent_s = now_s
        self._transport = request.transport
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_congested(self) -> bool:
        if self._sending is not None and not self._sending.done():
            return True
        transport = self._transport
        return transport is None or transport.get_write_buffer_size() > BUFFER_BYTES_MAX

    async def send(self, frames: list[ServerFrame], now_s: float) -> None:
        """Send frames without waiting for a client that reads slowly."""
        data = [self.encode(frame) for frame in frames]
        self.sent_s = now_s
        is_small = sum(map(len, data)) < BUFFER_BYTES_MAX // 2
        if is_small and self._transport and not self._transport.get_write_buffer_size():
            await self._send(data)
        else:
            self._sending = asyncio.create_task(self._send(data))

    async def _send(self, data: list[bytes]) -> None:
        try:
            for each in data:
                await self.write(each)
        except (ConnectionError, RuntimeError):
            return  # the reader of the connection notices its end
        if self.session.goodbye is not None:
            await self.close()

    @abstractmethod
    def encode(self, frame: ServerFrame) -> bytes: ...

    @abstractmethod
    async def write(self, data: bytes) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class SocketChannel(Channel):
    """A WebSocket."""

    socket: web.WebSocketResponse

    def encode(self, frame: ServerFrame) -> bytes:
        return encode(frame)

    async def write(self, data: bytes) -> None:
        await self.socket.send_frame(data, _TEXT)

    async def close(self) -> None:
        await self.socket.close()


class EventChannel(Channel):
    """Server-sent events. The id of an event is the resume point, which browsers send again when
    they reconnect."""

    response: web.StreamResponse
    keys: Sequence[Key] = ()
    resume: ResumePoint | None = None
    feed = ""

    async def send(self, frames: list[ServerFrame], now_s: float) -> None:
        await super().send(frames, now_s)
        for frame in frames:
            if isinstance(frame, Welcome):
                known = self.resume.positions if self.resume and not frame.resync else {}
                add = [(key, known.get(key[:1], 0)) for key in self.keys]
                self.session.receive(Register(n=1, add=add, is_all=True), now_s)

    def encode(self, frame: ServerFrame) -> bytes:
        data = encode(frame).decode()
        if isinstance(frame, Welcome):
            self.feed = frame.feed
        name = frame.__struct_config__.tag
        event = f"event: {name}\ndata: {data}\n\n"
        if isinstance(frame, Changes) and frame.n is not None:
            event = f"id: {ResumePoint(self.feed, frame.positions)}\n{event}"
        return event.encode()

    async def write(self, data: bytes) -> None:
        await self.response.write(data)

    async def close(self) -> None:
        await self.response.write_eof()


_TEXT: Final = WSMsgType.TEXT


class NotificationServer:
    """Serves the clients of one matcher."""

    def __init__(
        self,
        follower: Follower,
        *,
        server: str,
        authorize: Authorize,
        has_tls: bool = False,
        clients_max: int = CLIENTS_MAX,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._follower, self._server, self._authorize = follower, server, authorize
        self._clock_s, self._clients_max = clock_s, clients_max
        self._channels: dict[Session, Channel] = {}
        self._hello_interval_s = 1 / (HELLOS_PER_S_TLS if has_tls else HELLOS_PER_S)
        self._admitted_s = 0.0
        """When the last of the clients that wait is admitted."""
        self.is_draining = False
        self.servers: Sequence[ServerRecord] = ()
        """All that live, as they said last."""
        self.opened_count = self.closed_count = 0
        """Of the clients' connections."""

    def build(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application(client_max_size=FRAME_BYTES_MAX)
        app.router.add_get("/v1/notifications", self._serve_socket)
        app.router.add_get("/v1/events", self._serve_events)
        app.router.add_get("/v1/servers", self._list_servers)
        app.router.add_get("/v1/clients", self._list_clients)
        app.router.add_get("/v1/objects/{key}", self._get_object)
        app.router.add_post("/v1/objects/{name}", self._publish)
        app.router.add_delete("/v1/objects/{name}", self._publish)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        return app

    # --- Ticks ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tell the clients what changes, until cancelled."""
        turn: Iterator[Channel] = iter(())
        round_s = now_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            await wait_woken(self._follower.news, timeout_s=QUIET_TICK_S)
            self._follower.news.clear()
            if (matcher := self._follower.matcher) is None:
                continue
            since_s, now_s = now_s, self._clock_s()
            if now_s - round_s >= ROUND_S:
                self._note(matcher, now_s)
                turn, round_s = iter(list(self._channels.values())), now_s
            due = {*matcher.dirty, *matcher.waiting}
            share = (now_s - since_s) / ROUND_S
            for channel in islice(turn, 1 + int(share * len(self._channels))):
                self._end_if_dead(channel, now_s)
                due.add(channel.session)
            for number, session in enumerate(due):
                found = self._channels.get(session)
                if found is not None and not found.is_congested:
                    await self._tick(found, now_s)
                if number % TOLD_AT_ONCE == TOLD_AT_ONCE - 1:
                    await asyncio.sleep(0)

    async def _tick(self, channel: Channel, now_s: float) -> None:
        try:
            frames = channel.session.tick(now_s)
        except Exception:  # what one client says must not end the server of all others
            log.exception("notify.client_failed", client=channel.session.client[:100])
            channel.abort()
            return
        if not frames:
            return
        for frame in frames:
            match frame:
                case Changes():
                    metrics.TOLD.inc(len(frame.changes))
                    if unknown := sum(change.version is None for change in frame.changes):
                        metrics.UNKNOWN.inc(unknown)
                case Welcome():
                    metrics.RESYNCS.inc(frame.resync)
                case Refused():
                    metrics.REFUSED.labels(code=frame.code).inc(len(frame.keys))
                case Goodbye():
                    metrics.GOODBYES.labels(code=frame.code).inc()
        metrics.FRAMES.inc(len(frames))
        await channel.send(frames, now_s)

    def _end_if_dead(self, channel: Channel, now_s: float) -> None:
        """End a connection that is silent or reads nothing."""
        is_stuck = channel.is_congested and now_s - channel.sent_s > CONGESTED_S
        if is_stuck or now_s - channel.heard_s > SILENT_S:
            metrics.GOODBYES.labels(code="slow" if is_stuck else "silent").inc()
            channel.abort()

    def _note(self, matcher: Matcher, now_s: float) -> None:
        """Note the metrics."""
        metrics.CLIENTS.set(len(matcher.sessions))
        metrics.REGISTRATIONS.set(len(matcher.holders))
        metrics.CONGESTED.set(sum(each.is_congested for each in self._channels.values()))
        metrics.AGE_S.set(matcher.age_s(now_s))
        for kind, table in matcher.tables.items():
            metrics.KNOWN.labels(kind=kind).set(len(table))

    def send_away(self, count: int, code: str) -> None:
        """Send some clients to other servers."""
        for session in random.sample(list(self._channels), min(count, len(self._channels))):
            retry_ms = 0 if code == "moved" else int(random.random() * RETURN_S * 1000)
            session.end(Goodbye(code=code, retry_after_ms=retry_ms))

    async def drain(self) -> None:
        """Send all clients away, before the end."""
        self.is_draining = True
        while self._channels:
            self.send_away(DRAINED_PER_S // 10, "draining")
            await asyncio.sleep(0.1)

    def record(self, url: str, started_ms: int, now_ms: int) -> ServerRecord:
        matcher = self._follower.matcher
        return ServerRecord(
            server=self._server,
            url=url,
            started_ms=started_ms,
            written_ms=now_ms,
            clients=len(self._channels),
            age_s=0.0 if matcher is None else round(matcher.age_s(self._clock_s()), 1),
            positions={} if matcher is None else matcher.positions,
        )

    # --- Clients ----------------------------------------------------------------------------------

    async def _serve_socket(self, request: web.Request) -> web.StreamResponse:
        matcher = await self._admit(request)
        socket = web.WebSocketResponse(
            protocols=(SUBPROTOCOL,), max_msg_size=FRAME_BYTES_MAX, compress=False, timeout=1.0
        )
        await socket.prepare(request)
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await _receive(socket)
            if not isinstance(hello, Hello):
                raise CorruptionError("the first frame is no hello")
        except (TimeoutError, CorruptionError) as error:
            metrics.REFUSED.labels(code="protocol").inc()
            await socket.send_frame(encode(Goodbye(code="protocol", text=str(error))), _TEXT)
            await socket.close()
            return socket
        session = matcher.open(hello, self._clock_s())
        channel = SocketChannel(request, session, self._clock_s())
        channel.socket = socket
        self._remember(channel)
        try:
            while (frame := await _receive(socket)) is not None:
                channel.heard_s = self._clock_s()
                session.receive(frame, channel.heard_s)
                if not isinstance(frame, Beat):
                    self._follower.news.set()
        except CorruptionError as error:
            session.end(Goodbye(code="protocol", text=str(error)))
            await self._tick(channel, self._clock_s())
        finally:
            self._forget(session)
        return socket

    async def _serve_events(self, request: web.Request) -> web.StreamResponse:
        """Register for the keys of the query. The connection counts as alive while it is open."""
        keys = request.query.getall("key", [])
        if not 0 < len(keys) <= EVENT_KEYS_MAX:
            raise web.HTTPBadRequest(text=f"name 1 to {EVENT_KEYS_MAX} objects: ?key=L1&key=L2")
        matcher = await self._admit(request)
        resume = request.headers.get("Last-Event-ID") or request.query.get("resume")
        session = matcher.open(Hello(client=str(uuid4()), resume=resume), self._clock_s())
        channel = EventChannel(request, session, self._clock_s())
        channel.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await channel.response.prepare(request)
        channel.keys, channel.resume = keys, ResumePoint.parse(resume) if resume else None
        self._remember(channel)
        try:
            while request.transport is not None and session.goodbye is None:
                channel.heard_s = self._clock_s()
                await asyncio.sleep(EVENTS_CHECK_S)
        finally:
            self._forget(session)
        return channel.response

    async def _admit(self, request: web.Request) -> Matcher:
        """Check a new client, and let it wait for its turn."""
        await self._authorize(request, False)
        matcher, now_s = self._follower.matcher, self._clock_s()
        turn_s = max(now_s, self._admitted_s + self._hello_interval_s)
        is_full = len(self._channels) >= self._clients_max
        is_busy = is_full or turn_s - now_s > ADMISSION_S
        if matcher is None or self.is_draining or is_busy:
            metrics.REFUSED.labels(code="busy" if is_busy else "not_ready").inc()
            raise web.HTTPServiceUnavailable(
                text="this server takes no client now; try again, or another one",
                headers={"Retry-After": str(random.randint(1, int(RETURN_S)))},
            )
        self._admitted_s = turn_s
        if turn_s > now_s:
            await asyncio.sleep(turn_s - now_s)
        return matcher

    def _remember(self, channel: Channel) -> None:
        self._channels[channel.session] = channel
        self.opened_count += 1
        self._follower.news.set()

    def _forget(self, session: Session) -> None:
        if self._channels.pop(session, None) is not None:
            self.closed_count += 1
        session.leave()

    # --- Other requests ---------------------------------------------------------------------------

    async def _list_servers(self, request: web.Request) -> web.Response:
        await self._authorize(request, False)
        return _json(self.servers)

    async def _list_clients(self, request: web.Request) -> web.Response:
        await self._authorize(request, False)
        now_s = self._clock_s()
        return _json(
            [
                ClientRecord(
                    client=session.client,
                    name=session.name,
                    objects=len(session.keys),
                    waiting=len(session.outbox),
                    heard_s=round(now_s - channel.heard_s, 1),
                    is_congested=channel.is_congested,
                )
                for session, channel in self._channels.items()
            ]
        )

    async def _get_object(self, request: web.Request) -> web.Response:
        await self._authorize(request, False)
        key = _checked(request.match_info["key"])
        if (matcher := self._follower.matcher) is None:
            raise web.HTTPServiceUnavailable(text="the versions are being loaded")
        change = matcher.tables[key[0]].answer(key, 0)
        if change is None:
            raise web.HTTPNotFound(text=f"{key} does not exist")
        return _json(change)

    async def _publish(self, request: web.Request) -> web.Response:
        await self._authorize(request, True)
        name = request.match_info["name"]
        _checked(published(name))
        if (publisher := self._follower.publisher) is None:
            raise web.HTTPServiceUnavailable(text="ZooKeeper does not answer")
        try:
            is_deleted = request.method == "DELETE"
            version = await (publisher.delete(name) if is_deleted else publisher.publish(name))
        except BookmenderError as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        metrics.PUBLISHED.inc()
        return _json({"key": published(name), "version": version})

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        matcher = self._follower.matcher
        if matcher is None:
            return web.Response(
                status=503, text="the versions are being loaded, or the change feed is disabled\n"
            )
        age_s = matcher.age_s(self._clock_s())
        if age_s > STALE_S or self.is_draining:
            return web.Response(status=503, text=f"nothing was heard for {age_s:.0f} s\n")
        return web.Response(text="ok\n")


async def _receive(socket: web.WebSocketResponse) -> Any:
    """Return the next frame; None at the end. Raises CorruptionError."""
    message = await socket.receive()
    if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
        return decode_client_frame(message.data)
    return None


def _checked(key: str) -> str:
    try:
        return check_key(key)
    except SettingsError as error:
        raise web.HTTPBadRequest(text=str(error)) from error


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value) + b"\n", content_type="application/json")
