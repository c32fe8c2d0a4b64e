"""Everything that replaces, extends or reads kazoo's insides. Written for kazoo 2.11.0 exactly.

Private attributes and methods of kazoo may change in any release, so ``pyproject.toml`` pins
``KAZOO_VERSION``, and no other module uses them. To upgrade kazoo, compare its new
``protocol/connection.py`` and ``handlers/threading.py`` with the overrides here, run the tests
against a real ZooKeeper (``tests/cluster``), and change the pin and ``KAZOO_VERSION`` together.

- ``PipelinedConnection`` sends many requests at a time. For each request kazoo makes four selects,
  each with a new epoll object, a wake-up byte, two reads, one write, one lock and a hand-over to a
  third thread. Here all queued requests are sent in one write, and all available replies are read
  at once. The thread that reads a reply also handles it. kazoo still does sessions and
  reconnection.
- ``OneSessionHandler`` runs kazoo on one thread, and for one session only. It opens TLS connections
  with our own settings: kazoo would also trust the CAs of the system, besides those of ``ca``.
- SASL uses ``ledgers.wire.sasl``. kazoo needs the library pure-sasl for it, which has had no
  release since 2019.
- ``AddWatch`` registers persistent watches (ZooKeeper 3.6, opcode 106). kazoo has only one-shot
  watches with callbacks. A persistent watch stays until it is removed or the connection ends, and
  can cover all descendants of its znode. Its events do not name their watch, so readers match them
  by path. The store registers watches again after a reconnection; events in between are not
  reported.
- ``MultiRead`` reads several znodes with one request (ZooKeeper 3.6, opcode 22). Each read succeeds
  or fails on its own, and the reads are not atomic.
"""

from __future__ import annotations

