"""A node's auditor, put together as the daemon does, on a cluster in memory."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

from auditor.absence import LossTracker, Outages
from auditor.auditor import Auditor
from auditor.draining import Drainer
from auditor.election import Election, Leadership
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.marker import Marker
from auditor.records import Records
from auditor.safety_hold import SafetyHolds
from auditor.settings import AuditorSettings, HoldSettings
from ledgers.codec.layout import Layout
from ledgers.manager import LedgerManager
from ledgers.registration import Registration
from replication.cluster import ViewSource
from replication.history import HistoryWriter
from replication.nodes import Membership, Role
from replication.orders import OrderStore
from replication.transactions import Batcher
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.nodes import PATHS, ROOT, node_info


@dataclass(slots=True, kw_only=True)
class Leader:
    """An elected node. ``auditor`` runs in ``auditing`` only, as ``task``."""

    store: MemoryStore
    membership: Membership
    leadership: Leadership
    batcher: Batcher
    marker: Marker
    views: ViewSource
    records: Records
    updater: LedgerMapUpdater
    auditor: Auditor
    drainer: Drainer
    history: HistoryWriter
    task: "asyncio.Task[None] | None" = None


@asynccontextmanager
async def leading(
    cluster: Cluster,
    name: str = "node-1",
    settings: AuditorSettings | None = None,
    hold: HoldSettings | None = None,
    outages: Outages | None = None,
) -> AsyncIterator[Leader]:
    """Yield a node that has won the election, with everything that runs beside its auditor."""
    store = MemoryStore(cluster.tree)
    beside: list[asyncio.Task[None]] = []
    try:
        views = ViewSource(Registration(store, ROOT), cluster.clock, OrderStore(store, PATHS))
        await views.refresh()
        membership = await Membership.join(store, PATHS, node_info(name, Role.AUDITOR))
        leadership = await Election(
            store, PATHS, membership, candidate=name, clock=cluster.clock
        ).win()
        batcher = Batcher(store, leadership.guards)
        marker = Marker(store, batcher, PATHS, cluster.clock)
        history = HistoryWriter(
            batcher, PATHS, owner=membership.uuid, node=name, clock=cluster.clock
        )
        manager = LedgerManager(store, ROOT, Layout.HIERARCHICAL)
        records = Records(store, batcher, PATHS)
        settings = settings or AuditorSettings()
        updater = LedgerMapUpdater(store=store, manager=manager, clock=cluster.clock)
        holds = SafetyHolds(
            store=store,
            batcher=batcher,
            paths=PATHS,
            settings=hold or HoldSettings(),
            clock=cluster.clock,
            history=history,
        )
        tracker = LossTracker(
            updater=updater, views=views, holds=holds, settings=settings, outages=outages
        )
        beside += [asyncio.create_task(e.run()) for e in (batcher, views, updater, history)]
        if outages is not None:
            beside.append(asyncio.create_task(outages.follow(store)))
        yield Leader(
            store=store,
            membership=membership,
            leadership=leadership,
            batcher=batcher,
            marker=marker,
            views=views,
            records=records,
            updater=updater,
            auditor=Auditor(tracker=tracker, marker=marker, records=records),
            drainer=Drainer(
                updater=updater,
                views=views,
                marker=Marker(store, batcher, PATHS.private, cluster.clock),
                records=records,
                history=history,
            ),
            history=history,
        )
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await store.close()


@asynccontextmanager
async def auditing(
    cluster: Cluster,
    name: str = "node-1",
    settings: AuditorSettings | None = None,
    hold: HoldSettings | None = None,
    outages: Outages | None = None,
) -> AsyncIterator[Leader]:
    """Yield a leader whose auditor runs. An error of the auditor ends the test."""
    async with (
        leading(cluster, name, settings, hold, outages) as leader,
        running(leader.auditor.run()) as task,
    ):
        leader.task = task
        yield leader


@asynccontextmanager
async def draining(cluster: Cluster, name: str = "node-1") -> AsyncIterator[Leader]:
    """Yield a leader whose drainer runs. An error of the drainer ends the test."""
    async with leading(cluster, name) as leader, running(leader.drainer.run()):
        yield leader


@asynccontextmanager
async def running(work: Coroutine[None, None, None]) -> AsyncIterator["asyncio.Task[None]"]:
    """Do the work during the block. An error of the work ends the test."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
