"""The two halves of a node, put together: what each needs around its session, in the order it needs it.

Whatever is opened here is closed here, in reverse.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from auditor.auditor import Auditor
from auditor.draining import Drainer
from auditor.election import Election, Leadership
from auditor.findings import Findings
from auditor.fsck.results.last import meter_last
from auditor.holds import Holds
from auditor.index.keeper import IndexKeeper
from auditor.index.note import IndexTeller
from auditor.marking import Marker
from auditor.outages import Outages
from auditor.records import Records
from daemon.checking import run_checks
from daemon.limits import keep_to_our_share, keep_to_pace
from daemon.placing import Placing, begin_placing
from daemon.returns import tell_of_returns
from daemon.session import Session, open_session
from daemon.settings import Settings
from ledgers.bookie.budget import Budgets
from ledgers.bookie.bulk.transfers import BulkTransfers
from ledgers.bookie.client import BookieClient, BookieClientSettings
from ledgers.bookie.quarantine import Quarantine
from ledgers.bookie.quarantining import QuarantiningBookies
from ledgers.clock import SystemClock
from ledgers.entry import EntryDigest
from ledgers.errors import LeadershipLostError
from ledgers.metadata import DigestType
from ledgers.zookeeper.store import ZooKeeperStore
from replication.cluster.membership import Half
from replication.cluster.own_state import own_path
from replication.cluster.rack_memory import RackMemory
from replication.cluster.room import RoomSource
from replication.copying.copier import Copier
from replication.journal import MetadataJournal
from replication.planning.open_ledger import OpenLedgers
from replication.planning.survey import Surveyor
from replication.planning.targets import Receivers
from replication.queue.batching import Batcher
from replication.queue.queue import Queue
from replication.repair import Repairer
from replication.waiting.notes import WaitingNotesWriter
from replication.worker import ReplicationWorker


def new_outages(settings: Settings) -> Outages:
    """For all sessions of an auditor. Bookies are expected to return within two session time-outs."""
    return Outages(SystemClock(), return_s=2 * settings.zookeeper.session_timeout_s)


async def run_auditor_session(
    settings: Settings, journal: MetadataJournal, outages: Outages
) -> None:
    """Stand for election, and audit while elected. Ends with an error: the session's or the election's."""
    async with (
        open_session(settings, Half.AUDITOR, journal) as session,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(outages.follow(session.store))
        keeper = IndexKeeper(
            store=session.store,
            manager=session.manager,
            clock=session.clock,
            rescan_interval_s=settings.auditor.rescan_interval_s,
        )
        if settings.auditor.standbys_keep_index:
            tasks.create_task(keeper.run())
        placing = await _placing(settings, session)  # before: a leader is to lose no time with it
        tasks.create_task(placing.run())
        election = Election(session.store, session.ur, session.membership, candidate=session.node)
        leadership = await election.win()
        tasks.create_task(_end_with_vote(election.wait_lost(leadership)))
        if not settings.auditor.standbys_keep_index:
            tasks.create_task(keeper.run())
        await _lead(settings, session, leadership, keeper, placing, outages)


async def _lead(
    settings: Settings,
    session: Session,
    leadership: Leadership,
    keeper: IndexKeeper,
    placing: Placing,
    outages: Outages,
) -> None:
    """All that the leader does, until its session or its leadership is over."""
    batcher = Batcher(session.store, leadership.guards)
    records = Records(session.store, batcher, session.ur)
    findings = Findings(session.store, batcher, session.ur, session.clock)
    auditor = Auditor(
        store=session.store,
        ur=session.ur,
        keeper=keeper,
        views=session.views,
        marker=Marker(session.store, batcher, session.ur, session.clock),
        records=records,
        holds=Holds(
            store=session.store,
            batcher=batcher,
            ur=session.ur,
            settings=settings.hold,
            clock=session.clock,
            rack_of=placing.racks.rack,
        ),
        settings=settings.auditor,
        clock=session.clock,
        outages=outages,
    )
    drainer = Drainer(
        store=session.store,
        ur=session.ur,
        manager=session.manager,
        keeper=keeper,
        views=session.views,
        marker=Marker(session.store, batcher, own_path(session.ur), session.clock),
        records=records,
        clock=session.clock,
    )
    checks = run_checks(
        settings,
        session,
        batcher,
        keeper=keeper,
        findings=findings,
        placing=placing,
        is_audit_pending=lambda: auditor.is_loss_pending,
    )
    async with asyncio.TaskGroup() as tasks:
        remembering = _remember_racks(session, batcher, placing)
        telling = IndexTeller(
            keeper,
            records.write_index,
            session_id=session.store.session_id,
            clock=session.clock,
        ).run()
        fsck = meter_last(session.store, session.ur)
        for work in (
            batcher.run(),
            drainer.run(),
            findings.run(),
            remembering,
            checks,
            telling,
            fsck,
        ):
            tasks.create_task(work)
        await auditor.run()


async def _remember_racks(session: Session, batcher: Batcher, placing: Placing) -> None:
    if placing.keeper is not None:
        memory = RackMemory(
            store=session.store,
            batcher=batcher,
            ur=session.ur,
            racks=placing.racks,
            keeper=placing.keeper,
            views=session.views,
            clock=session.clock,
        )
        await memory.run()


async def run_worker_session(settings: Settings, journal: MetadataJournal) -> None:
    """Take ledgers and repair them until the session ends."""
    async with open_worker(settings, journal) as opened:
        await opened.worker.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWorker:
    """A worker that is ready to run, with what runs beside it. ``batcher``: for writes of its session."""

    session: Session
    batcher: Batcher
    worker: ReplicationWorker


async def _placing(settings: Settings, session: Session) -> Placing:
    return await begin_placing(
        settings.placement,
        store=session.store,
        ur=session.ur,
        views=session.views,
        local=session.local,
        clock=session.clock,
        rng=session.rng,
    )


def _whole_queue(session: Session, batcher: Batcher) -> Queue:
    return Queue(session.store, batcher, session.ur, holder=socket.gethostname())


@asynccontextmanager
async def open_worker(
    settings: Settings,
    journal: MetadataJournal,
    *,
    half: Half = Half.WORKER,
    make_queue: Callable[[Session, Batcher], Queue] = _whole_queue,
) -> AsyncIterator[OpenWorker]:
    """Errors are those of ``open_session``; what ends the session ends the body."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session(settings, half, journal))
        budgets = Budgets(reads_in_flight_max=settings.replication.reads_in_flight_per_bookie)
        bulk = BulkTransfers(budgets, resolve=session.views.resolve)
        bookies = BookieClient(
            resolve=session.views.resolve,
            budgets=budgets,
            bulk=bulk,
            clock=session.clock,
            rng=session.rng,
            settings=BookieClientSettings(),
        )
        stack.push_async_callback(bookies.close)
        quarantine = Quarantine(session.clock, session.views.life)
        batcher = Batcher(session.store, [session.membership.guard])
        placing = await _placing(settings, session)
        rooms = RoomSource(
            bookies,
            session.views,
            floor_share=settings.replication.free_room_min,
            clock=session.clock,
            rng=session.rng,
        )
        await rooms.start()
        worker = _worker(
            settings,
            session,
            make_queue(session, batcher),
            batcher,
            bookies,
            _receivers(settings, session, placing, rooms, quarantine),
            quarantine,
        )
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(work)
                for work in (
                    batcher.run(),
                    keep_to_our_share(settings, session.views, session.membership, budgets),
                    keep_to_pace(settings, session.views, bulk),
                    _pause_while_suspended(session.store, bulk),
                    tell_of_returns(session.views, bookies, bulk),
                    placing.run(),
                    rooms.run(),
                )
            ]
            yield OpenWorker(session=session, batcher=batcher, worker=worker)
            for task in beside:
                task.cancel()


