"""The worker service: builds a replication worker and the tasks around it.

Everything opened here is closed here, in reverse order.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from auditor.checks.copies import CopyReader
from auditor.checks.reports import Reports
from auditor.findings import Findings
from auditor.index.own_writes import OwnWrites
from auditor.marking import BothQueues
from auditor.recheck import CopyRecheck
from daemon.limits import keep_to_our_share, keep_to_pace, yield_to_clients
from daemon.placing import Placing, placing_of
from daemon.returns import tell_of_returns
from daemon.session import Session, open_session
from daemon.settings import Settings
from ledgers.bookie.budget import Budgets
from ledgers.bookie.bulk.transfers import BulkTransfers
from ledgers.bookie.client import BookieClient
from ledgers.bookie.quarantine import Quarantine
from ledgers.bookie.quarantining import QuarantiningBookies
from ledgers.zookeeper.store import ZooKeeperStore
from replication.cluster.activity import ActivitySource
from replication.cluster.membership import Half
from replication.cluster.room import RoomSource
from replication.copying.copier import Copier
from replication.journal import MetadataJournal
from replication.planning.open_ledger import OpenLedgers
from replication.planning.survey import Surveyor
from replication.planning.targets import Receivers
from replication.queue.batching import Batcher
from replication.queue.queue import Queue
from replication.recent_copies import CopyRecorder
from replication.repair import OnWritten, Repairer
from replication.waiting.notes import WaitingNotesWriter
from replication.waiting.unproven_ends import UnprovenEnds
from replication.worker import ReplicationWorker


async def run_worker_session(
    settings: Settings, journal: MetadataJournal, own_writes: OwnWrites
) -> None:
    """Repair marked ledgers until the session ends. ``own_writes``: receives metadata writes for
    this node's index."""
    async with open_worker(settings, journal, on_written=own_writes.keep) as opened:
        await opened.worker.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWorker:
    """A worker that is ready to run. ``batcher``: batches the ZooKeeper writes of its session."""

    session: Session
    batcher: Batcher
    worker: ReplicationWorker


def _whole_queue(session: Session, batcher: Batcher) -> Queue:
    holder = socket.gethostname()
    return Queue(session.store, batcher, session.ur, holder=holder, clock=session.clock)


