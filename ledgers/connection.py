"""One pipelined connection to a bookie, for either protocol, and its replacement after failures.

``Connection`` sends requests at once as far as its limits allow; replies may arrive in any order.
The requests in flight are limited in number and in bytes. Every reply has a deadline. When the
connection breaks, all its requests fail at that moment. A request counts as in flight until its
reply is received or can no longer arrive, even if its caller was cancelled, because the bookie
still works on it.

``Channel`` makes a connection when it is first needed, and again after it broke, but not during the
pause after a failure (``health``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import cast

from ledgers.bulk.limiters import ReadBudget
from ledgers.codec.registration import Address
from ledgers.errors import (
    CorruptionError,
    LocalLimitError,
    NameNotResolvedError,
    NoAnswerError,
    UnavailableError,
)
from ledgers.health import BookieHealth
from ledgers.host_names import Connector, connect
from ledgers.model import BookieId
from ledgers.wire.framing import FRAME_BYTES_MAX, FrameReader, frame
from ledgers.wire.messages import Add, Codec, Reply, Request


class BrokenConnectionError(UnavailableError):
    """The connection broke while a request was in flight, or before it could be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Limits of one connection. Every timeout raises UnavailableError."""

    connect_timeout_s: float = 3.0
    request_timeout_s: float = 5.0
    """From sending to the reply; BookKeeper's own default for reads and adds."""
    late_reply_timeout_s: float = 30.0
    """A request that was not answered in time counts as in flight for this much longer, because the
    bookie may still work on it (rule S10)."""
    queue_timeout_s: float = 30.0
    """Maximum time that a request waits until the limits allow it to be sent."""
    adds_in_flight_max: int = 256
    added_bytes_in_flight_max: int = 8 * 1024 * 1024
    """A single larger entry passes when no other add is in flight."""
    read_bytes_guess: int = 64 * 1024
    """Assumed size of an entry to be read, for the read budget."""
    frame_bytes_max: int = FRAME_BYTES_MAX


DEFAULT_SETTINGS = ConnectionSettings()


