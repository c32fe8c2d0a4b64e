"""A node's auditor half, put together as the daemon does, on a cluster in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from auditor.auditor import Auditor
from auditor.election import Election, Leadership
from auditor.marking import Marker
from auditor.records import Records
from auditor.settings import AuditorSettings
from ledgers.formats.layout import Layout
from ledgers.manager import LedgerManager
from ledgers.memory.store import MemoryStore
from ledgers.registration import Registration
from replication.batching import Batcher
from replication.cluster_view import ViewSource
from replication.membership import Half, Membership
from replication.order_book import OrderBook
from tests.replication.cluster import Cluster
from tests.replication.nodes import ROOT, UR, node_info


@dataclass(slots=True, kw_only=True)
class Leader:
    """An elected node. ``auditor`` runs in ``auditing`` only, as ``task``."""

    store: MemoryStore
    membership: Membership
    leadership: Leadership
    marker: Marker
    views: ViewSource
    auditor: Auditor
    task: "asyncio.Task[None] | None" = None


@asynccontextmanager
async def leading(
    cluster: Cluster, name: str = "node-1", settings: AuditorSettings | None = None
) -> AsyncIterator[Leader]:
    """A node that has won the election, with what runs beside its auditor."""
    store = MemoryStore(cluster.tree)
    beside: list[asyncio.Task[None]] = []
    try:
        views = ViewSource(Registration(store, ROOT), cluster.clock, OrderBook(store, UR))
        await views.refresh()
        membership = await Membership.join(store, UR, node_info(name, Half.AUDITOR))
        leadership = await Election(store, UR, membership, candidate=name).win()
        batcher = Batcher(store, leadership.guards)
        marker = Marker(store, batcher, UR, cluster.clock)
        beside += [asyncio.create_task(batcher.run()), asyncio.create_task(views.run())]
        yield Leader(
            store=store,
            membership=membership,
            leadership=leadership,
            marker=marker,
            views=views,
            auditor=Auditor(
                store=store,
                ur=UR,
                manager=LedgerManager(store, ROOT, Layout.HIERARCHICAL),
                views=views,
                marker=marker,
                records=Records(store, batcher, UR),
                settings=settings or AuditorSettings(),
                clock=cluster.clock,
            ),
        )
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await store.close()


@asynccontextmanager
async def auditing(
    cluster: Cluster, name: str = "node-1", settings: AuditorSettings | None = None
) -> AsyncIterator[Leader]:
    """The leader audits; what ends its auditor ends the test."""
    async with leading(cluster, name, settings) as leader:
        leader.task = auditor = asyncio.create_task(leader.auditor.run())
        try:
            yield leader
        finally:
            auditor.cancel()
            await asyncio.gather(auditor, return_exceptions=True)
        if not auditor.cancelled() and (error := auditor.exception()) is not None:
            raise error
