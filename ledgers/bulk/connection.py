"""One connection to one bookie for one purpose, and the bytes that arrive on it.

``BulkConnection`` connects when it is first needed, but not during the pause after a failure
(``health``). It disconnects when it is idle, broken or outdated. Its subclasses send requests and
interpret replies (``source``, ``target``). ``BulkProtocol`` cuts received bytes into whole frames,
mostly without copying them.

All connections of a loop receive into one buffer. It stays in the CPU cache, and 400 bookies need
no more memory than one. Sharing is possible because asyncio asks for the buffer, fills it and hands
it over without a pause. An incomplete frame is kept beside its connection. A long frame gets a
buffer of its own size, after its length was checked.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import structlog

from ledgers.bulk.flow_control import BookieFlow, ReplyTimes
from ledgers.bulk.frames import BATCH_REPLY_BYTES, SLACK_BYTES
from ledgers.bulk.transfer import TransferPart
from ledgers.codec.registration import Address, Resolve
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    LocalLimitError,
    NameNotResolvedError,
    NoAnswerError,
    SecureConnectionError,
    UnavailableError,
)
from ledgers.health import BookieHealth
from ledgers.host_names import Connector, connect
from ledgers.model import BookieId
from ledgers.wire.framing import FRAME_BYTES_MAX

log = structlog.get_logger()

P = TypeVar("P", bound=TransferPart)

IDLE_MAX_S = 60.0
"""A connection that was not used for this long is closed."""
LATE_REPLY_TIMEOUTS = 6
"""Requests whose transfer is over are forgotten after this many timeouts without a reply."""
UNREQUESTED_MAX = 1_000
"""Late or repeated replies are ignored, but not more than this many in a row."""
RECEIVE_BYTES = 512 * 1024
_LONG_FRAME_BYTES = 128 * 1024
"""Longer frames are completed in a buffer of their own, not copied at each arrival."""


class BulkConnection(ABC, Generic[P]):
    """A connection that is made on demand. Subclasses define what it sends and receives."""

    def __init__(
        self, bookie: BookieId, shared: SharedState, flow: BookieFlow, reply_times: ReplyTimes
    ) -> None:
        self.bookie = bookie
        self._shared, self._flow = shared, flow
        self._parts: dict[int, list[P]] = {}
        """The parts of transfers by ledger id, in the order in which they began."""
        self._reply_times, self._stopwatch = reply_times, Stopwatch()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._protocol: BulkProtocol | None = None
        self._opening: asyncio.Task[None] | None = None
        self._address: Address | None = None
        """The address of the last connection."""
        self._is_proven = False
        """True if this connection has delivered a requested reply."""
        self._unrequested_count = 0
        self._used_s = 0.0
        self._received_bytes = 0
        """Received bytes at the last check."""
        self._checks_without_bytes = 0
        """Checks in a row without received bytes. Checks are counted instead of seconds, because a
        loop that was delayed itself checks only once."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    @property
    def is_busy(self) -> bool:
        """True if replies are expected, or requests wait to be sent."""
        return bool(self._parts)

    def _all_parts(self) -> list[P]:
        return [part for parts in self._parts.values() for part in parts]

    def _add(self, part: P) -> None:
        self._used_s = self._loop.time()
        self._parts.setdefault(part.ledger_id, []).append(part)

    def _remove(self, part: P) -> None:
        """Remove a part from the table. Harmless if it is not there."""
        siblings = self._parts.get(part.ledger_id, [])
        if part in siblings:
            siblings.remove(part)
            if not siblings:
                del self._parts[part.ledger_id]

    @abstractmethod
    def consume(self, view: memoryview, end: int) -> int:
        """Process the whole frames of ``view[:end]``. Returns where the incomplete frame begins. Up
        to ``SLACK_BYTES`` beyond ``end`` may be read. Raises CorruptionError, also if
        ``BATCH_REPLY_BYTES`` of a frame are there and its length is wrong."""

    @abstractmethod
    def write_buffer_changed(self, protocol: BulkProtocol, *, is_full: bool) -> None:
        """The send buffer grew beyond the transport's limit, or is below it again."""

    @abstractmethod
    def _on_connected(self) -> None:
        """The connection is established: send waiting requests."""

    @abstractmethod
    def _fail_all(self, error: BookmenderError) -> None:
        """The connection broke or could not be made: fail everything that depended on it."""

    @abstractmethod
    def check_progress(self, now_s: float) -> None:
        """Fail requests that have waited too long. Called several times per timeout."""

    def connect(self) -> None:
        """Start to connect, if that is needed. Fails everything while backing off."""
        if self._opening is not None or self.is_open:
            return
        if self._shared.is_closed:
            self._fail_all(UnavailableError("closed by ourselves", bookie=self.bookie))
            return
        try:
            self._shared.health.check_may_connect(self.bookie)
        except UnavailableError as error:
            self._fail_all(error)
            return
        # No TaskGroup lives as long as a connection. The connection owns the task; ``close`` ends
        # it.
        self._opening = self._loop.create_task(self._open(), name=f"connect to {self.bookie}")

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
        self.disconnect(UnavailableError("closed by ourselves", bookie=self.bookie))

    def disconnect(self, error: BookmenderError) -> None:
        """Abort the connection, if any, and fail everything that depended on it."""
        transport, self._transport, self._protocol = self._transport, None, None
        if transport is not None:
            transport.abort()
        if self._is_proven:
            self._shared.health.note_connected(self.bookie)
        else:
            self._shared.health.note_failure(self.bookie, error)
        self._is_proven = False
        self._fail_all(error)

    def drop_if_address_changed(self) -> None:
        """Disconnect if the bookie moved: another bookie may answer at its old address."""
        if not self.is_open:
            return
        try:
            is_elsewhere = self._shared.resolve(self.bookie) != self._address
        except UnavailableError as error:
            self.disconnect(error)
        else:
            if is_elsewhere:
                self.disconnect(UnavailableError("the address changed", bookie=self.bookie))

    def close_if_idle(self, now_s: float) -> None:
        if self.is_busy:
            self._used_s = now_s
        elif now_s - self._used_s > IDLE_MAX_S and self._transport is not None:
            transport, self._transport, self._protocol = self._transport, None, None
            transport.abort()

    # --- Calls from the protocol ----------------------------------------------------------------

    def opened(self, protocol: BulkProtocol, transport: asyncio.Transport) -> None:
        self._protocol, self._transport = protocol, transport
        self._used_s = self._loop.time()
        self._is_proven = False
        self._unrequested_count = 0
        self._received_bytes = self._checks_without_bytes = 0

    def closed(self, protocol: BulkProtocol, error: Exception | None) -> None:
        """The connection was closed by the peer, by an error, or because ``consume`` raised."""
        if protocol is self._protocol:  # else it was disconnected before
            if isinstance(error, CorruptionError):
                log.warning("bookie.protocol_violated", bookie=self.bookie, reason=str(error))
            kind = UnavailableError if self._is_proven else NoAnswerError
            failure = kind("connection to bookie broke", bookie=self.bookie)
            failure.__cause__ = error
            self.disconnect(failure)

    # --- Helpers -------------------------------------------------------------------------------

    async def _open(self) -> None:
        failure: BookmenderError | None = None
        try:
            async with asyncio.timeout(self._shared.timeout_s):
                address = self._address = self._shared.resolve(self.bookie)
                await self._shared.connector(
                    lambda: BulkProtocol(self, self._shared.receive_view), address
                )
        except (LocalLimitError, SecureConnectionError) as error:
            failure = error
        except NameNotResolvedError as error:
            failure = NameNotResolvedError(error.args[0], bookie=self.bookie, **error.context)
        # OSError includes TimeoutError. UnicodeError: the host cannot be a name.
        except (OSError, UnicodeError, UnavailableError) as error:
            failure = NoAnswerError("bookie could not be connected to", bookie=self.bookie)
            failure.__cause__ = error
        self._opening = None
        if isinstance(failure, LocalLimitError):  # no backoff: it says nothing about the bookie
            self._fail_all(failure)
        elif failure is not None:
            self.disconnect(failure)
        elif self.is_open:
            self._on_connected()
        elif self.is_busy:  # it broke at once, and more was requested since
            self.connect()

    def _note_received(self) -> None:
        """Record whether bytes were received since the last check. Call it once in each check."""
        assert self._protocol is not None
        received_bytes, self._received_bytes = self._received_bytes, self._protocol.received_bytes
        is_unchanged = received_bytes == self._received_bytes
        self._checks_without_bytes = self._checks_without_bytes + 1 if is_unchanged else 0

    def _ignore_unrequested(self) -> None:
        """Ignore a reply that was not requested. Raises CorruptionError after too many in a row."""
        self._unrequested_count += 1
        if self._unrequested_count > UNREQUESTED_MAX:
            raise CorruptionError("too many replies that were not requested", bookie=self.bookie)


