"""One connection to one bookie for one purpose: made when first needed, dropped at the first
doubt.

Received bytes, cut into whole frames without copying those that arrived whole.

All connections of a loop receive into one buffer, which is taken from the cache's point of view and
the memory's: 400 bookies cost no more than one. That works because asyncio asks for the buffer,
fills it and hands it over in one go. What is left of an incomplete frame waits beside its
connection; a long frame gets a buffer of its own, of just its size, once its length was found
acceptable.
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import structlog

from ledgers.bulk.frames import BATCH_REPLY_BYTES, SLACK_BYTES
from ledgers.codec.registration import Address, Resolve
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    NameNotResolvedError,
    NoAnswerError,
    UnavailableError,
)
from ledgers.host_names import connect
from ledgers.model import BookieId
from ledgers.wire.framing import FRAME_BYTES_MAX

RECEIVE_BYTES = 512 * 1024
_LONG_FRAME_BYTES = 128 * 1024
"""From here on a frame is completed in its own buffer rather than moved with each arrival."""


class FrameConsumer(Protocol):
    """Whom an inbox hands its bytes to."""

    def consume(self, view: memoryview, end: int) -> int:
        """Take the whole frames of ``view[:end]``; where the incomplete one after them begins.

        Before it returns, the length of that one, if ``BATCH_REPLY_BYTES`` of it are there, was
        found acceptable. Raises CorruptionError. ``SLACK_BYTES`` may be read behind ``end``.
        """
        ...

    def opened(self, inbox: "Inbox", transport: asyncio.Transport) -> None: ...

    def closed(self, inbox: "Inbox", error: Exception | None) -> None:
        """The connection is gone: ended by the peer, by an error, or by what ``consume`` raised."""
        ...

    def is_full(self, inbox: "Inbox", is_full: bool) -> None:
        """Whether more waits to be sent than the transport's limit."""
        ...


class ReceiveBuffer:
    """The bytes that every inbox of a loop receives into, one at a time."""

    def __init__(self, size: int = RECEIVE_BYTES) -> None:
        self.view = memoryview(bytearray(size + SLACK_BYTES))


