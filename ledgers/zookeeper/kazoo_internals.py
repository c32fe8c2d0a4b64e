"""Everything that replaces, extends or reads kazoo's insides. Written for kazoo 2.11.0 exactly.

Private attributes and methods of kazoo may change in any release, so ``pyproject.toml`` pins
``KAZOO_VERSION``, and no other module uses them. To upgrade kazoo, compare its new
``protocol/connection.py`` and ``handlers/threading.py`` with the overrides here, run the tests
against a real ZooKeeper (``tests/cluster``), and change the pin and ``KAZOO_VERSION`` together.

- ``PipelinedConnection`` sends many requests at a time. For each request kazoo makes four selects,
  each with a new epoll object, a wake-up byte, two reads, one write, one lock and a hand-over to a
  third thread. Here all queued requests are sent in one write, all available replies are read at
  once, and a reply is handled on the thread that read it. kazoo still does sessions, reconnection,
  authentication and TLS.
- ``OneSessionHandler`` runs kazoo on one thread, and for one session only.
- ``AddWatch`` registers persistent watches (ZooKeeper 3.6, opcode 106). kazoo has only one-shot
  watches with callbacks. A persistent watch stays until it is removed or the connection ends, and can
  cover all descendants of its znode. Its events do not name their watch, so readers match them by
  path. The store registers watches again after a reconnection; events in between are not reported.
- ``AddOneShotWatch`` is for servers before 3.6. Two of them, one of each kind, cover a single znode if
  they are registered again after each event.
- ``MultiRead`` reads several znodes with one request (ZooKeeper 3.6, opcode 22). Each read succeeds or
  fails on its own, and the reads are not atomic.
"""

from __future__ import annotations

import enum
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from kazoo.client import KazooClient
from kazoo.exceptions import EXCEPTIONS, ConnectionDropped
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import AUTH_XID, CLOSE_RESPONSE, ConnectionHandler
from kazoo.protocol.serialization import (
    Auth,
    GetData,
    ReplyHeader,
    Watch,
    int_struct,
    multiheader_struct,
    read_buffer,
    stat_struct,
    write_string,
)
from kazoo.protocol.states import ZnodeStat

KAZOO_VERSION = "2.11.0"
"""The version of kazoo that this module was written for."""

SEND_BYTES_MAX = 64 * 1024
"""A write takes no further request after this size, so that replies are read between writes."""
RECEIVE_BYTES_MAX = 256 * 1024
XID_MAX = 2**31 - 1
_LENGTH = struct.Struct("!i")
_HEADER = struct.Struct("!iii")

EventListener = Callable[[int, str, int], None]
"""Receives the type of an event (Watcher.Event.EventType: 1 created, 2 deleted, 3 data,
4 children), its path and its zxid."""


def replace_connection(
    client: KazooClient, *, on_event: EventListener, on_ping: Callable[[], None] = lambda: None
) -> PipelinedConnection:
    """Give the client, which is not started yet, a PipelinedConnection with the same settings."""
    replaced = client._connection
    connection = PipelinedConnection(
        replaced.client,
        replaced.retry_sleeper,
        logger=replaced.logger,
        sasl_options=replaced.sasl_options,
        on_event=on_event,
        on_ping=on_ping,
    )
    client._connection = connection
    return connection