@asynccontextmanager
async def open_worker(
    settings: Settings,
    journal: MetadataJournal,
    *,
    half: Half = Half.WORKER,
    make_queue: Callable[[Session, Batcher], Queue] = _whole_queue,
    on_written: OnWritten = lambda written: None,
) -> AsyncIterator[OpenWorker]:
    """Open a session and build a worker in it. Raises what ``open_session`` raises; the end of the
    session ends the body."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session(settings, half, journal))
        budgets = Budgets(reads_in_flight_max=settings.replication.reads_in_flight_per_bookie)
        bulk = BulkTransfers(budgets, resolve=session.views.resolve)
        bookies = session.bookie_client(budgets, bulk)
        stack.push_async_callback(bookies.close)
        batcher = Batcher(session.store, [session.membership.guard])
        placing = await placing_of(session, settings.placement)
        quarantine = Quarantine(session.clock, session.views.life)
        rooms = RoomSource(
            bookies,
            session.views,
            floor_share=settings.replication.free_room_min,
            clock=session.clock,
            rng=session.rng,
            quarantine=quarantine,
        )
        await rooms.start()
        parts = _Parts(
            settings=settings,
            session=session,
            batcher=batcher,
            queue=make_queue(session, batcher),
            bookies=bookies,
            placing=placing,
            rooms=rooms,
            quarantine=quarantine,
            on_written=on_written,
        )
        worker = parts.worker()
        activity = ActivitySource(session.store, session.ur, session.clock)
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(work)
                for work in (
                    batcher.run(),
                    parts.recorder.run(),
                    *parts.rechecks(half),
                    _keep_to_our_share(settings, session, budgets),
                    keep_to_pace(settings, session.views, bulk, batcher),
                    activity.run(),
                    yield_to_clients(
                        activity, session.membership, bulk, batcher, clock=session.clock
                    ),
                    _pause_while_suspended(session.store, bulk),
                    tell_of_returns(session.views, bookies, bulk),
                    placing.run(),
                    rooms.run(),
                )
            ]
            yield OpenWorker(session=session, batcher=batcher, worker=worker)
            for task in beside:
                task.cancel()


@dataclass(frozen=True, kw_only=True)  # no slots: cached_property needs a __dict__
class _Parts:
    """Builds the parts of one worker."""

    settings: Settings
    session: Session
    batcher: Batcher
    queue: Queue
    bookies: BookieClient
    placing: Placing
    rooms: RoomSource
    quarantine: Quarantine
    on_written: OnWritten

    @cached_property
    def recorder(self) -> CopyRecorder:
        return CopyRecorder(
            self.session.store,
            self.batcher,
            self.session.ur,
            session=self.session.membership.uuid,
            is_enabled=self.settings.replication.copies_reread_after_s > 0,
        )

    def rechecks(self, half: Half) -> list[Coroutine[Any, Any, None]]:
        """Return the task that reads recent copies again. A repair by hand has none: it ends before
        they are due."""
        after_s = self.settings.replication.copies_reread_after_s
        if half is not Half.WORKER or not after_s:
            return []
        session, batcher = self.session, self.batcher
        recheck = CopyRecheck(
            store=session.store,
            batcher=batcher,
            ur=session.ur,
            queue=self.queue,
            views=session.views,
            reader=CopyReader(
                manager=session.manager,
                bookies=QuarantiningBookies(self.bookies, self.quarantine),
                views=session.views,
                clock=session.clock,
                rng=session.rng,
                fallback_digest=self.settings.replication.fallback_digest,
            ),
            reports=Reports(
                BothQueues(session.store, batcher, session.ur, session.clock),
                Findings(session.store, batcher, session.ur, session.clock),
            ),
            after_s=after_s,
            clock=session.clock,
        )
        self.recorder.on_ended = recheck.expect
        return [recheck.run()]

    def worker(self) -> ReplicationWorker:
        session = self.session
        return ReplicationWorker(
            queue=self.queue,
            repairer=self._repairer(),
            views=session.views,
            notes=WaitingNotesWriter(session.store, self.batcher, session.ur),
            ends=UnprovenEnds(
                session.store,
                self.batcher,
                session.ur,
                manager=session.manager,
                clock=session.clock,
            ),
            settings=self.settings.replication,
            node=session.node,
            clock=session.clock,
            rng=session.rng,
        )

    def _repairer(self) -> Repairer:
        session, ours = self.session, self.settings.replication
        answering = QuarantiningBookies(self.bookies, self.quarantine)
        fallback_digest = ours.fallback_digest
        receivers = self._receivers()
        return Repairer(
            queue=self.queue,
            manager=session.manager,
            views=session.views,
            surveyor=Surveyor(
                manager=session.manager,
                bookies=answering,
                clock=session.clock,
                rng=session.rng,
                fallback_digest=fallback_digest,
                checked_share=ours.checked_share,
                entry_lists=ours.entry_lists,
            ),
            open_ledgers=OpenLedgers(
                manager=session.manager,
                # Without quarantine: before fencing, each bookie is asked directly (rules S5, S13).
                bookies=self.bookies,
                views=session.views,
                fallback_digest=fallback_digest,
                receivers=receivers,
                clock=session.clock,
            ),
            copier=Copier(answering, receivers),
            recorder=self.recorder,
            clock=session.clock,
            moves_misplaced=self.settings.checks.repairs_placement,
            on_written=self.on_written,
        )

    def _receivers(self) -> Receivers:
        return Receivers(
            self.placing.policy,
            clock=self.session.clock,
            local=self.session.local,
            is_local_only=self.settings.replication.target == "local",
            rooms=self.rooms,
            rack=self.placing.racks.rack,
            quarantine=self.quarantine,
            allowed=self.placing.groups.allowed,
        )


async def _keep_to_our_share(settings: Settings, session: Session, budgets: Budgets) -> None:
    await keep_to_our_share(
        settings, session.views, session.membership, budgets, clock=session.clock
    )


async def _pause_while_suspended(store: ZooKeeperStore, bulk: BulkTransfers) -> None:
    """Pause copies while the session is disconnected: the locks may be lost (rule S3)."""
    while True:
        await store.wait_disconnected()
        bulk.pause()
        await store.wait_connected()
        bulk.resume()
