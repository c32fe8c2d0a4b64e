"""Keeps a matcher up to date, over lost sessions and feeds that begin again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from checkpoints.client import ClusterConnection, bookies_of, wait_enabled
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import BookmenderError
from ledgers.registration import read_instance_id
from ledgers.tasks import task_scope
from notifications.bookies import BookieSource
from notifications.discovery import STALE_S
from notifications.feed_source import POLL_S, FeedSource
from notifications.matcher import Matcher
from notifications.objects import ObjectPublisher, ObjectSource
from notifications.protocol import LEDGER
from notifications.sources import Source
from replication.znodes import ensure_znode

log = structlog.get_logger()

RETRY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sources:
    """What a session with a cluster gives. ``feed``: names the cluster and the generation of its
    feed, as in ``ResumePoint``."""

    feed: str
    cluster: ClusterConnection
    each: Sequence[Source]
    publisher: ObjectPublisher | None = None


OpenSources = Callable[[], AbstractAsyncContextManager[Sources]]


@asynccontextmanager
async def sources_of(
    cluster: ClusterConnection, *, server: str, clock: Clock, bookies: Bookies | None = None
) -> AsyncIterator[Sources]:
    """Follow a cluster as the server with this id. Waits while the feed is disabled.

    Raises, also at the end of the block, SessionLostError, UnavailableError, FeedChangedError.
    """
    chain = await wait_enabled(cluster, lambda: log.warning("notify.feed_disabled"))
    async with bookies_of(cluster, clock, bookies) as client, task_scope() as scope:
        feed = cluster.log(chain, client, clock, poll_max_s=POLL_S)
        scope.start(feed.run())
        await ensure_znode(cluster.store, cluster.paths.feed_watchers)
        watcher = f"{cluster.paths.feed_watchers}/notify-{server}"
        await cluster.store.create(watcher, b"", is_ephemeral=True)
        instance = await read_instance_id(cluster.store, cluster.root)
        publisher = ObjectPublisher(cluster.store, cluster.paths, clock=clock)
        scope.start(publisher.run())
        yield Sources(
            feed=f"{instance or cluster.root}:{chain.generation}",
            cluster=cluster,
            each=(
                FeedSource(feed),
                BookieSource(cluster.store, cluster.root, clock=clock),
                ObjectSource(cluster.store, cluster.paths, clock=clock),
            ),
            publisher=publisher,
        )


class Follower:
    """Owns the matcher of a server. ``matcher``: None until the tables are loaded first."""

    def __init__(self, server: str, open_sources: OpenSources, clock: Clock) -> None:
        self._server, self._open, self._clock = server, open_sources, clock
        self.matcher: Matcher | None = None
        self.cluster: ClusterConnection | None = None
        self.publisher: ObjectPublisher | None = None
        """Of the present session; None while there is none."""
        self.news = asyncio.Event()
        """Set when there may be something to tell clients. Without it, they are told later."""

    async def run(self) -> None:
        """Run until cancelled. After each failure, everything is read again."""
        while True:
            try:
                async with self._open() as sources:
                    await self._follow(sources)
            except BookmenderError as error:
                log.warning("notify.source_lost", error=str(error))
            finally:
                self.cluster = self.publisher = None
            await self._clock.sleep(RETRY_S)

    async def _follow(self, sources: Sources) -> None:
        tables = [await source.load() for source in sources.each]
        now_s = self._clock.now_s()
        if self.matcher is None:
            self.matcher = Matcher(server=self._server, feed=sources.feed, tables=tables)
            # Until the first checkpoint, nothing proves that anybody writes the feed.
            heard_s = dict.fromkeys(self.matcher.tables, now_s)
            self.matcher.heard_s = heard_s | {LEDGER: now_s - STALE_S}
        else:
            self.matcher.load(sources.feed, tables, now_s)
        self.cluster, self.publisher = sources.cluster, sources.publisher
        log.info("notify.loaded", **{table.kind: len(table) for table in tables})
        async with task_scope() as scope:
            for source in sources.each:
                scope.start(self._apply(source, self.matcher))
            await asyncio.get_running_loop().create_future()

    async def _apply(self, source: Source, matcher: Matcher) -> None:
        async with aclosing(source.changes()) as batches:
            async for batch in batches:
                matcher.apply(
                    source.kind,
                    batch.changes,
                    position=batch.position,
                    horizon=batch.horizon,
                    is_current=batch.is_current,
                    now_s=self._clock.now_s(),
                )
                if matcher.dirty:
                    self.news.set()