class WatchingConnection(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """A connection that calls ``on_event``, on kazoo's thread, for every watch event.

    It adds the zxid of the header, which kazoo ignores (ZOOKEEPER-4655: from ZooKeeper 3.9 on; -1
    before).
    """

    def __init__(self, *args: Any, on_event: EventListener, **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_event = on_event

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        super()._read_watch_event(buffer, offset)  # handles kazoo's own one-shot watches
        event, _ = Watch.deserialize(buffer, offset)
        header, _ = ReplyHeader.deserialize(buffer, 0)
        self._on_event(event.type, self.client.unchroot(event.path), header.zxid)


class PipelinedConnection(WatchingConnection):
    """kazoo's connection to a server, with ``submit`` in place of ``KazooClient._call``."""

    def __init__(self, *args: Any, on_ping: Callable[[], None], **options: Any) -> None:
        """``on_ping``: called before each ping. kazoo pings when it has sent no request for a
        while."""
        super().__init__(*args, **options)
        self._on_ping = on_ping
        self._xid: int = 0
        self._received = bytearray()
        self._is_woken = False

    def submit(self, request: Any, result: AsyncResult) -> None:
        """Queue a request and return at once. May be called on any thread.

        kazoo writes a wake-up byte for each request. After a few hundred unread bytes the pipe is
        full and the caller blocks. Here only the first waiting request writes one.
        """
        self.client._queue.append((request, result))
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def _wake(self) -> None:
        wake_socket = self._write_sock
        if wake_socket is not None:
            # The socket may be closed meanwhile. kazoo then fails the queued requests.
            with suppress(OSError):
                wake_socket.send(b"\0")

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        """Send the queued requests in one write. kazoo calls this after a wake-up byte."""
        self._read_sock.recv(4096)
        # Cleared before the queue is read: a request queued after that sends a new wake-up byte.
        self._is_woken = False
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
            except Exception as error:  # the request is wrong; the connection is still good
                result.set_exception(error)
                continue
            xid = AUTH_XID if request.type == Auth.type else self._next_xid()
            message += _HEADER.pack(len(body) + 8, xid, request.type)
            message += body
            # Pending before the write: a write that fails may still have delivered the request.
            pending.append((request, result, xid))
        return message

    def _send_ping(self, connect_timeout: float) -> None:
        self._on_ping()
        super()._send_ping(connect_timeout)

    def _next_xid(self) -> int:
        self._xid = self._xid % XID_MAX + 1
        return self._xid

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        self._received.clear()  # unread bytes of the last connection
        return super()._connect(host, hostip, port)

    def _invoke(self, timeout: float, *request: Any, **options: Any) -> Any:
        """Send a request of the handshake, and wait ``connect_timeout_s`` at most for its answer.

        A server that is starting may never answer a client that connects too early, because closing
        the connection fails there (seen with 3.9.5).
        """
        return super()._invoke(min(timeout, self.handler.connect_timeout_s), *request, **options)

    def _read_socket(self, read_timeout: float) -> Any:
        """Handle the next reply or event, and all others that are already received."""
        response = super()._read_socket(read_timeout)
        while response != CLOSE_RESPONSE and self._has_reply():
            response = super()._read_socket(read_timeout)
        return response

    def _has_reply(self) -> bool:
        """True if another reply or event can be read now. ``select`` reports neither buffered
        bytes nor bytes that TLS has decrypted."""
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


class AsyncResult(Protocol):
    """Receives a reply on the connection's thread. The part of kazoo's ``IAsyncResult`` we use."""

    def set(self, value: Any = None) -> None: ...

    def set_exception(self, error: BaseException) -> None: ...


class OneSessionHandler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Runs kazoo on one thread, for one session.

    Callbacks run on the connection's thread, so they must be short and must not raise.

    After ``forbid_connections`` kazoo cannot reconnect. Otherwise it would replace a lost session
    by a new one, and send requests on it that were meant for the old session (rule S3).
    """

    def __init__(self, *, connect_timeout_s: float, on_crash: Callable[[BaseException], None]):
        """``connect_timeout_s``: limit for opening a connection, and for each answer of the
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
        """Interrupt any wait of the connection's thread. Called from another thread."""
        self.forbid_connections()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def create_connection(self, *args: Any, timeout: float, **options: Any) -> Any:
        """Connect within ``connect_timeout_s``. A dead host must leave time to try the other
        servers before the session expires."""
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
            except BaseException as error:  # the end of this thread must not go unnoticed
                self._on_crash(error)

        thread = threading.Thread(target=run, name="zookeeper", daemon=True)
        thread.start()
        return thread

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def select(
        self, read: Sequence[Any], write: Sequence[Any], _: Sequence[Any], timeout: float | None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Do what ``select.select`` does, without a new file descriptor per call. kazoo asks for
        either readable or writable sockets, never for both."""
        assert not (read and write), "never both"
        poll = select.poll()
        for each in (*read, *write):
            poll.register(each, select.POLLOUT if write else select.POLLIN)
        found = {fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)}
        ready = [each for each in (*read, *write) if each.fileno() in found]
        return ([], ready, []) if write else (ready, [], [])


_PART = multiheader_struct.pack(GetData.type, False, -1)
_END = multiheader_struct.pack(-1, True, -1)
_NO_WATCH = b"\0"
_ERROR = -1


@dataclass(frozen=True, slots=True)
class MultiRead:
    """Request for the data of several znodes. The reply is a list in the same order.

    Each element is the result of kazoo's ``GetData`` (data, ZnodeStat), or the exception that it
    would raise.
    """

    type: ClassVar[int] = 22

    paths: Sequence[str]

    def serialize(self) -> bytes:
        parts = (_PART + write_string(path) + _NO_WATCH for path in self.paths)
        return b"".join((*parts, _END))

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> list[Any]:
        parts: list[Any] = []
        while True:
            kind, is_end, _ = multiheader_struct.unpack_from(reply, offset)
            offset += multiheader_struct.size
            if is_end:
                return parts
            if kind == _ERROR:
                (code,) = int_struct.unpack_from(reply, offset)
                offset += int_struct.size
                parts.append(EXCEPTIONS[code]())
            else:
                data, offset = read_buffer(reply, offset)
                parts.append((data, ZnodeStat._make(stat_struct.unpack_from(reply, offset))))
                offset += stat_struct.size


class WatchMode(enum.IntEnum):
    """ZooKeeper's AddWatchMode."""

    PERSISTENT = 0
    PERSISTENT_RECURSIVE = 1


@dataclass(frozen=True, slots=True)
class AddWatch:
    """Request for a persistent watch. Does nothing if the watch is already registered."""

    type: ClassVar[int] = 106

    path: str
    mode: WatchMode

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(self.mode))

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class RemoveWatches:
    """Request to remove all watches, of any kind, that this connection has on exactly this path."""

    type: ClassVar[int] = 18

    path: str

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(_ANY_KIND))

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> bool:
        return True


_ANY_KIND = 3
"""ZooKeeper's Watcher.WatcherType.Any."""


class OneShotWatch(enum.IntEnum):
    """The kinds of one-shot watches. The value is the opcode of the read that registers it."""

    ZNODE = 3
    """Fires when the znode is created, changed or deleted (``exists``)."""
    CHILDREN = 8
    """Fires when the list of children changes or the znode is deleted (``getChildren``). The znode
    must exist."""


@dataclass(frozen=True, slots=True)
class AddOneShotWatch:
    """Request for a one-shot watch. Does nothing if the watch is already registered.

    The watch is not registered in kazoo's own tables, where watches that never fire would pile up.
    """

    type: OneShotWatch
    path: str

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + _AND_WATCH)

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> bool:
        return True


_AND_WATCH = b"\1"
