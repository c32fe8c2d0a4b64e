"""kazoo for many requests at once: the same protocol and sessions at a fraction of the cost.

kazoo spends most of its time around a request rather than on it: four selects, each with an epoll
object of its own, a wake-up byte, two reads, a write, a lock and a hand-over to a third thread.
Here what waits goes out in one write, what has come is read at once, and a reply is handed over on
the thread that read it. Sessions, reconnection, authentication and TLS stay kazoo's.
"""

import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kazoo.exceptions import ConnectionDropped
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import AUTH_XID, CLOSE_RESPONSE, ConnectionHandler
from kazoo.protocol.serialization import Auth

from ledgers.zookeeper.kazoo_watch import EventListener, WatchingConnection

SEND_BYTES_MAX = 64 * 1024
"""Requests joined into one write; replies are read between two of them."""
RECEIVE_BYTES_MAX = 256 * 1024
XID_MAX = 2**31 - 1


class AsyncResult(Protocol):
    """Where a reply goes, on the connection's thread: what we need of kazoo's ``IAsyncResult``."""

    def set(self, value: Any = None) -> None: ...

    def set_exception(self, error: BaseException) -> None: ...


class PipelinedConnection(WatchingConnection):
    """kazoo's connection, with ``submit`` in place of ``KazooClient._call``."""

    def __init__(self, *args: Any, on_ping: Callable[[], None], **options: Any) -> None:
        """``on_ping``: called before each ping, which is sent when nothing else was for a while."""
        super().__init__(*args, **options)
        self._on_ping = on_ping
        self._xid: int = 0
        self._received = bytearray()
        self._is_woken = False

    @classmethod
    def in_place_of(
        cls,
        connection: ConnectionHandler,
        *,
        on_event: EventListener,
        on_ping: Callable[[], None] = lambda: None,
    ) -> "PipelinedConnection":
        """One with the settings of a client's connection that was not started yet."""
        return cls(
            connection.client,
            connection.retry_sleeper,
            logger=connection.logger,
            sasl_options=connection.sasl_options,
            on_event=on_event,
            on_ping=on_ping,
        )

    def submit(self, request: Any, result: AsyncResult) -> None:
        """Queue a request. For any thread; returns at once, whatever the connection is doing.

        With one wake-up byte a request, as kazoo has it, the pipe is full after a few hundred that
        the connection does not get round to, and the caller blocks.
        """
        self.client._queue.append((request, result))
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def _wake(self) -> None:
        wake_socket = self._write_sock
        if wake_socket is not None:
            with suppress(OSError):  # closed meanwhile: who closes it fails what is queued
                wake_socket.send(b"\0")

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        """Send what is queued in one write. Called when a wake-up byte has come."""
        self._read_sock.recv(4096)
        self._is_woken = False  # before the look at the queue: what comes after it wakes us again
        message = self._next_message()
        if message:
            self._write(message, connect_timeout)
        if self.client._queue:
            self._wake()

    def _next_message(self) -> bytearray:
        queue, pending = self.client._queue, self.client._pending
        message = bytearray()
        while queue and len(message) < SEND_BYTES_MAX:
            request, result = queue.popleft()
            try:
                body = request.serialize()
            except Exception as error:  # the caller's fault: no reason to lose the connection
                result.set_exception(error)
                continue
            xid = AUTH_XID if request.type == Auth.type else self._next_xid()
            message += _HEADER.pack(len(body) + 8, xid, request.type)
            message += body
            # Pending before it is written: a write that breaks off may have carried it, or not.
            pending.append((request, result, xid))
        return message

    def _send_ping(self, connect_timeout: float) -> None:
        self._on_ping()
        super()._send_ping(connect_timeout)

    def _next_xid(self) -> int:
        self._xid = self._xid % XID_MAX + 1
        return self._xid

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        self._received.clear()  # what the last connection left
        return super()._connect(host, hostip, port)

    def _invoke(self, timeout: float, *request: Any, **options: Any) -> Any:
        """Ask what a handshake asks. A server may take it and never answer: one that is starting
        does so with a client that comes too soon, as closing its connection fails (seen with
        3.9.5)."""
        return super()._invoke(min(timeout, self.handler.connect_timeout_s), *request, **options)

    def _read_socket(self, read_timeout: float) -> Any:
        """Handle the reply, or event, that has come, and all that came with it."""
        response = super()._read_socket(read_timeout)
        while response != CLOSE_RESPONSE and self._has_reply():
            response = super()._read_socket(read_timeout)
        return response

    def _has_reply(self) -> bool:
        """Whether the next one is here: select does not speak of what was read already."""
        if len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if len(self._received) >= _LENGTH.size + length:
                return True
        return self._has_decrypted()

    def _has_decrypted(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _read(self, length: int, timeout: float) -> bytes:
        while len(self._received) < length:
            self._receive(timeout)
        chunk = bytes(self._received[:length])
        del self._received[:length]
        return chunk

    def _receive(self, timeout: float) -> None:
        with self._socket_error_handling():
            try:
                chunk = self._socket.recv(RECEIVE_BYTES_MAX)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not self.handler.select([self._socket], [], [], timeout)[0]:
                    raise self.handler.timeout_exception("socket time-out during read") from None
                return
        if not chunk:
            raise ConnectionDropped("socket connection broken")
        self._received += chunk


_LENGTH = struct.Struct("!i")
_HEADER = struct.Struct("!iii")


class OneSessionHandler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Runs kazoo on one thread, for one session.

    Callbacks run on the connection's thread, so they must be short and must not raise. After
    ``forbid_connections`` there is no reconnecting: kazoo would follow a lost session with a new
    one, and send on it what was meant for the old (rule S3).
    """

    def __init__(self, *, connect_timeout_s: float, on_crash: Callable[[BaseException], None]):
        """``connect_timeout_s``: for a connection to be made, and for each answer of its
        handshake."""
        super().__init__()
        self.connect_timeout_s = connect_timeout_s
        self._on_crash = on_crash
        self._is_forbidden = False
        self._socket: socket.socket | None = None

    def start(self) -> None:
        self._running = True

    def stop(self) -> None:
        self._running = False

    def forbid_connections(self) -> None:
        self._is_forbidden = True

    def break_connection(self) -> None:
        """Wake the connection's thread out of whatever it waits for, from another thread."""
        self.forbid_connections()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def create_connection(self, *args: Any, timeout: float, **options: Any) -> Any:
        """One dead host must not use up the session's life: the others are to be tried in it."""
        if self._is_forbidden:
            raise ConnectionDropped("the session is over")
        self._socket = super().create_connection(
            *args, timeout=min(timeout, self.connect_timeout_s), **options
        )
        return self._socket

    def spawn(self, func: Callable[..., None], *args: Any, **kwargs: Any) -> threading.Thread:
        def run() -> None:
            try:
                func(*args, **kwargs)
            except BaseException as error:  # a thread that dies unseen is the worst outcome
                self._on_crash(error)

        thread = threading.Thread(target=run, name="zookeeper", daemon=True)
        thread.start()
        return thread

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def select(
        self, read: Sequence[Any], write: Sequence[Any], _: Sequence[Any], timeout: float | None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """As select.select, without a new file descriptor each time. kazoo asks for one kind
        only."""
        assert not (read and write), "never both"
        poll = select.poll()
        for each in (*read, *write):
            poll.register(each, select.POLLOUT if write else select.POLLIN)
        found = {fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)}
        ready = [each for each in (*read, *write) if each.fileno() in found]
        return ([], ready, []) if write else (ready, [], [])
