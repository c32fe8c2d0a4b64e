"""A node with a worker, put together as the daemon does, on ZooKeeper and bookies in memory."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.codec.layout import Layout
from ledgers.digest import EntryDigest
from ledgers.health import AnsweringBookies, BookieHealth
from ledgers.manager import Journal, LedgerManager, VersionedMetadata
from ledgers.model import BookieId
from ledgers.placement import DEFAULT_RACK, PlacementPolicy, RackRule, RandomPlacement
from ledgers.registration import Registration, ResolveHost, as_spelled
from replication.backoff import WaitingList
from replication.cluster import IsolationGroups, ViewSource
from replication.copying import Copier
from replication.history import HistoryWriter
from replication.inspection import Inspector
from replication.ledger_record import UnprovenEnd, WaitingNote, WaitingNotes
from replication.marks import MarkTree
from replication.nodes import Membership, NodeInfo, Role
from replication.open_ledgers import OpenLedgers
from replication.orders import OrderStore
from replication.reasons import Blocked, Facts, Reason
from replication.recent_copies import CopyRecorder
from replication.repair import Outcome, Repairer
from replication.settings import ReplicationSettings
from replication.targets import TargetSelector
from replication.transactions import Batcher
from replication.work_queue import LedgerLease, Queue, QueuedLedger
from replication.worker import ReplicationWorker
from replication.znodes import ClusterPaths
from tests.memory.store import MemoryStore, MemoryTree

ROOT = "/ledgers"
PATHS = ClusterPaths.below(ROOT)
LEDGER = 7


class Notes(WaitingNotes):
    """Writes notes as a worker does, but without a lock."""

    def __init__(self, store: MemoryStore, batcher: Batcher) -> None:
        super().__init__(store, PATHS)
        self._batcher = batcher

    async def put(self, note: WaitingNote) -> WaitingNote:
        return await self.write(note, before=note, apply=self._batcher.apply)


@dataclass(slots=True, kw_only=True)
class Node:
    """The parts of one worker session, put together as the daemon does."""

    store: MemoryStore
    batcher: Batcher
    membership: Membership
    manager: LedgerManager
    views: ViewSource
    queue: Queue
    quarantine: BookieHealth
    recorder: CopyRecorder
    repairer: Repairer
    written: list[VersionedMetadata]
    """The writes that the repairer reported."""
    notes: Notes
    clock: Clock
    worker: ReplicationWorker
    history: HistoryWriter

    async def note_unproven(self, ledger_id: int, facts: Facts) -> None:
        """Write the note of a worker that could not prove the ledger's end."""
        now_ms = self.clock.wall_ms()
        note = WaitingNote(
            ledger_id=ledger_id,
            blocked=Blocked(reason=Reason.END_UNPROVEN, facts=facts),
            node="host",
            since_ms=now_ms,
            unproven=UnprovenEnd(ledger_id=ledger_id, facts=facts, tried_ms=now_ms),
        )
        await self.notes.put(note)

    async def lease(self, ledger_id: int = LEDGER) -> LedgerLease:
        """Lease the ledger at its current mark."""
        lease = await self.queue.lease(await self.queued(ledger_id))
        assert lease is not None, ledger_id
        return lease

    async def first_try(self, ledger_id: int = LEDGER) -> tuple[LedgerLease, Outcome]:
        """Lease the ledger and repair it. An open ledger that lacks a bookie is then in its
        grace."""
        lease = await self.lease(ledger_id)
        return lease, await self.repairer.repair(lease)

    async def queued(self, ledger_id: int = LEDGER) -> QueuedLedger:
        found = await MarkTree(self.store, PATHS).read(ledger_id)
        assert found is not None, ledger_id
        return QueuedLedger(ledger_id=ledger_id, marks=(found,))


def node_info(name: str, role: Role = Role.WORKER) -> NodeInfo:
    return NodeInfo(role=role, host=name, pid=1, bookie_id=None, started_ms=0)


@asynccontextmanager
async def running_node(
    name: str,
    *,
    tree: MemoryTree,
    bookies: Bookies,
    clock: Clock,
    seed: int,
    local: BookieId | None,
    settings: ReplicationSettings,
    journal: Journal | None,
    fallback: EntryDigest,
    racks: Mapping[BookieId, str] | None = None,
    moves_misplaced: bool = False,
    resolve: ResolveHost = as_spelled,
) -> AsyncIterator[Node]:
    """Yield a node with its session and everything that runs beside the worker.

    The tasks beside the worker may fail when a test ends the session; the worker reports that.
    """
    store, rng = MemoryStore(tree), random.Random(seed)
    beside: list[asyncio.Task[None]] = []
    try:
        manager = LedgerManager(store, root=ROOT, layout=Layout.HIERARCHICAL, journal=journal)
        registration = Registration(store, ROOT, resolve=resolve)
        views = ViewSource(registration, clock, OrderStore(store, PATHS))
        await views.refresh()
        membership = await Membership.join(store, PATHS, node_info(name))
        batcher = Batcher(store, [membership.guard])
        queue = Queue(store, batcher, PATHS, holder=name, clock=clock)
        quarantine = BookieHealth(clock, views.life)
        answering = AnsweringBookies(bookies, quarantine)
        groups = IsolationGroups(store, clock)
        await groups.refresh()
        target_selector = TargetSelector(
            RandomPlacement(rng, local=local)
            if racks is None
            else PlacementPolicy(RackRule(), rng, locate=racks.get, local=local),
            clock=clock,
            local=local,
            is_local_only=settings.target == "local",
            health=quarantine,
            allowed=groups.allowed,
            rack=lambda bookie: (racks or {}).get(bookie, DEFAULT_RACK),
        )
        recorder = CopyRecorder(store, batcher, PATHS, session=membership.uuid)
        history = HistoryWriter(batcher, PATHS, owner=membership.uuid, node=name, clock=clock)
        written: list[VersionedMetadata] = []
        repairer = Repairer(
            queue=queue,
            manager=manager,
            views=views,
            inspector=Inspector(
                manager=manager,
                bookies=answering,
                clock=clock,
                rng=rng,
                fallback_digest=fallback,
                checked_share=settings.checked_share,
            ),
            open_ledgers=OpenLedgers(
                manager=manager,
                bookies=bookies,
                views=views,
                fallback_digest=fallback,
                target_selector=target_selector,
                clock=clock,
                history=history,
            ),
            copier=Copier(answering, target_selector),
            recorder=recorder,
            clock=clock,
            moves_misplaced=moves_misplaced,
            on_written=written.append,
        )
        waiting = WaitingList(
            queue=queue,
            manager=manager,
            views=views,
            settings=settings,
            node=name,
            clock=clock,
            rng=rng,
        )
        worker = ReplicationWorker(waiting=waiting, repairer=repairer, history=history)
        node = Node(
            store=store,
            batcher=batcher,
            membership=membership,
            manager=manager,
            views=views,
            queue=queue,
            quarantine=quarantine,
            recorder=recorder,
            repairer=repairer,
            written=written,
            notes=Notes(store, batcher),
            clock=clock,
            worker=worker,
            history=history,
        )
        beside += [
            asyncio.create_task(work)
            for work in (
                node.batcher.run(),
                node.views.run(),
                node.recorder.run(),
                node.history.run(),
            )
        ]
        yield node
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await store.close()


@asynccontextmanager
async def working(node: Node) -> AsyncIterator["asyncio.Task[None]"]:
    """Run the node's worker. An error of the worker ends the test."""
    worker = asyncio.create_task(node.worker.run())
    try:
        yield worker
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    if not worker.cancelled() and (error := worker.exception()) is not None:
        raise error