import enum
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import structlog
from kazoo.client import KazooClient
from kazoo.exceptions import (
    EXCEPTIONS,
    AuthFailedError,
    ConnectionDropped,
    SessionClosedRequireSaslError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import AUTH_XID, CLOSE_RESPONSE, WATCH_XID, ConnectionHandler
from kazoo.protocol.serialization import (
    SASL,
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

from ledgers.errors import LocalLimitError, SettingsError, UnauthorizedError
from ledgers.security import Security, tls_failure
from ledgers.wire.sasl import DigestMd5

log = structlog.get_logger()

KAZOO_VERSION = "2.11.0"
"""The version of kazoo that this module was written for."""

SEND_BYTES_MAX = 64 * 1024
"""A write takes no further request after this size, so that replies are read between writes."""
RECEIVE_BYTES_MAX = 256 * 1024
REPLY_BYTES_MAX = 256 * 1024 * 1024
"""A longer reply breaks the connection. Lists of children are the longest: 20 MB for a million."""
PING_S = 1.2
"""Longest time without a request before a ping. kazoo alone pings after a third of the session
timeout; more pings, which cost a server next to nothing, tell sooner that it is silent."""
EVENTS_PAUSE_S = 0.002
"""Pause after an event while no request is in flight. The events of this time are then read and
handled together, which costs much less than one by one. A new request ends the pause."""
XID_MAX = 2**31 - 1
_LENGTH = struct.Struct("!i")
_HEADER = struct.Struct("!iii")
_EVENT = struct.Struct("!iiqiiii")
"""The start of an event: length; xid, zxid, error; type, state, and length of the path."""

EventListener = Callable[[Sequence[tuple[int, str, int]]], None]
"""Receives events in order, each with its type (Watcher.Event.EventType: 1 created, 2 deleted,
3 data, 4 children), path and zxid. kazoo ignores the zxid, which is in the header (ZOOKEEPER-4655:
from ZooKeeper 3.9 on; -1 before)."""


def replace_connection(
    client: KazooClient,
    *,
    security: Security,
    on_events: EventListener,
    on_ping: Callable[[], None] = lambda: None,
) -> PipelinedConnection:
    """Give the client, which is not started yet, a PipelinedConnection with the same settings.
    ``security``: says whether the connection authenticates itself with SASL."""
    replaced = client._connection
    connection = PipelinedConnection(
        replaced.client,
        replaced.retry_sleeper,
        logger=replaced.logger,
        # kazoo authenticates a connection if this is not None.
        sasl_options=security if security.settings.zookeeper_user else None,
        on_events=on_events,
        on_ping=on_ping,
    )
    client._connection = connection
    return connection


class PipelinedConnection(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's connection to a server, with ``submit`` in place of ``KazooClient._call``."""

    def __init__(
        self, *args: Any, on_events: EventListener, on_ping: Callable[[], None], **options: Any
    ) -> None:
        """``on_events``: called on kazoo's thread, before later replies are handled. ``on_ping``:
        called before each ping. kazoo pings when it has sent no request for a while."""
        super().__init__(*args, **options)
        self._on_events = on_events
        self._on_ping = on_ping
        self._xid: int = 0
        self._received = bytearray()
        self._is_abandoned = False
        self._is_woken = False
        self._unanswered_since_s: float | None = None
        self._read_timeout_s = 0.0
        self.ping_outstanding = _OutstandingPing()
        self._has_event = False
        """True if events were handled since the last wait."""

    @property
    def silent_s(self) -> float:
        """Return for how long nothing was received although a request, a ping or a connection waits
        for an answer. May be read on any thread."""
        since_s = self._unanswered_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def _asked(self) -> None:
        if self._unanswered_since_s is None:
            self._unanswered_since_s = time.monotonic()

    def submit(self, request: Any, result: Any) -> None:
        """Queue a request, on any thread. ``result``: its ``set`` or ``set_exception`` gets the
        reply, on the connection's thread. Only the first waiting request writes a wake-up byte:
        after a few hundred unread bytes, one for each as in kazoo, the caller would block."""
        self.client._queue.append((request, result))
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def abandon(self) -> None:
        """Let kazoo's thread end, and close its sockets. Waits for nothing."""
        self._is_abandoned = True
        self.client._stopped.set()

    def zk_loop(self) -> None:
        super().zk_loop()
        if self._is_abandoned:
            self.close()

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
        queue, pending = self.client._queue, self.client._pending
        message = bytearray()
        while queue and len(message) < SEND_BYTES_MAX:
            request, result = queue.popleft()
            try:
                body = request.serialize()
            except Exception as error:  # the request is wrong; the connection is still good
                result.set_exception(error)
                continue
            xid = AUTH_XID
            if request.type != Auth.type:
                xid = self._xid = self._xid % XID_MAX + 1
            message += _HEADER.pack(len(body) + 8, xid, request.type)
            message += body
            # Pending before the write: a write that fails may still have delivered the request.
            pending.append((request, result, xid))
        if message:
            self._asked()
            self._write(message, connect_timeout)
        if queue:
            self._wake()

    def _send_ping(self, connect_timeout: float) -> None:
        self._on_ping()
        self._asked()
        super()._send_ping(connect_timeout)

    def _expand_client_hosts(self) -> Any:
        """Look up the servers. Without a free file, names seem not to exist, or lookups raise."""
        self._asked()  # kazoo connects, because there is no connection
        found: Any = []
        with suppress(OSError):
            found = super()._expand_client_hosts()
        if not found:
            self.handler.out_of_files = LocalLimitError.now()
        return found

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        self._received.clear()  # unread bytes of the last connection
        try:
            read_timeout_ms, connect_timeout_ms = super()._connect(host, hostip, port)
        except ConnectionDropped as error:
            cause = error.__context__
            if isinstance(self._socket, ssl.SSLSocket) and isinstance(cause, OSError):
                self.handler.note_tls_failure(cause, host, is_established=True)
            raise
        self._unanswered_since_s = None
        self._read_timeout_s = read_timeout_ms / 1000
        # kazoo pings after half of the time that is returned here. The connection to a silent
        # server breaks as late as without this, because a pause must not break all connections.
        ping_ms = min(read_timeout_ms / 2, PING_S * 1000)
        self.ping_outstanding.max_s = (read_timeout_ms - ping_ms) / 1000
        return 2 * ping_ms, connect_timeout_ms

    def _authenticate_with_sasl(self, host: str, timeout: float) -> None:
        """Authenticate a new connection with DIGEST-MD5, before any other request. Raises
        AuthFailedError, which ends the session, or ConnectionDropped if the connection breaks,
        after which kazoo tries again. A server may break it to refuse, so the reason is
        recorded."""
        try:
            credentials = self.sasl_options.zookeeper_credentials()
        except SettingsError as error:
            self.handler.failure = str(error)
            raise ConnectionDropped(str(error)) from error
        mechanism = DigestMd5(credentials, service="zookeeper", server="zk-sasl-md5")
        token: bytes | None = mechanism.first()
        xid = 0
        timeout = min(timeout, self.handler.connect_timeout_s)
        while token is not None:
            xid += 1
            self._submit(SASL(token), timeout, xid)
            try:
                header, reply, offset = self._read_header(timeout)
            except ConnectionDropped:
                self.handler.failure = f"ZooKeeper closed the connection, perhaps {_REFUSED}"
                raise
            if header.err in (AuthFailedError.code, SessionClosedRequireSaslError.code):
                self._fail_authentication(_REFUSED)
            if header.xid != xid or header.err:
                raise ConnectionDropped("not an answer to SASL")
            try:
                challenge, _ = SASL.deserialize(reply, offset)
                token = mechanism.answer(challenge or b"")
            except struct.error as error:
                raise ConnectionDropped("not an answer to SASL") from error
            except UnauthorizedError as error:
                self._fail_authentication(f"because {error.args[0]}: {_CHECK_SASL}")

    def _fail_authentication(self, why: str) -> NoReturn:
        failure = f"ZooKeeper refuses our SASL credentials {why}"
        self.handler.failure = failure
        raise AuthFailedError(failure)

    def _invoke(self, timeout: float, *request: Any, **options: Any) -> Any:
        """Send a request of the handshake, and wait ``connect_timeout_s`` at most for its answer: a
        server that is starting may never answer a client that connects too early (seen with
        3.9.5)."""
        return super()._invoke(min(timeout, self.handler.connect_timeout_s), *request, **options)

    def _read_socket(self, read_timeout: float) -> Any:
        """Handle the next reply or event, and all others that are already received. The rest of one
        may take the time-out of the session, not the shorter one that makes kazoo ping often."""
        read_timeout = max(read_timeout, self._read_timeout_s)
        if not self._received:
            self._receive(read_timeout)
        response = self._read_next(read_timeout)
        while response != CLOSE_RESPONSE and self._has_reply():
            response = self._read_next(read_timeout)
        if not (self.client._pending or self.ping_outstanding.since_s):
            self._unanswered_since_s = None
        if self._has_event and not self.client._pending:
            self.handler.select([self._read_sock], [], [], EVENTS_PAUSE_S)
        self._has_event = False
        return response

    def _read_next(self, read_timeout: float) -> Any:
        """Handle all events that are received, or else the next reply."""
        if events := self._take_events():
            self._has_event = True
            self._on_events(events)
            return None
        return super()._read_socket(read_timeout)

    def _take_events(self) -> list[tuple[int, str, int]]:
        """Remove the complete events from the head of the received bytes, and return them.
        Thousands of ledgers may change in a second, so events have this path of their own."""
        received, position = self._received, 0
        events: list[tuple[int, str, int]] = []
        while len(received) - position >= _EVENT.size:
            length, xid, zxid, _, kind, _, path_bytes = _EVENT.unpack_from(received, position)
            stop = position + _LENGTH.size + length
            if xid != WATCH_XID or stop > len(received) or length < _EVENT.size - _LENGTH.size:
                break
            begin = position + _EVENT.size
            if not 0 <= path_bytes == stop - begin:  # else this loop might not end
                raise ConnectionDropped("not an event of a watch")
            events.append((kind, received[begin : begin + path_bytes].decode(), zxid))
            position = stop
        del received[:position]
        return events

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        """Handle an event that was received in parts. kazoo's one-shot watches are not used."""
        event, _ = Watch.deserialize(buffer, offset)
        header, _ = ReplyHeader.deserialize(buffer, 0)
        self._on_events([(event.type, event.path, header.zxid)])

    def _has_reply(self) -> bool:
        """True if another reply or event is buffered or decrypted: ``select`` reports neither."""
        if len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if len(self._received) >= _LENGTH.size + length:
                return True
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _read(self, length: int, timeout: float) -> bytes:
        if not 0 <= length <= REPLY_BYTES_MAX:
            log.warning("zookeeper.protocol_violated", length=length, length_max=REPLY_BYTES_MAX)
            raise ConnectionDropped("not the length of a reply")
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
        if self._unanswered_since_s is not None:
            self._unanswered_since_s = time.monotonic()


class _OutstandingPing:
    """In place of kazoo's event: set if a ping has had no answer for ``max_s``."""

    def __init__(self) -> None:
        self.max_s = 0.0
        self.since_s: float | None = None

    def set(self) -> None:
        self.since_s = self.since_s or time.monotonic()

    def clear(self) -> None:
        self.since_s = None

    def is_set(self) -> bool:
        return self.since_s is not None and time.monotonic() - self.since_s >= self.max_s


_CHECK_SASL = "check that the servers have SASL (jaas.conf, authProvider)"
_REFUSED = (
    "because of a wrong user or password: check security.zookeeper_user and "
    "security.zookeeper_password_file"
)


class OneSessionHandler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Runs kazoo on one thread, for one session.

    Callbacks run on the connection's thread, so they must be short and must not raise.

    After ``forbid_connections`` kazoo cannot reconnect. Otherwise it would replace a lost session
    by a new one, and send requests on it that were meant for the old session (rule S3).
    """

    def __init__(
        self,
        *,
        security: Security,
        connect_timeout_s: float,
        on_crash: Callable[[BaseException], None],
    ):
        """``connect_timeout_s``: limit of a connection attempt, and of each handshake answer."""
        super().__init__()
        self.failure = ""
        """Why TLS or authentication failed last, and what to do next; empty if neither did."""
        self.out_of_files: LocalLimitError | None = None
        """Why the last connection could not be tried."""
        self.connect_timeout_s = connect_timeout_s
        self._security = security
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
                # Not the method of SSLSocket: it would take TLS away from the thread that reads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def note_tls_failure(
        self, error: Exception, host: str, *, is_established: bool = False
    ) -> None:
        self.failure = tls_failure(
            error,
            self._security.settings,
            server="ZooKeeper",
            host=host,
            is_established=is_established,
        )

    def create_connection(
        self, address: tuple[str, int], *, timeout: float, hostname: str = "", **_: Any
    ) -> Any:
        """Connect within ``connect_timeout_s``, which leaves time to try the other servers.
        ``hostname``: the name in the connect string, which the certificate must name.

        Connecting and the handshake may take seconds, in which the loop may give the session up. So
        each is followed by a check. ``break_connection`` forbids before it looks for the socket,
        which is stored here before the check: no connection slips through.
        """
        self._check_allowed()
        self.out_of_files = None
        try:
            self._socket = super().create_connection(
                address, timeout=min(timeout, self.connect_timeout_s)
            )
        except OSError as error:
            self.out_of_files = LocalLimitError.of(error)
            raise
        self._check_allowed()
        if self._security.settings.zookeeper_tls:
            self._socket = self._with_tls(self._socket, hostname or address[0])
            self._check_allowed()
        return self._socket

    def _check_allowed(self) -> None:
        """Close the connection and raise ConnectionDropped if connections are forbidden."""
        if self._is_forbidden:
            if self._socket is not None:
                self._socket.close()
            raise ConnectionDropped("the session is over")

    def _with_tls(self, connection: socket.socket, host: str) -> socket.socket:
        """Return the connection after a TLS handshake. Raises ConnectionDropped."""
        try:
            context = self._security.zookeeper_tls()
            assert context is not None
            secured = context.wrap_socket(
                connection, server_hostname=host, do_handshake_on_connect=False
            )
        except (OSError, ValueError, SettingsError) as error:
            connection.close()
            self.failure = str(error)
            raise ConnectionDropped(str(error)) from error
        self._socket = secured  # so that ``break_connection`` can end a handshake that hangs
        try:
            secured.do_handshake()
        except (OSError, ValueError) as error:
            secured.close()
            self.note_tls_failure(error, host)
            raise ConnectionDropped("TLS handshake failed") from error
        return secured

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
    """Request for the data of several znodes. The reply is a list in this order, of results of
    kazoo's ``GetData`` (data, ZnodeStat) and of exceptions that it would raise."""

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
        return bytes(write_string(self.path) + int_struct.pack(3))  # any kind

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> bool:
        return True
