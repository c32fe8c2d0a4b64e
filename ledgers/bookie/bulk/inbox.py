"""Received bytes, cut into whole frames without copying those that arrived whole.

All connections of a loop receive into one buffer, which is taken from the cache's point of view and
the memory's: 400 bookies cost no more than one. That works because asyncio asks for the buffer,
fills it and hands it over in one go. What is left of an incomplete frame waits beside its
connection; a long frame gets a buffer of its own, of just its size, once its length was found
acceptable.
"""

import asyncio
from typing import Protocol, cast

from ledgers.bookie.bulk.frames import BATCH_REPLY_BYTES, SLACK_BYTES
from ledgers.errors import CorruptionError

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