class Inbox(asyncio.BufferedProtocol):
    """One connection's receiving end."""

    def __init__(self, consumer: FrameConsumer, receive_buffer: ReceiveBuffer) -> None:
        self._consumer = consumer
        self._shared = receive_buffer.view
        self._rest = b""
        """The incomplete frame's first bytes."""
        self._long: memoryview | None = None
        """The buffer of a long frame, where one is incomplete: exactly that frame and the slack."""
        self._long_held_bytes = 0
        self.received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, for uvloop's transports are Transports in all but name.
        self._consumer.opened(self, cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._consumer.closed(self, exc)

    def pause_writing(self) -> None:
        self._consumer.is_full(self, True)

    def resume_writing(self) -> None:
        self._consumer.is_full(self, False)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._long is not None:
            return self._long[self._long_held_bytes : -SLACK_BYTES]
        held_bytes = len(self._rest)
        self._shared[:held_bytes] = self._rest
        return self._shared[held_bytes:-SLACK_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        if self._long is None:
            view, end = self._shared, len(self._rest) + nbytes
        else:
            view, end = self._long, self._long_held_bytes + nbytes
            if end < len(view) - SLACK_BYTES:
                self._long_held_bytes = end
                return
            self._long = None
        try:
            position = self._consumer.consume(view, end)
        except CorruptionError as error:
            self._consumer.closed(self, error)
            return
        self._keep(view[position:end])

    def _keep(self, rest: memoryview) -> None:
        if len(rest) >= BATCH_REPLY_BYTES:  # the longest head of all
            frame_bytes = 4 + int.from_bytes(rest[:4], "big")
            if frame_bytes >= _LONG_FRAME_BYTES:
                self._long = memoryview(bytearray(frame_bytes + SLACK_BYTES))
                self._long[: len(rest)] = rest
                self._long_held_bytes = len(rest)
                return
        self._rest = bytes(rest)


log = structlog.get_logger()

BACK_OFF_FIRST_S = 0.1
BACK_OFF_MAX_S = 10.0
IDLE_MAX_S = 60.0
"""A connection that nothing used for so long is closed."""
LATE_TIMEOUTS = 6
"""Entries that nobody waits for any more are given up after so many time-outs without a reply."""
UNASKED_MAX = 1_000
"""Replies in a row that nobody asked for: a late or repeated one is ignored, a flood is not."""


@dataclass(slots=True, kw_only=True)
class Common:
    """What all lanes of a process share."""

    resolve: Resolve
    timeout_s: float
    writes_in_flight_max: int
    writes_bytes_max: int
    frame_bytes_max: int = FRAME_BYTES_MAX
    receive_buffer: ReceiveBuffer = field(default_factory=ReceiveBuffer)
    is_paused: bool = False
    """Whether no new reads are to be issued."""
    is_closed: bool = False


@dataclass(slots=True)
class Stopwatch:
    """Times one request of a lane after the other: ``outstanding`` holds its key until the
    reply."""

    outstanding: dict[int, Any] = field(default_factory=dict)
    key: int = 0
    since_s: float = 0.0
    is_running: bool = False

    def start(self, outstanding: dict[int, Any], now_s: float) -> None:
        """Time the youngest of these, unless another is being timed."""
        if not self.is_running and outstanding:
            self.outstanding, self.key, self.since_s = (
                outstanding,
                next(reversed(outstanding)),
                now_s,
            )
            self.is_running = True

    def read(self, now_s: float) -> float | None:
        """How long the reply took, once, when it is there."""
        if not self.is_running or self.key in self.outstanding:
            return None
        self.is_running = False
        return now_s - self.since_s

    def stop(self) -> None:
        """Something else than the bookie had a part in how long it takes."""
        self.is_running = False


class Lane(ABC):
    """The connection and its comings and goings; what travels on it is the subclasses' business."""

    def __init__(self, bookie: BookieId, common: Common) -> None:
        self.bookie = bookie
        self._common = common
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._inbox: Inbox | None = None
        self._opening: asyncio.Task[None] | None = None
        self._address: Address | None = None
        """Where the last connection went."""
        self._back_off_s = 0.0
        self._retry_s = 0.0
        """Loop time before which no new connection is tried."""
        self._is_proven = False
        """Whether this connection has brought a reply that was asked for."""
        self._unasked_count = 0
        self._used_s = 0.0
        self._received_bytes = 0
        """Of the inbox when last looked at: whether anything came since."""
        self._silent_checks = 0
        """Looks in a row since anything came. A loop that was held up looks once, not often."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether anything is expected of the bookie, or waits to be asked."""

    @abstractmethod
    def consume(self, view: memoryview, end: int) -> int:
        """As FrameConsumer."""

    @abstractmethod
    def is_full(self, inbox: Inbox, is_full: bool) -> None:
        """As FrameConsumer."""

    @abstractmethod
    def _go_on(self) -> None:
        """The connection stands: send what waits."""

    @abstractmethod
    def _fail_all(self, error: BookmenderError) -> None:
        """The connection is gone, or could not be made: so is all that was expected of it."""

    @abstractmethod
    def check_progress(self, now_s: float) -> None:
        """Called a few times per time-out: give up what has been waited for too long."""

    def connect(self) -> None:
        """Begin to connect unless that is done or under way, or fail while backing off."""
        if self._opening is not None or self.is_open:
            return
        if self._common.is_closed:
            self._fail_all(UnavailableError("closed by ourselves", bookie=self.bookie))
            return
        if self._loop.time() < self._retry_s:
            self._fail_all(UnavailableError("bookie did not answer lately", bookie=self.bookie))
            return
        # No TaskGroup spans the life of a lane; the lane owns the task and ``close`` ends it.
        self._opening = self._loop.create_task(self._open(), name=f"connect to {self.bookie}")

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
        self.break_off(UnavailableError("closed by ourselves", bookie=self.bookie))

    def break_off(self, error: BookmenderError) -> None:
        """Drop the connection and fail all that was expected of it. Harmless when there is none."""
        transport, self._transport, self._inbox = self._transport, None, None
        if transport is not None:
            transport.abort()
        self._back_off()
        self._fail_all(error)

    def leave_if_elsewhere(self) -> None:
        """Drop a connection to an address that is not the bookie's any more: another bookie may
        answer there."""
        if not self.is_open:
            return
        try:
            is_elsewhere = self._common.resolve(self.bookie) != self._address
        except UnavailableError as error:
            self.break_off(error)
        else:
            if is_elsewhere:
                self.break_off(UnavailableError("the address changed", bookie=self.bookie))

    def forget_failures(self) -> None:
        """The bookie is known to be back: it is worth a connection at once."""
        self._back_off_s = self._retry_s = 0.0

    def close_if_idle(self, now_s: float) -> None:
        if self.is_busy:
            self._used_s = now_s
        elif now_s - self._used_s > IDLE_MAX_S and self._transport is not None:
            transport, self._transport, self._inbox = self._transport, None, None
            transport.abort()

    # --- What the inbox reports (FrameConsumer) -------------------------------------------------

    def opened(self, inbox: Inbox, transport: asyncio.Transport) -> None:
        self._inbox, self._transport = inbox, transport
        self._used_s = self._loop.time()
        self._is_proven = False
        self._unasked_count = 0
        self._received_bytes = self._silent_checks = 0

    def closed(self, inbox: Inbox, error: Exception | None) -> None:
        if inbox is self._inbox:  # else it was broken off before
            if isinstance(error, CorruptionError):
                log.warning("bookie.protocol_violated", bookie=self.bookie, reason=str(error))
            kind = UnavailableError if self._is_proven else NoAnswerError
            failure = kind("connection to bookie broke", bookie=self.bookie)
            failure.__cause__ = error
            self.break_off(failure)

    # --- Below: helpers ------------------------------------------------------------------------

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self._common.timeout_s):
                address = self._address = self._common.resolve(self.bookie)
                await connect(lambda: Inbox(self, self._common.receive_buffer), address)
        except NameNotResolvedError as error:
            self._opening = None
            self.break_off(NameNotResolvedError(error.args[0], bookie=self.bookie, **error.context))
        # OSError: TimeoutError too. UnicodeError: a host that no name can be.
        except (OSError, UnicodeError, UnavailableError) as error:
            self._opening = None
            failure = NoAnswerError("bookie could not be connected to", bookie=self.bookie)
            failure.__cause__ = error
            self.break_off(failure)
        else:
            self._opening = None
            if self.is_open:
                self._go_on()
            elif self.is_busy:  # it broke at once, and more was asked for since
                self.connect()

    def _back_off(self) -> None:
        if self._is_proven:
            self._back_off_s = 0.0
        else:
            self._back_off_s = min(max(self._back_off_s * 2, BACK_OFF_FIRST_S), BACK_OFF_MAX_S)
        self._is_proven = False
        self._retry_s = self._loop.time() + self._back_off_s

    def _listen(self) -> None:
        """To be called once in each check: whether a byte came since the last."""
        assert self._inbox is not None
        received_bytes, self._received_bytes = self._received_bytes, self._inbox.received_bytes
        is_silent = received_bytes == self._received_bytes
        self._silent_checks = self._silent_checks + 1 if is_silent else 0

    def _ignore_unasked(self) -> None:
        """Late, repeated or never asked for. Raises CorruptionError when it is one too many."""
        self._unasked_count += 1
        if self._unasked_count > UNASKED_MAX:
            raise CorruptionError("replies that nobody asked for", bookie=self.bookie)
