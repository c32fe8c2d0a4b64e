"""The thread and the port of the HTTP server.

It runs in a thread and an event loop of its own. If it fails, it starts again after a backoff, and
the roles of the node go on. A port that is in use is logged once and tried again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import structlog
import uvloop
from aiohttp import web

from daemon.admin_session import AdminSession, admin_session
from daemon.http.access import read_token
from daemon.http.app import App
from daemon.http.cluster_reader import ClusterReader
from daemon.http.health import probe
from daemon.http.loop_thread import LoopThread
from daemon.http.tls import ServerTls
from daemon.live_settings import LiveSettings
from daemon.role_state import NodeService
from daemon.settings import HttpSettings
from daemon.threads import ServiceThread
from ledgers.errors import SettingsError
from ledgers.tasks import in_daemon_thread
from ledgers.zookeeper.store import ZooKeeperStore

log = structlog.get_logger()

CONNECTIONS_MAX = 128
"""Open connections. For a further one the oldest is closed, so idle clients do not block others."""
BACKLOG = 64
KEEP_ALIVE_S = 75.0
HANDSHAKE_S = 5.0
"""Time limit of a TLS handshake. Connections count for ``CONNECTIONS_MAX`` only after it."""
FOLLOW_S = 2.0
"""How often the server looks whether the files of its certificate have changed."""
RETRY_S = 30.0
"""Time between two attempts to open the port."""
GOODBYE_S = 0.5
"""How long requests may go on when the server stops."""
THREAD_STOP_S = 0.3
"""How long the server waits for the end of the thread that reads. It is a daemon thread."""


def http_thread(live: LiveSettings, roles: Sequence[NodeService]) -> ServiceThread:
    """Return the thread of the server. The caller starts and stops it."""
    # aiohttp logs each malformed request with a traceback. ``app`` logs what matters.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    return ServiceThread("http", partial(serve, live, roles), loop_factory=uvloop.new_event_loop)


async def serve(live: LiveSettings, roles: Sequence[NodeService]) -> None:
    """Serve until cancelled."""
    settings = live.current
    opened = partial(open_cluster, live)
    thread = LoopThread("http-reader")
    reader = ClusterReader(
        opened,
        current=lambda cluster: replace(cluster, settings=live.current),
        on_thread=thread.run,
    )
    thread.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            app = App(settings, roles, reader=reader, open_cluster=opened, start=tasks.create_task)
            tasks.create_task(reader.run())
            tasks.create_task(probe(roles))
            await listen(app.build(), settings.http)
    finally:
        thread.stop(timeout_s=THREAD_STOP_S)


@asynccontextmanager
async def open_cluster(live: LiveSettings) -> AsyncIterator[AdminSession]:
    """Open a session for requests, with the rate limit of the node's roles."""
    settings = live.current
    async with admin_session(settings) as cluster:
        if isinstance(cluster.store, ZooKeeperStore):
            cluster.store.requests_per_s = settings.zookeeper.requests_per_s
        yield cluster


async def listen(app: web.Application, settings: HttpSettings) -> None:
    """Open the port and serve the application until cancelled."""
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=GOODBYE_S,
    )
    await runner.setup()
    try:
        listener = Listener(runner, settings)
        try:
            await listener.open()
            await listener.follow_files()
        finally:
            listener.close()
    finally:
        await runner.cleanup()


class Listener:
    """The open port. With TLS, it follows changes of the certificate files."""

    def __init__(self, runner: web.AppRunner, settings: HttpSettings) -> None:
        self._connections = Connections(runner)
        self._settings = settings
        self._tls = ServerTls(settings)
        self._context: ssl.SSLContext | None = None
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Open the port. While that fails, log it once for each reason, and try again."""
        told = ""
        while True:
            try:
                self._context = await in_daemon_thread(self._tls.context)
                self._socket = self._socket or _bound(self._settings)
                await self._serve()
            except OSError as error:
                why, what = error.strerror or str(error), "free the port, or set http.port"
            except SettingsError as error:
                why, what = str(error), "correct the file, or the setting that names it"
            else:
                address, port = self._socket.getsockname()[:2]
                is_tls = self._context is not None
                log.info("http.listening", address=address, port=port, tls=is_tls)
                await self._check_token()
                return
            if why != told:
                log.error(
                    "http.listen_failed",
                    address=self._settings.address,
                    port=self._settings.port,
                    error=why,
                    next_step=f"{what}; http.enabled = false turns the server off. Tried again "
                    f"every {RETRY_S:g} s",
                )
            told = why
            await asyncio.sleep(RETRY_S)

    async def _check_token(self) -> None:
        """Log why requests with the token will be refused, if its file is unusable."""
        if self._settings.token_file:
            try:
                await in_daemon_thread(partial(read_token, self._settings.token_file))
            except SettingsError as error:
                log.warning("http.token_unusable", error=str(error))

    async def follow_files(self) -> None:
        """Use changed files for new connections, until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            context = await in_daemon_thread(self._tls.context)
            if context is not self._context:
                self._context = context
                await self._serve()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._socket is not None:
            self._socket.close()

    async def _serve(self) -> None:
        """Accept connections with the current certificate, in place of the server before.

        The socket stays open when a server is closed, and so do the connections of that server.
        """
        assert self._socket is not None
        before, duplicate = self._server, self._socket.dup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connections.accept,
                sock=duplicate,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else HANDSHAKE_S,
                backlog=BACKLOG,
                start_serving=False,  # so that a cancellation finds the server in ``close``
            )
        except BaseException:
            duplicate.close()
            raise
        try:
            await self._server.start_serving()
        finally:
            if before is not None:
                before.close()


def _bound(settings: HttpSettings) -> socket.socket:
    is_ipv6 = ":" in settings.address
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    bound = socket.create_server((settings.address, settings.port), family=family, backlog=BACKLOG)
    bound.setblocking(False)
    return bound


class Connections:
    """Accepts connections and bounds their number."""

    def __init__(self, runner: web.AppRunner) -> None:
        assert runner.server is not None
        self._server = runner.server

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a new connection. Closes the oldest one if there are too many."""
        open_now = self._server.connections  # in the order of their beginning
        for oldest in open_now[: max(0, len(open_now) + 1 - CONNECTIONS_MAX)]:
            oldest.force_close()
            if oldest.transport is not None:
                oldest.transport.abort()
        return self._server()
