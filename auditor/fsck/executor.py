"""The resources of one executor: a session, a view of the bookies, and connections to them.

Only the pace writes through the session. Everything else gets a read-only store.

ZooKeeper sessions: an executor's, and short read-only ones.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from auditor.fsck.budget import BeginPace, ReadShare
from auditor.fsck.copies import CopyInspector
from auditor.fsck.levels import DEFAULT_TIMEOUTS, FsckOptions, SessionTimeouts
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient, BookieClientSettings
from ledgers.clock import Clock, SystemClock
from ledgers.codec.layout import MetadataUri
from ledgers.errors import SessionLostError
from ledgers.health import Quarantine, QuarantiningBookies
from ledgers.manager import LedgerManager
from ledgers.registration import Registration
from ledgers.store import MetadataStore, ReadOnlyStore
from ledgers.tasks import task_scope
from ledgers.zookeeper.store import ZooKeeperStore
from replication.cluster import ViewSource
from replication.orders import OrderStore
from replication.znodes import ClusterPaths


async def open_session(uri: MetadataUri, timeouts: SessionTimeouts) -> ZooKeeperStore:
    """Return a new session, which the caller must close. Raises UnavailableError."""
    return await ZooKeeperStore.open(
        uri.hosts, session_timeout_s=timeouts.session_s, connect_timeout_s=timeouts.connect_s
    )


@asynccontextmanager
async def read_session(
    metadata_service_uri: str, timeouts: SessionTimeouts = DEFAULT_TIMEOUTS
) -> AsyncIterator[tuple[MetadataStore, MetadataUri]]:
    """Yield a read-only store and the parsed URI. Raises UnavailableError, SettingsError."""
    uri = MetadataUri.parse(metadata_service_uri)
    store = ReadOnlyStore(await open_session(uri, timeouts))
    try:
        yield store, uri
    finally:
        await store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """The tools for checking ledgers."""

    manager: LedgerManager
    copies: CopyInspector
    clock: Clock


@asynccontextmanager
async def open_executor(options: FsckOptions, begin_pace: BeginPace) -> AsyncIterator[Executor]:
    """Yield an executor as soon as it has a share of the budget. Raises UnavailableError,
    SettingsError; while it is in use, also SessionLostError and any error of the pace."""
    uri = MetadataUri.parse(options.metadata_service_uri)
    async with AsyncExitStack() as stack:
        store = await open_session(uri, options.timeouts)
        stack.push_async_callback(store.close)
        only_reads = ReadOnlyStore(store)
        clock = SystemClock()
        manager = await LedgerManager.open(only_reads, uri)
        order_store = OrderStore(only_reads, ClusterPaths.below(uri.root))
        views = ViewSource(Registration(only_reads, uri.root), clock, order_store)
        await views.refresh()
        budgets = Budgets()
        bulk = BulkTransfers(budgets, resolve=views.resolve, paces_reads=True)
        client = BookieClient(
            resolve=views.resolve,
            budgets=budgets,
            bulk=bulk,
            clock=clock,
            rng=random.Random(),
            settings=BookieClientSettings(),
        )
        stack.push_async_callback(client.close)
        bookies = QuarantiningBookies(client, Quarantine(clock, views.life))
        allowance = Allowance(budgets, bulk)
        pace = begin_pace(options, store, ClusterPaths.below(uri.root))
        scope = await stack.enter_async_context(task_scope())
        for work in (views.run(), pace.run(allowance.apply), _end_with_session(store)):
            scope.start(work)
        await allowance.is_given.wait()
        yield Executor(
            manager=manager,
            copies=CopyInspector(options, bookies=bookies, views=views, clock=clock),
            clock=clock,
        )


class Allowance:
    """Applies the executor's share to the limits of this process."""

    def __init__(self, budgets: Budgets, bulk: BulkTransfers) -> None:
        self._budgets = budgets
        self._bulk = bulk
        self.is_given = asyncio.Event()
        """Set with the first share."""

    def apply(self, share: ReadShare | None) -> None:
        """Apply the share. None pauses all bulk reads."""
        if share is None:
            self._bulk.pause()
            return
        self._budgets.reads_in_flight_max = share.reads_in_flight_per_bookie
        self._bulk.pace.set(bytes_per_s=share.bytes_per_s, entries_per_s=share.reads_per_s)
        self._bulk.resume()
        self.is_given.set()


async def _end_with_session(store: MetadataStore) -> None:
    await store.wait_lost()
    raise SessionLostError("the ZooKeeper session is over")
