"""``bookmender notify serve``: one server of notifications, until SIGTERM or Ctrl-C.

It is a process of its own: ten thousand connections, and the storms in which they come, would take
CPU from repairs. It keeps nothing on disk.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit
from uuid import uuid4

import structlog
import uvloop
from aiohttp import web

from daemon.admin_session import AdminSession
from daemon.http.access import Access, Refusal, check_request
from daemon.http.connections import CONNECTION, CONNECTIONS_MAX
from daemon.http.metrics import MetricsText
from daemon.http.server import listen
from daemon.operations.feed import connection_of
from daemon.settings import Settings
from daemon.zookeeper import open_store
from ledgers.clock import SystemClock
from ledgers.errors import BookmenderError
from notifications.discovery import (
    STALE_S,
    read_servers,
    remove_server,
    to_send_away,
    write_server,
)
from notifications.following import Follower, Sources, sources_of
from notifications.server import NotificationServer

log = structlog.get_logger()

RECORD_S = 5.0
"""How often a server says how it is."""
DRAIN_S = 20.0
FREEZE_S, FROZEN_EVERY, COLLECTED_EVERY = 0.5, 500, 5_000
"""How often, and for how many new and lost clients, the garbage collector is told."""


def run_server(settings: Settings) -> None:
    """Serve until a signal."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    server, clock = uuid4().hex, SystemClock()
    http = replace(settings.http, port=settings.notify.port)
    access = Access(http, observes=False)

    async def authorize(request: web.Request, changes: bool) -> None:
        try:
            access.check_host(request.headers.get("Host", ""))
            _check_origin(request)
            await check_request(access, request, changes=changes)
            if changes and CONNECTION in request:
                request[CONNECTION].changes = True
        except Refusal as refusal:
            refused = web.HTTPUnauthorized if refusal.status == 401 else web.HTTPForbidden
            raise refused(text=str(refusal)) from refusal

    follower = Follower(server, partial(_sources, settings, server), clock)
    served = NotificationServer(
        follower,
        server=server,
        authorize=authorize,
        has_tls=bool(http.certificate_file),
        clients_max=settings.notify.clients_max,
        clock_s=clock.now_s,
    )
    app = served.build()
    metrics_text = MetricsText([])

    async def metrics(request: web.Request) -> web.Response:
        text, content_type = metrics_text.text(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    app.router.add_get("/metrics", metrics)
    stopped, opened = asyncio.Event(), asyncio.get_running_loop().create_future()
    connections_max = settings.notify.clients_max + CONNECTIONS_MAX
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(follower.run()),
            tasks.create_task(served.run()),
            tasks.create_task(keep_pauses_short(served)),
            tasks.create_task(_say_how_it_is(settings, follower, served, opened)),
            tasks.create_task(
                listen(app, http, connections_max=connections_max, on_open=opened.set_result)
            ),
        ]
        await stopped.wait()
        log.info("notify.draining")
        if (cluster := follower.cluster) is not None:
            with suppress(BookmenderError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await remove_server(cluster.store, cluster.paths, server)
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await served.drain()
        for task in running:
            task.cancel()
    log.info("notify.stopped")


async def keep_pauses_short(served: NotificationServer) -> None:
    """Keep the garbage collector away from connected clients, until cancelled.

    With ten thousand clients, each full collection would stop the server for half a second, and a
    storm causes one after the other. Frozen objects are not looked at. A lost client leaves 14 KB
    in reference cycles, which only a full collection of all objects frees.
    """
    frozen = collected = 0
    while True:
        await asyncio.sleep(FREEZE_S)
        if served.closed_count - collected >= COLLECTED_EVERY:
            collected = served.closed_count
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        elif served.opened_count - frozen >= FROZEN_EVERY:
            frozen = served.opened_count
            gc.collect(1)
            gc.freeze()


@asynccontextmanager
async def _sources(settings: Settings, server: str) -> AsyncIterator[Sources]:
    async with open_store(settings, is_of_node=True) as store:
        cluster = connection_of(await AdminSession.on(store, settings))
        async with sources_of(cluster, server=server, clock=SystemClock()) as sources:
            yield sources


async def _say_how_it_is(
    settings: Settings,
    follower: Follower,
    served: NotificationServer,
    opened: asyncio.Future[int],
) -> None:
    """Keep the znode of this server up to date once its port is open, and send clients away while
    others are better off: because this server has far more clients, or because it hears nothing."""
    started_ms, port, url = int(time.time() * 1000), await opened, settings.notify.url
    if not url:
        scheme = "https" if settings.http.certificate_file else "http"
        host = "127.0.0.1" if settings.http.is_loopback else socket.getfqdn()
        url = f"{scheme}://{host}:{port}"
    wait_s = 0.2
    while True:
        await asyncio.sleep(wait_s)
        if (cluster := follower.cluster) is None or served.is_draining:
            continue
        wait_s = RECORD_S
        own = served.record(url, started_ms, int(time.time() * 1000))
        try:
            await write_server(cluster.store, cluster.paths, own)
            served.servers = others = await read_servers(cluster.store, cluster.paths)
        except BookmenderError as error:
            log.warning("notify.record_failed", error=str(error))
            continue
        if follower.matcher is not None:
            follower.matcher.urls = [record.url for record in others]
        if own.age_s > STALE_S and any(other.age_s < STALE_S for other in others):
            served.send_away(own.clients, "stale")
        elif count := to_send_away(own, others):
            served.send_away(count, "moved")


def _check_origin(request: web.Request) -> None:
    """Refuse a web page of another site: a browser lets it open WebSockets to anywhere. Raises
    Refusal."""
    origin = request.headers.get("Origin")
    if origin and urlsplit(origin).netloc != request.headers.get("Host"):
        raise Refusal(403, f"a web page of {origin} may not connect here")