def _receivers(
    settings: Settings,
    session: Session,
    placing: Placing,
    rooms: RoomSource,
    quarantine: Quarantine,
) -> Receivers:
    return Receivers(
        placing.policy,
        clock=session.clock,
        local=session.local,
        is_local_only=settings.replication.target == "local",
        rooms=rooms,
        rack=placing.racks.rack,
        quarantine=quarantine,
    )


def _worker(
    settings: Settings,
    session: Session,
    queue: Queue,
    batcher: Batcher,
    bookies: BookieClient,
    receivers: Receivers,
    quarantine: Quarantine,
) -> ReplicationWorker:
    ours = settings.replication
    answering = QuarantiningBookies(bookies, quarantine)
    fallback_digest = EntryDigest(
        DigestType[ours.default_digest_type], ours.default_password.encode()
    )
    repairer = Repairer(
        queue=queue,
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
            # Before anything is fenced each bookie is asked afresh (rules S5, S13).
            bookies=bookies,
            views=session.views,
            fallback_digest=fallback_digest,
            receivers=receivers,
            clock=session.clock,
        ),
        copier=Copier(answering, receivers),
        moves_misplaced=settings.checks.repairs_placement,
    )
    return ReplicationWorker(
        queue=queue,
        repairer=repairer,
        views=session.views,
        notes=WaitingNotesWriter(session.store, batcher, session.ur),
        settings=ours,
        node=session.node,
        clock=session.clock,
        rng=session.rng,
    )


async def _end_with_vote(vote_lost: Awaitable[None]) -> None:
    await vote_lost
    raise LeadershipLostError("our vote is gone")


async def _pause_while_suspended(store: ZooKeeperStore, bulk: BulkTransfers) -> None:
    """Copy nothing while nobody can say whether our locks still stand (rule S3)."""
    while True:
        await store.wait_disconnected()
        bulk.pause()
        await store.wait_connected()
        bulk.resume()
