"""A server of notifications on a loopback port, without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import unused_port

from notifications.following import Follower
from notifications.matcher import Matcher
from notifications.protocol import BOOKIE, LEDGER, OBJECT, Change, ledger
from notifications.server import NotificationServer
from notifications.versions import VersionTable


class FakePublisher:
    """Publishes at the server itself."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def publish(self, name: str) -> int:
        return self._served.change(f"O{name}")

    async def delete(self, name: str) -> int:
        return self._served.change(f"O{name}", is_deleted=True)


class Served:
    """``changes``: tells the server that a ledger changed."""

    def __init__(
        self, feed: str = "cluster:1", *, zxid: int = 100, refuses: bool = False, **options: Any
    ) -> None:
        self.zxid = zxid
        tables = [
            VersionTable(kind, position=zxid, horizon=zxid) for kind in (LEDGER, BOOKIE, OBJECT)
        ]
        self.matcher = Matcher(server="one", feed=feed, tables=tables)
        self.follower = Follower("one", lambda: None, None)  # type: ignore[arg-type, return-value]
        self.follower.matcher = self.matcher
        self.follower.publisher = FakePublisher(self)  # type: ignore[assignment]
        self.refuses = refuses
        self.port = unused_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = NotificationServer(
            self.follower, server="one", authorize=self._authorize, **options
        )

    async def _authorize(self, request: web.Request, changes: bool) -> None:
        if self.refuses:
            raise web.HTTPUnauthorized(text="this request needs the token")

    def change(self, key: str, *, is_deleted: bool = False) -> int:
        self.zxid += 1
        now_s = asyncio.get_running_loop().time()
        for kind in (LEDGER, BOOKIE, OBJECT):
            found = [Change(key, self.zxid, is_deleted)] if key[0] == kind else []
            self.matcher.apply(kind, found, position=self.zxid, now_s=now_s)
        return self.zxid

    def change_ledger(self, ledger_id: int) -> int:
        return self.change(ledger(ledger_id))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Served]:
        self.change("L999999")
        runner = web.AppRunner(self.server.build(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        ticking = asyncio.create_task(self.server.run())
        try:
            yield self
        finally:
            ticking.cancel()
            for channel in list(self.server._channels.values()):
                channel.abort()
            await runner.cleanup()


async def until(condition: Any) -> None:
    """Wait for a condition, 20 s at most."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # of state that has no event
            await asyncio.sleep(0.01)