@dataclass(slots=True)
class Stopwatch:
    """Measures reply times of a connection, one request at a time. ``outstanding`` contains ``key``
    until the reply to the measured request has arrived."""

    outstanding: dict[int, Any] = field(default_factory=dict)
    key: int | None = None
    """None if no measurement is running."""
    since_s: float = 0.0

    def start(self, outstanding: dict[int, Any], now_s: float) -> None:
        """Measure the latest of these requests, unless a measurement is running."""
        if self.key is None and outstanding:
            self.outstanding, self.since_s = outstanding, now_s
            self.key = next(reversed(outstanding))

    def read(self, now_s: float) -> float | None:
        """Return the reply time once the reply has arrived, and None before and after."""
        if self.key is None or self.key in self.outstanding:
            return None
        self.key = None
        return now_s - self.since_s

    def stop(self) -> None:
        """Discard the measurement, because the bookie alone did not determine the reply time."""
        self.key = None


class BulkProtocol(asyncio.BufferedProtocol):
    """The asyncio protocol of one connection. Passes whole frames to its consumer."""

    def __init__(self, consumer: BulkConnection[Any], shared_view: memoryview) -> None:
        self._consumer, self._shared_view = consumer, shared_view
        self._incomplete = b""
        """The first bytes of the incomplete frame."""
        self._long: memoryview | None = None
        """The buffer of an incomplete long frame: exactly the frame, and the slack."""
        self._long_received_bytes = 0
        self.received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio.Transport, but have its methods.
        self._consumer.opened(self, cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._consumer.closed(self, exc)

    def pause_writing(self) -> None:
        self._consumer.write_buffer_changed(self, is_full=True)

    def resume_writing(self) -> None:
        self._consumer.write_buffer_changed(self, is_full=False)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._long is not None:
            return self._long[self._long_received_bytes : -SLACK_BYTES]
        kept_bytes = len(self._incomplete)
        self._shared_view[:kept_bytes] = self._incomplete
        return self._shared_view[kept_bytes:-SLACK_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        if self._long is None:
            view, end = self._shared_view, len(self._incomplete) + nbytes
        else:
            view, end = self._long, self._long_received_bytes + nbytes
            if end < len(view) - SLACK_BYTES:
                self._long_received_bytes = end
                return
            self._long = None
        try:
            position = self._consumer.consume(view, end)
        except CorruptionError as error:
            self._consumer.closed(self, error)
            return
        self._keep(view[position:end])

    def _keep(self, rest: memoryview) -> None:
        if len(rest) >= BATCH_REPLY_BYTES:  # the longest head of any reply
            frame_bytes = 4 + int.from_bytes(rest[:4], "big")
            if frame_bytes >= _LONG_FRAME_BYTES:
                self._long = memoryview(bytearray(frame_bytes + SLACK_BYTES))
                self._long[: len(rest)] = rest
                self._long_received_bytes = len(rest)
                return
        self._incomplete = bytes(rest)


def receive_view() -> memoryview:
    """Return the buffer into which all connections of a loop receive, one at a time."""
    return memoryview(bytearray(RECEIVE_BYTES + SLACK_BYTES))


@dataclass(slots=True, kw_only=True)
class SharedState:
    """Settings and state that all connections of one BulkTransfers share."""

    resolve: Resolve
    health: BookieHealth
    timeout_s: float
    writes_in_flight_max: int
    writes_bytes_max: int
    connector: Connector = connect
    """Opens the connections."""
    frame_bytes_max: int = FRAME_BYTES_MAX
    receive_view: memoryview = field(default_factory=receive_view)
    is_paused: bool = False
    """True while no new reads may be sent."""
    is_closed: bool = False