class Connection(asyncio.Protocol):
    """One connection. Create it with ``open``. Belongs to the event loop that created it."""

    def __init__(
        self,
        bookie: BookieId,
        address: Address,
        *,
        codec: Codec,
        reads: ReadBudget,
        settings: ConnectionSettings,
        on_broken: OnBroken,
    ) -> None:
        """``reads``: the bookie's budget. ``on_broken``: called once, with the cause."""
        self._bookie, self.address, self._codec = bookie, address, codec
        self._settings, self._reads = settings, reads
        self._adds = ReadBudget(
            count_max=settings.adds_in_flight_max, bytes_max=settings.added_bytes_in_flight_max
        )
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(frame_bytes_max=settings.frame_bytes_max)
        self._pending: dict[Hashable, deque[_Pending]] = {}
        self._transport: asyncio.Transport | None = None
        # No future: a cancelled ``close`` would cancel it, and ``connection_lost`` fail.
        self._lost = asyncio.Event()
        self._cause: Exception | None = None
        self._received_at_s = self._answered_at_s = -1.0
        """Loop time of the last received byte, and of the last reply that came in time."""
        self._request_id = 0

    async def open(self, connector: Connector = connect) -> Connection:
        """Connect. Returns this connection. Raises UnavailableError."""
        context = {"bookie": self._bookie, "address": self.address}
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await connector(lambda: self, self.address)
        except NameNotResolvedError as error:
            raise NameNotResolvedError("host name does not resolve", **context) from error
        except (OSError, UnicodeError) as error:  # OSError includes timeouts
            raise NoAnswerError("cannot connect", **context) from error
        return self

    @property
    def is_broken(self) -> bool:
        return self._cause is not None

    @property
    def has_answered(self) -> bool:
        """True if anything was received. A starting bookie accepts connections and resets them."""
        return self._received_at_s >= 0

    async def request(self, request: Request) -> Reply:
        """Send the request when the limits allow it. Returns its reply, with any status. Raises
        UnavailableError, RejectedError (too large for a frame), ValueError (not in this
        protocol)."""
        if isinstance(request, Add):
            room, room_bytes = self._adds, len(request.entry)
        else:
            room, room_bytes = self._reads, self._settings.read_bytes_guess
        try:
            async with asyncio.timeout(self._settings.queue_timeout_s):
                await room.acquire(room_bytes)
        except TimeoutError as error:
            raise UnavailableError("too many requests in flight", bookie=self._bookie) from error
        try:
            if self._cause is not None:
                raise self._broken_error() from self._cause
            self._request_id += 1
            encoded = self._codec.encode(request, self._request_id)
            data = frame(encoded.packet, frame_bytes_max=self._settings.frame_bytes_max)
        except Exception:
            room.release(room_bytes)
            raise
        pending = _Pending(
            key=encoded.key,
            is_key_unique=encoded.is_key_unique,
            reply=self._loop.create_future(),
            room=room,
            room_bytes=room_bytes,
            sent_at_s=self._loop.time(),
        )
        pending.deadline = self._loop.call_later(
            self._settings.request_timeout_s, self._expire, pending
        )
        self._pending.setdefault(pending.key, deque()).append(pending)
        assert self._transport is not None
        self._transport.write(data)
        return await pending.reply

    async def close(self) -> None:
        """Break the connection. Callers that wait for a reply get UnavailableError."""
        self._break(ConnectionAbortedError("closed by us"))
        if self._transport is not None:
            await self._lost.wait()

    def _expire(self, pending: _Pending) -> None:
        """Fail a request whose reply did not arrive in time.

        The connection is broken in two cases. First, if replies cannot be told apart (rule S5):

        1. A request for entry 7 times out.
        2. Another request for entry 7 is sent.
        3. The late reply to the first request arrives, and is taken for the reply to the second.

        Second, if nothing was received since the request was sent: the host may have failed without
        closing the connection.

        If replies came but none in time, the bookie is too slow, which also counts as no answer.
        """
        is_silent = self._received_at_s < pending.sent_at_s
        is_slow = self._answered_at_s < pending.sent_at_s
        kind = NoAnswerError if is_slow else UnavailableError
        error = kind("no answer in time", bookie=self._bookie)
        pending.fail(error)
        if is_silent or not pending.is_key_unique:
            self._break(error)
        else:
            late_s = self._settings.late_reply_timeout_s
            pending.deadline = self._loop.call_later(late_s, self._forget, pending)

    # --- In: called by the transport -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received_at_s = self._loop.time()
        self._frames.feed(data)
        try:
            while (packet := self._frames.next_packet()) is not None:
                self._settle(self._codec.decode(packet))
        except CorruptionError as error:
            self._break(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(exc or ConnectionResetError("closed by the bookie"))
        self._lost.set()

    def _settle(self, reply: Reply) -> None:
        """Give the reply to the oldest request with its key. Ignores a reply without a request."""
        if waiting := self._pending.get(reply.key):
            pending = waiting[0]
            if self._received_at_s - pending.sent_at_s <= self._settings.request_timeout_s:
                self._answered_at_s = self._received_at_s
            self._forget(pending)
            if not pending.reply.done():
                pending.reply.set_result(reply)

    # --- The end -------------------------------------------------------------------------------

    def _forget(self, pending: _Pending) -> None:
        """Remove a request that is not in flight any more, and release its credit."""
        waiting = self._pending[pending.key]
        waiting.remove(pending)
        if not waiting:
            del self._pending[pending.key]
        assert pending.deadline is not None
        pending.deadline.cancel()
        pending.room.release(pending.room_bytes)

    def _break(self, cause: Exception) -> None:
        if self._cause is not None:
            return
        self._cause = cause
        if self._transport is not None:
            self._transport.abort()
        for pending in [each for waiting in self._pending.values() for each in waiting]:
            self._forget(pending)
            error = self._broken_error()
            error.__cause__ = cause
            pending.fail(error)
        self._on_broken(self, cause)

    def _broken_error(self) -> BrokenConnectionError:
        return BrokenConnectionError("the connection broke", bookie=self._bookie)


@dataclass(slots=True, eq=False, kw_only=True)
class _Pending:
    """A request in flight, and the credit that it occupies. ``room``: the budget of the credit."""

    key: Hashable
    is_key_unique: bool
    reply: asyncio.Future[Reply]
    room: ReadBudget
    room_bytes: int
    sent_at_s: float
    deadline: asyncio.TimerHandle | None = None

    def fail(self, error: UnavailableError) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # marks it as retrieved, in case the caller was cancelled


OnBroken = Callable[[Connection, Exception], None]


class Channel:
    """At most one connection to a bookie, shared by all callers."""

    def __init__(
        self,
        bookie: BookieId,
        connect: Callable[[OnBroken], Awaitable[Connection]],
        *,
        locate: Callable[[], Address],
        health: BookieHealth,
    ) -> None:
        """``locate``: returns the present address of the bookie (see ``Resolve``)."""
        self._bookie, self._connect, self._locate = bookie, connect, locate
        self._health = health
        # One attempt at a time. Callers that wait for it share its outcome. If the caller that
        # makes the attempt is cancelled, the attempt ends, and the next caller makes another.
        self._attempt = asyncio.Lock()
        self._connection: Connection | None = None
        self._is_closed = False

    async def connection(self) -> Connection:
        """Return the connection, made if needed. Raises UnavailableError, at once in a pause."""
        async with self._attempt:
            await self._leave_if_elsewhere()
            if self._connection is None or self._connection.is_broken:
                if self._is_closed:
                    raise UnavailableError("closed by us", bookie=self._bookie)
                self._health.check_may_connect(self._bookie)
                try:
                    self._connection = await self._connect(self._broke)
                except LocalLimitError:  # says nothing about the bookie
                    raise
                except UnavailableError as error:
                    self._health.note_failure(self._bookie, error)
                    raise
            return self._connection

    async def _leave_if_elsewhere(self) -> None:
        """Close the connection if the bookie has another address by now. Requests in flight fail.
        Else, if we connected for bookie A before we saw bookie B register at A's address, replies
        of B would count as replies of A while the connection lives. Raises UnavailableError."""
        try:
            address = self._locate()
        except UnavailableError:
            await self._leave()
            raise
        if self._connection is not None and self._connection.address != address:
            await self._leave()

    async def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        """Close the connection. No other is made."""
        self._is_closed = True
        async with self._attempt:
            if self._connection is not None:
                await self._connection.close()

    def _broke(self, connection: Connection, cause: Exception) -> None:
        """Record a broken connection. It counts as a failure to connect if it never delivered a
        reply, or if the bookie stopped replying: it may not reply on the next connection either."""
        if connection.has_answered:
            self._health.note_connected(self._bookie)
        if not connection.has_answered or isinstance(cause, NoAnswerError):
            self._health.note_failure(self._bookie, cause)
