"""The ZooKeeper session of one service: opens it, adds it to the list of live nodes, and closes it.

Each service has its own session, so the end of one session releases only that service's locks or
vote. Everything opened here is closed here, in reverse order.
"""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from daemon.limits import keep_to_requests_per_s
from daemon.local_bookie import local_bookie
from daemon.settings import Settings
from daemon.zookeeper import open_store
from ledgers.bookie.budget import Budgets
from ledgers.bookie.bulk.transfers import BulkTransfers
from ledgers.bookie.client import BookieClient, BookieClientSettings
from ledgers.clock import SystemClock
from ledgers.errors import SessionLostError
from ledgers.instance_id import read_instance_id
from ledgers.manager import LedgerManager
from ledgers.metadata import BookieId
from ledgers.registration import Registration
from ledgers.store import MetadataStore
from ledgers.zookeeper.store import ZooKeeperStore
from replication.cluster.cluster_view import ViewSource
from replication.cluster.membership import Half, Membership, NodeInfo
from replication.cluster.order_book import OrderBook
from replication.cluster.shared_clock import SharedClock
from replication.journal import ClusterJournal, MetadataJournal
from replication.queue.payloads import underreplication_path
from replication.queue.tree import prepare_tree

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """An open session of one service, with the objects that both services use."""

    store: ZooKeeperStore
    ur: str
    manager: LedgerManager
    views: ViewSource
    membership: Membership
    local: BookieId | None
    clock: SharedClock
    rng: random.Random

    @property
    def node(self) -> str:
        """The name of this node for other nodes and for people: the local bookie's id, else the
        host name."""
        return self.local or socket.gethostname()

    def bookie_client(self, budgets: Budgets, bulk: BulkTransfers) -> BookieClient:
        """Return a new bookie client that resolves bookies by this session's view. The caller
        closes it."""
        return BookieClient(
            resolve=self.views.resolve,
            budgets=budgets,
            bulk=bulk,
            clock=self.clock,
            rng=self.rng,
            settings=BookieClientSettings(),
        )


@asynccontextmanager
async def open_session(
    settings: Settings, half: Half, journal: MetadataJournal
) -> AsyncIterator[Session]:
    """Open a session, register it as a live node and read a first view of the bookies. Closes the
    session at the end.

    Raises UnavailableError (also if there is no such cluster), SettingsError (another layout),
    UnauthorizedError. The body is cancelled and SessionLostError raised when the session is lost.
    """
    store = await open_store(settings, ends_with_loop=True)
    try:
        store.requests_per_s = settings.zookeeper.requests_per_s
        session = await _join(store, settings, half, journal)
        try:
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(session.views.run())
                limiter = tasks.create_task(keep_to_requests_per_s(settings, session.views, store))
                ender = tasks.create_task(end_with_session(store))
                ticker = tasks.create_task(session.membership.keep_synchronised(session.clock))
                yield session
                for task in (watcher, limiter, ender, ticker):
                    task.cancel()
        finally:
            log.info("session.closed", half=half.value, request_count=store.request_count)
    finally:
        await store.close()


async def _join(
    store: ZooKeeperStore, settings: Settings, half: Half, journal: MetadataJournal
) -> Session:
    """Do everything that needs the session before work begins, including the registration as a live
    node."""
    uri, clock = settings.uri, SharedClock(SystemClock())
    cluster = await read_instance_id(store, uri.root)
    manager = await LedgerManager.open(store, uri, journal=ClusterJournal(journal, cluster).record)
    ur = underreplication_path(uri.root)
    await prepare_tree(store, ur)
    views = ViewSource(Registration(store, uri.root), clock, OrderBook(store, ur))
    view = await views.refresh()
    local = local_bookie(settings.node.bookie_id, view)
    info = NodeInfo(
        half=half,
        host=socket.gethostname(),
        pid=os.getpid(),
        bookie_id=local,
        started_ms=clock.wall_ms(),
    )
    membership = await Membership.join(store, ur, info)
    await membership.synchronise(clock)
    await views.refresh()  # safety holds and maintenance windows depend on the synchronised clock
    log.info("session.opened", half=half.value, session=f"{store.session_id:#x}", bookie=local)
    return Session(
        store=store,
        ur=ur,
        manager=manager,
        views=views,
        membership=membership,
        local=local,
        clock=clock,
        rng=random.Random(),
    )


async def end_with_session(store: MetadataStore) -> None:
    """Wait for the end of the session, then raise SessionLostError."""
    await store.wait_lost()
    raise SessionLostError("the ZooKeeper session is over")
