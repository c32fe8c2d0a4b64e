"""Accepts connections, and bounds their number where the file is taken: at accept.

A connection counts from ``accept`` until its file is closed: also before it has sent a byte, during
the TLS handshake, and while TLS says goodbye. When there are too many, one is closed for each new
one, in this order, each time the one that has done nothing for longest:

1. One that has sent nothing. It costs a file and nothing else, because TLS starts with the first
   byte. An honest client sends that byte together with the end of TCP's handshake, so a flood of
   silent connections closes itself.
2. One without a request at work: in the TLS handshake, or kept alive.
3. One whose request reads. A connection whose request changes something is never closed, because
   its client would not know whether the change was made.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import structlog
from aiohttp import web

from ledgers.errors import LocalLimitError

log = structlog.get_logger()

CONNECTIONS_MAX = 128
"""Files that the server uses for connections."""
ACCEPTS_MAX = 64
"""Connections accepted without a pause."""
FLOOD_PAUSE_S = 0.005
"""Pause after that many while there are too many. It bounds the CPU that a flood costs the threads
of the roles."""
HANDSHAKE_S = 5.0
SHUTDOWN_S = 1.0
"""Time limits of the TLS handshake, and of the goodbye of TLS."""
NO_FILES_PAUSE_S = 1.0
"""Pause after an accept for which the process had no file."""
CLIENT_GONE = 499
"""Status of the answer to a client that has closed its connection. The answer is not sent."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, eq=False, kw_only=True)
class Connection:
    """A connection that has sent its first byte. ``transport``: None until it is open."""

    socket: socket.socket
    opening: asyncio.Task[None] | None = None
    transport: asyncio.Transport | None = None
    changes: bool | None = None
    """True while a request changes something, False while another one is at work, else None."""

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()
            # A task that has not begun never closes it.
            self.opening.add_done_callback(lambda _: self.socket.close())


CONNECTION = web.RequestKey("connection", Connection)


class Connections:
    """The connections of one server. Belongs to one event loop."""

    def __init__(self, tasks: asyncio.TaskGroup, *, most: int | None = None) -> None:
        """``tasks``: owns the handshakes. ``most``: connections; None: CONNECTIONS_MAX."""
        self._most = most
        self.context: ssl.SSLContext | None = None
        """TLS of new connections; None: no TLS."""
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        # Both have those first that have done nothing for longest.
        self._silent = selectors.DefaultSelector()
        self._open: dict[asyncio.BaseProtocol, Connection] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._is_without_files = False

    def listen(self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections from this socket until ``close``. ``protocol``: makes the protocol of
        a connection."""
        self._make = protocol
        self._loop.add_reader(self._silent.fileno(), self._hear)
        self._loop.add_reader(listening, self._accept, listening)

    def close(self, listening: socket.socket | None) -> None:
        """Accept nothing more, and close what is not open yet. The runner of the application closes
        the other connections."""
        if self._pause is not None:
            self._pause.cancel()
        if listening is not None:
            self._loop.remove_reader(listening)
            listening.close()
        while self._silent.get_map():
            self._close_one()
        for connection in self._open.values():
            if connection.transport is None:
                connection.abort()
        self._loop.remove_reader(self._silent.fileno())
        self._silent.close()

    @web.middleware
    async def follow(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note the beginning and the end of a request on its connection. The handler of a change
        sets ``changes`` of ``request[CONNECTION]`` once the client may change something."""
        if (connection := self._open.get(request.protocol)) is not None:
            request[CONNECTION], connection.changes = connection, False
        try:
            return await handler(request)
        except ConnectionResetError:
            return web.Response(status=CLIENT_GONE)
        finally:
            if connection is not None:
                connection.changes = None
                self._touch(request.protocol)

    def _touch(self, protocol: asyncio.BaseProtocol) -> None:
        """Note that the connection has done something: its answer needs time to leave."""
        if (connection := self._open.pop(protocol, None)) is not None:
            self._open[protocol] = connection

    # --- Accepting --------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        """Accept what waits, some at a time, so that open connections have their turns."""
        for _ in range(ACCEPTS_MAX):
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if (failure := LocalLimitError.of(error)) is None:
                    continue  # the client has gone already
                if not self._is_without_files:  # logged once
                    log.error("http.accept_failed", error=str(failure))
                self._is_without_files = True
                self._close_one()
                self._pause_accepting(listening, NO_FILES_PAUSE_S)
                return
            self._is_without_files = False
            if self._is_full:
                self._hear()  # so that none is closed as silent whose first byte is here
                if not self._close_one():
                    accepted.close()
                    continue
            accepted.setblocking(False)
            self._silent.register(accepted, selectors.EVENT_READ)
        if self._is_full:
            self._pause_accepting(listening, FLOOD_PAUSE_S)

    @property
    def _is_full(self) -> bool:
        """True if a further connection costs another one. Forgets closed connections."""
        if len(self._open) + len(self._silent.get_map()) < (self._most or CONNECTIONS_MAX):
            return False
        closed = [each for each, its in self._open.items() if its.socket.fileno() < 0]
        for protocol in closed:
            del self._open[protocol]
        return not closed

    def _pause_accepting(self, listening: socket.socket, pause_s: float) -> None:
        self._loop.remove_reader(listening)
        resume = self._loop.add_reader
        self._pause = self._loop.call_later(pause_s, resume, listening, self._accept, listening)

    def _close_one(self) -> bool:
        """Close the connection that matters least. Returns False if each changes something."""
        # The first silent one is found without a search: a flood pays this for each connection.
        for key in self._silent.get_map().values():
            self._silent.unregister(key.fileobj)
            cast(socket.socket, key.fileobj).close()
            return True
        ranks = {None: 0, False: 1, True: 2}
        protocol = min(self._open, key=lambda each: ranks[self._open[each].changes], default=None)
        if protocol is None or self._open[protocol].changes:
            return False
        self._open.pop(protocol).abort()
        return True

    # --- Opening ----------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Open the connections that have sent their first byte, or have gone."""
        for key, _ in self._silent.select(0):
            self._silent.unregister(key.fileobj)
            protocol = self._make()
            connection = self._open[protocol] = Connection(socket=cast(socket.socket, key.fileobj))
            connection.opening = self._tasks.create_task(self._start(protocol, connection))

    async def _start(self, protocol: asyncio.Protocol, connection: Connection) -> None:
        """Hand the connection to its protocol, with TLS after the handshake."""
        is_tls = self.context is not None
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection.socket,
                ssl=self.context,
                ssl_handshake_timeout=HANDSHAKE_S if is_tls else None,
                ssl_shutdown_timeout=SHUTDOWN_S if is_tls else None,
            )
        except OSError:  # no TLS, or a version that is too old; the client has gone; out of time
            return
        connection.transport = transport
        self._touch(protocol)
