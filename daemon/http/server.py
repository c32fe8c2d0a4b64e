"""The thread and the port of the HTTP server.

It runs in a thread and an event loop of its own. If it fails, it starts again after a backoff, and
the roles of the node go on. A port that is in use is logged once and tried again.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import structlog
import uvloop
from aiohttp import web

from daemon.admin_session import AdminSession, admin_session
from daemon.http.access import read_token
from daemon.http.app import App
from daemon.http.cluster_reader import ClusterReader, LoopThread
from daemon.http.condition_metrics import publish_conditions
from daemon.http.connections import Connections
from daemon.http.health import probe
from daemon.http.tls import ServerTls
from daemon.live_settings import LiveSettings
from daemon.role_state import NodeService
from daemon.settings import HttpSettings
from daemon.threads import ServiceThread
from daemon.zookeeper import tell_in_log
from ledgers.errors import BookmenderError, LocalLimitError, SettingsError
from ledgers.tasks import in_daemon_thread
from ledgers.zookeeper.store import ZooKeeperStore

log = structlog.get_logger()

BACKLOG = 512
"""Connections that the kernel keeps until they are accepted, or ``net.core.somaxconn``. They cost
this process no file. In a flood a short queue would turn honest clients away."""
KEEP_ALIVE_S = 75.0
FOLLOW_S = 2.0
"""How often the server looks whether the files of its certificate have changed."""
RETRY_S = 30.0
"""Time between two attempts to open the port."""
NEXT_STEPS = {
    errno.EADDRINUSE: "free the port, or set http.port (notify.port for bookmender notify)",
    errno.EADDRNOTAVAIL: "set http.address to an address of this host",
    errno.EAFNOSUPPORT: "set http.address to an IPv4 address, because this host has no IPv6",
    errno.EMFILE: "raise the limit of open files (LimitNOFILE of systemd, ulimit -n)",
    errno.EACCES: "set http.port to 1024 or more, or grant CAP_NET_BIND_SERVICE",
}
"""The next step, by the errno with which the port could not be opened."""
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
            tasks.create_task(publish_conditions(roles, reader))
            await listen(app.build(), settings.http)
    finally:
        thread.stop(timeout_s=THREAD_STOP_S)


@asynccontextmanager
async def open_cluster(live: LiveSettings) -> AsyncIterator[AdminSession]:
    """Open a session for requests, with the rate limit of the node's roles."""
    settings = live.current
    async with admin_session(settings, tell=tell_in_log) as cluster:
        if isinstance(cluster.store, ZooKeeperStore):
            cluster.store.outbox.requests_per_s = settings.zookeeper.requests_per_s
        yield cluster


async def listen(
    app: web.Application,
    settings: HttpSettings,
    *,
    connections_max: int | None = None,
    on_open: Callable[[int], None] = lambda port: None,
) -> None:
    """Open the port and serve the application until cancelled. ``on_open``: called with the port
    once it is open."""
    async with asyncio.TaskGroup() as tasks:
        connections = Connections(tasks, most=connections_max)
        app.middlewares.insert(0, connections.follow)
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=GOODBYE_S,
        )
        await runner.setup()
        try:
            listener = Listener(runner, settings, connections)
            try:
                on_open(await listener.open())
                await listener.follow_files()
            finally:
                listener.close()
        finally:
            await runner.cleanup()


class Listener:
    """The open port. With TLS, it follows changes of the certificate files."""

    def __init__(
        self, runner: web.AppRunner, settings: HttpSettings, connections: Connections
    ) -> None:
        self._runner, self._connections = runner, connections
        self._settings = settings
        self._tls = ServerTls(settings)
        self._socket: socket.socket | None = None

    async def open(self) -> int:
        """Open the port, and return its number. While that fails, log it once for each reason, and
        try again."""
        told = ""
        while True:
            try:
                self._connections.context = await in_daemon_thread(self._tls.context)
                self._socket = _bound(self._settings)
            except OSError as error:
                why = error.strerror or str(error)
                what = NEXT_STEPS.get(error.errno or 0, "set http.address and http.port")
            except BookmenderError as error:
                why, what = str(error), "correct the file, or the setting that names it"
            else:
                assert self._runner.server is not None
                self._connections.listen(self._socket, self._runner.server)
                address, port = self._socket.getsockname()[:2]
                is_tls = self._connections.context is not None
                log.info("http.listening", address=address, port=port, tls=is_tls)
                await self._check_token()
                return int(port)
            if why != told:
                log.error(
                    "http.listen_failed",
                    address=self._settings.address,
                    port=self._settings.port,
                    error=why,
                    next_step=f"{what}; http.enabled = false turns off that of a node. Tried again "
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
            with suppress(LocalLimitError):  # the former content stays in use
                self._connections.context = await in_daemon_thread(self._tls.context)

    def close(self) -> None:
        self._connections.close(self._socket)


def _bound(settings: HttpSettings) -> socket.socket:
    """Return the listening socket. ``::`` also takes IPv4 connections, where the kernel can."""
    is_ipv6 = ":" in settings.address
    is_unspecified = ipaddress.ip_address(settings.address).is_unspecified
    bound = socket.create_server(
        (settings.address, settings.port),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=BACKLOG,
        dualstack_ipv6=is_ipv6 and is_unspecified and socket.has_dualstack_ipv6(),
    )
    bound.setblocking(False)
    return bound
