"""The two services of a node, each in one session.

The worker service builds a replication worker and the tasks around it. The auditor service takes
part in the election, and runs all tasks of the leader while elected. Everything opened here is
closed here, in reverse order.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from archive.keeper import ArchiveKeeper
from auditor.absence import LossTracker, Outages
from auditor.activity import ActivityWatch
from auditor.auditor import Auditor
from auditor.backlog import Backlog
from auditor.checks.copies import CopyInspector
from auditor.checks.records import FindingReporter
from auditor.disable_end import DisableEnd
from auditor.draining import Drainer
from auditor.election import Election, Leadership
from auditor.fsck.results.summary import meter_last
from auditor.history_cleaner import HistoryCleaner
from auditor.ledger_map_updater import LedgerMapReporter, LedgerMapUpdater, RecentWrites
from auditor.mark_reasons import Findings
from auditor.marker import Marker
from auditor.recheck import CopyRecheck
from auditor.records import Records
from auditor.safety_hold import SafetyHolds
from checkpoints.feed_ledgers import FeedLostError
from checkpoints.publisher import FeedPublisher
from checkpoints.restores import ChainFile, RestoreWatch
from daemon.checking import run_checks
from daemon.limits import keep_to_our_share, keep_to_pace, yield_to_clients
from daemon.live_settings import LiveSettings
from daemon.placement import SessionPlacement, session_placement
from daemon.role_state import RoleState
from daemon.session import Session, open_session, tell_of_returns
from daemon.settings import Settings
from daemon.state import state_dir
from ledgers.appending import BookiePool
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient, open_bookies
from ledgers.clock import SystemClock
from ledgers.errors import (
    DamagedEndError,
    LeadershipLostError,
    UnavailableError,
    UnprovenEndError,
)
from ledgers.health import AnsweringBookies, BookieHealth
from ledgers.manager import VersionedMetadata
from ledgers.placement import Candidate
from ledgers.quorum import RecoveredEnd
from ledgers.recovery import recover_ledger
from ledgers.registration import read_instance_id
from ledgers.zookeeper.store import ZooKeeperStore
from replication.backoff import WaitingList
from replication.client_activity import ActivitySource
from replication.copying import Copier
from replication.history import Event, HistoryWriter, Kind
from replication.inspection import Inspector
from replication.journal import MetadataJournal
from replication.nodes import Role
from replication.open_ledgers import OpenLedgers
from replication.racks import RackMemory
from replication.recent_copies import CopyRecorder
from replication.repair import OnWritten, Repairer
from replication.targets import DiskSpaceSource, TargetSelector
from replication.transactions import Batcher
from replication.work_queue import Queue
from replication.worker import ReplicationWorker


async def run_worker_session(
    live: LiveSettings,
    journal: MetadataJournal,
    recent_writes: RecentWrites,
    state: RoleState,
) -> None:
    """Repair marked ledgers until the session ends. ``recent_writes``: receives metadata writes for
    this node's ledger map. ``state``: where the service publishes what it does."""
    async with open_worker(live, journal, on_written=recent_writes.keep) as opened:
        with state.in_session(opened.session.store), state.working(opened.worker):
            await opened.worker.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWorker:
    """A worker that is ready to run. ``batcher``: batches the ZooKeeper writes of its session."""

    session: Session
    batcher: Batcher
    worker: ReplicationWorker


def _whole_queue(session: Session, batcher: Batcher) -> Queue:
    holder = socket.gethostname()
    return Queue(session.store, batcher, session.paths, holder=holder, clock=session.clock)


@asynccontextmanager
async def open_worker(
    live: LiveSettings,
    journal: MetadataJournal,
    *,
    role: Role = Role.WORKER,
    make_queue: Callable[[Session, Batcher], Queue] = _whole_queue,
    on_written: OnWritten = lambda written: None,
) -> AsyncIterator[OpenWorker]:
    """Open a session and build a worker in it. Raises what ``open_session`` raises; the end of the
    session ends the body."""
    async with AsyncExitStack() as stack:
        settings, ours = live.current, live.current.replication
        session = await stack.enter_async_context(open_session(live, role, journal))
        store, paths, views, clock = session.store, session.paths, session.views, session.clock
        budgets = Budgets(reads_in_flight_max=ours.reads_in_flight_per_bookie)
        health = BookieHealth(clock, views.life, session.rng)
        bulk = BulkTransfers(
            budgets, resolve=views.resolve, connector=session.connector, health=health
        )
        bookies = BookieClient(bulk)
        stack.push_async_callback(bookies.close)
        batcher = Batcher(store, [session.membership.guard])
        placement = await session_placement(session, settings.placement)
        disk_spaces = DiskSpaceSource(
            bookies,
            views,
            floor_share=ours.free_disk_share_min,
            clock=clock,
            rng=session.rng,
            health=health,
        )
        await disk_spaces.start()
        queue = make_queue(session, batcher)
        history = _history(session, batcher)
        answering = AnsweringBookies(bookies, health)
        recorder = CopyRecorder(
            store,
            batcher,
            paths,
            session=session.membership.uuid,
            is_enabled=ours.copies_reread_after_s > 0,
        )
        target_selector = TargetSelector(
            placement.policy,
            clock=clock,
            local=session.local,
            is_local_only=ours.target == "local",
            disk_spaces=disk_spaces,
            rack=placement.racks.rack,
            health=health,
            allowed=placement.groups.allowed,
        )
        repairer = Repairer(
            queue=queue,
            manager=session.manager,
            views=views,
            inspector=Inspector(
                manager=session.manager,
                bookies=answering,
                clock=clock,
                rng=session.rng,
                fallback_digest=ours.fallback_digest,
                checked_share=ours.checked_share,
            ),
            open_ledgers=OpenLedgers(
                manager=session.manager,
                # Without quarantine: before fencing, each bookie is asked directly (rules S5, S13).
                bookies=bookies,
                views=views,
                fallback_digest=ours.fallback_digest,
                target_selector=target_selector,
                clock=clock,
                history=history,
            ),
            copier=Copier(answering, target_selector),
            recorder=recorder,
            clock=clock,
            moves_misplaced=settings.checks.repairs_placement,
            on_written=on_written,
        )
        waiting = WaitingList(
            queue=queue,
            manager=session.manager,
            views=views,
            settings=ours,
            node=session.node,
            clock=clock,
            rng=session.rng,
        )
        worker = ReplicationWorker(waiting=waiting, repairer=repairer, history=history)
        activity = ActivitySource(store, paths, clock)
        works: list[Coroutine[Any, Any, None]] = [
            batcher.run(),
            history.run(),
            recorder.run(),
            keep_to_our_share(live, views, session.membership, budgets, clock=clock),
            keep_to_pace(live, views, bulk, batcher),
            live.follow(lambda now: worker.apply(now.replication), clock=clock),
            activity.run(),
            yield_to_clients(activity, session.membership, bulk, batcher, clock=clock),
            _pause_while_suspended(store, bulk),
            tell_of_returns(views, bookies),
            placement.run(),
            disk_spaces.run(),
        ]
        # A repair by hand ends before its copies are due.
        if role is Role.WORKER and ours.copies_reread_after_s:
            recheck = CopyRecheck(
                store=store,
                batcher=batcher,
                paths=paths,
                queue=queue,
                views=views,
                inspector=CopyInspector(
                    manager=session.manager,
                    bookies=answering,
                    views=views,
                    clock=clock,
                    rng=session.rng,
                    fallback_digest=ours.fallback_digest,
                ),
                reports=FindingReporter(Findings(store, batcher, paths, clock, history)),
                after_s=ours.copies_reread_after_s,
                clock=clock,
            )
            recorder.on_ended = recheck.expect
            works.append(recheck.run())
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(work) for work in works]
            yield OpenWorker(session=session, batcher=batcher, worker=worker)
            for task in beside:
                task.cancel()


def _history(session: Session, batcher: Batcher) -> HistoryWriter:
    return HistoryWriter(
        batcher,
        session.paths,
        owner=session.membership.uuid,
        node=session.node,
        clock=session.clock,
    )


async def _pause_while_suspended(store: ZooKeeperStore, bulk: BulkTransfers) -> None:
    """Pause copies while the session is disconnected: the locks may be lost (rule S3)."""
    while True:
        await store.wait_disconnected()
        bulk.pause()
        await store.wait_connected()
        bulk.resume()


ACTIVITY_READS_IN_FLIGHT_MAX = 64
"""Reads of the last entries of open ledgers in flight at one bookie."""
FEED_READS_IN_FLIGHT_MAX = 64
"""Reads of the feed's own ledgers in flight at one bookie."""
SWITCH_INTERVAL_S = sys.getswitchinterval()
FEED_SWITCH_INTERVAL_S = 0.0005
"""Longest time for which a busy thread keeps the interpreter from another one, while this node
writes the change feed. A request to ZooKeeper needs the interpreter several times on kazoo's
thread. With Python's default of 5 ms it takes up to twice as long while the loop is busy. Without
the feed the default is better: repairs of small ledgers are a tenth faster."""
SESSION_TIMEOUT_LEAST_S = 4.0
"""ZooKeeper's default lower bound of a session timeout: two ticks."""


def new_outages(settings: Settings) -> Outages:
    """Return the record of ZooKeeper outages that all sessions of the auditor share.

    After an outage bookies have two session timeouts to register again.
    """
    return Outages(SystemClock(), return_s=2 * settings.zookeeper.session_timeout_s)


async def run_auditor_session(
    live: LiveSettings,
    journal: MetadataJournal,
    outages: Outages,
    recent_writes: RecentWrites,
    state: RoleState,
) -> None:
    """Stand for election, and audit while elected. Ends with SessionLostError, LeadershipLostError
    or another error.

    ``recent_writes``: metadata writes of this node's worker, which the ledger map takes over
    without reading them again. ``state``: where the service publishes what it does.
    """
    settings = live.current
    async with (
        open_session(live, Role.AUDITOR, journal) as session,
        asyncio.TaskGroup() as tasks,
    ):
        with state.in_session(session.store), state.working():
            tasks.create_task(outages.follow(session.store))
            updater = LedgerMapUpdater(
                store=session.store,
                manager=session.manager,
                clock=session.clock,
                recent_writes=recent_writes,
            )
            if settings.auditor.standbys_keep_ledger_map:
                tasks.create_task(updater.run())
            cluster = await read_instance_id(session.store, session.manager.root)
            disk = ChainFile(state_dir(settings), cluster=cluster or str(settings.uri))
            restores = RestoreWatch(session.store, session.paths, disk, clock=session.clock)
            tasks.create_task(restores.run())
            # Prepared before the election, so that a new leader can act at once.
            placement = await session_placement(session, settings.placement)
            tasks.create_task(placement.run())
            election = Election(
                session.store,
                session.paths,
                session.membership,
                candidate=session.node,
                clock=session.clock,
            )
            elected = asyncio.Event()
            tasks.create_task(_keep_archive(session, leads=elected.is_set))
            leadership = await election.win()
            elected.set()
            tasks.create_task(_end_with_vote(election.wait_lost(leadership)))
            if not settings.auditor.standbys_keep_ledger_map:
                tasks.create_task(updater.run())
            await _lead(live, session, leadership, updater, placement, outages, state)


async def _lead(
    live: LiveSettings,
    session: Session,
    leadership: Leadership,
    updater: LedgerMapUpdater,
    placement: SessionPlacement,
    outages: Outages,
    state: RoleState,
) -> None:
    """Run all tasks of the leader until its session or its leadership ends."""
    settings = live.current
    store, paths, views, clock = session.store, session.paths, session.views, session.clock
    batcher = Batcher(store, leadership.guards)
    history = _history(session, batcher)
    history.record(Event(kind=Kind.LEADER_ELECTED))
    records = Records(store, batcher, paths)
    findings = Findings(store, batcher, paths, clock, history)
    holds = SafetyHolds(
        store=store,
        batcher=batcher,
        paths=paths,
        settings=settings.hold,
        clock=clock,
        rack_of=placement.racks.rack,
        history=history,
    )
    tracker = LossTracker(
        updater=updater, views=views, holds=holds, settings=settings.auditor, outages=outages
    )
    auditor = Auditor(
        tracker=tracker,
        marker=Marker(store, batcher, paths, clock),
        records=records,
        standstill_max_s=2 * max(settings.zookeeper.session_timeout_s, SESSION_TIMEOUT_LEAST_S),
    )
    updater.is_urgent = lambda: views.is_reading or auditor.is_deciding
    drainer = Drainer(
        updater=updater,
        views=views,
        marker=Marker(store, batcher, paths.private, clock),
        records=records,
        history=history,
    )
    reporter = LedgerMapReporter(updater, records.write, session_id=store.session_id)
    backlog = Backlog(
        paths=paths,
        updater=updater,
        losses=lambda: auditor.losses,
        draining=lambda: views.current.orders.draining,
        record=records.write,
    )
    works: list[Coroutine[Any, Any, None]] = [
        batcher.run(),
        history.run(),
        HistoryCleaner(store, batcher, paths, clock).run(),
        DisableEnd(store=store, batcher=batcher, paths=paths, clock=clock, history=history).run(),
        drainer.run(),
        findings.run(),
        records.keep_readable(clock),
        run_checks(
            live,
            session,
            batcher=batcher,
            updater=updater,
            findings=findings,
            placement=placement,
            is_audit_pending=lambda: tracker.is_loss_pending,
            history=history,
        ),
        reporter.run(),
        backlog.run(),
        meter_last(store, paths),
        _watch_activity(session, updater, records),
        _write_feed(session, batcher, updater, placement),
        live.follow(lambda now: holds.apply(now.hold), clock=clock),
    ]
    if placement.rack_keeper is not None:
        memory = RackMemory(
            store=store,
            batcher=batcher,
            paths=paths,
            racks=placement.racks,
            rack_keeper=placement.rack_keeper,
            views=views,
            clock=clock,
        )
        works.append(memory.run())
    with state.leading(backlog):
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work)
            await auditor.run()


async def _watch_activity(session: Session, updater: LedgerMapUpdater, records: Records) -> None:
    """Watch client activity with separate connections, so that its few reads never wait behind
    checks."""
    async with open_bookies(
        session.views.resolve,
        reads_in_flight_max=ACTIVITY_READS_IN_FLIGHT_MAX,
        connector=session.connector,
    ) as bookies:
        watch = ActivityWatch(
            updater=updater,
            views=session.views,
            bookies=bookies,
            records=records,
            clock=session.clock,
        )
        await watch.run()


async def _write_feed(
    session: Session, batcher: Batcher, updater: LedgerMapUpdater, placement: SessionPlacement
) -> None:
    """Write the change feed with separate connections, so that checks never delay it."""
    views = session.views

    async def writable() -> list[Candidate]:
        return [
            Candidate(bookie=bookie, rack=placement.racks.rack(bookie))
            for bookie in sorted(views.current.receiving)
        ]

    async with open_bookies(
        views.resolve, reads_in_flight_max=FEED_READS_IN_FLIGHT_MAX, connector=session.connector
    ) as bookies:
        pool = BookiePool(writable=writable, placement=placement.policy)

        async def recover(found: VersionedMetadata) -> VersionedMetadata:
            view = views.current

            async def confirm(end: RecoveredEnd) -> None:
                doubts = await views.doubts_about(view, members=end.members, believed=end.trusted)
                if doubts:
                    raise UnavailableError(f"bookies changed during recovery: {doubts}")

            try:
                return await recover_ledger(
                    found,
                    manager=session.manager,
                    bookies=bookies,
                    pool=pool,
                    clock=session.clock,
                    reformatted=view.initialised_after(found.stat.czxid),
                    registered=view.answering,
                    confirm=confirm,
                )
            except (UnprovenEndError, DamagedEndError) as error:
                # No bookie will come back with the missing entries if all of them are here.
                if not view.answering.issuperset(found.metadata.last_segment.ensemble):
                    raise
                raise FeedLostError(
                    str(error), ledger_id=found.ledger_id, is_certain=False
                ) from error

        publisher = FeedPublisher(
            store=session.store,
            batcher=batcher,
            paths=session.paths,
            updater=updater,
            manager=session.manager,
            bookies=bookies,
            pool=pool,
            recover=recover,
            clock=session.clock,
            random=session.rng,
            on_writing=_switch_threads_often,
        )
        await publisher.run()


async def _keep_archive(session: Session, *, leads: Callable[[], bool]) -> None:
    keeper = ArchiveKeeper(
        store=session.store,
        manager=session.manager,
        paths=session.paths,
        clock=session.clock,
        node=session.node,
        leads=leads,
        open_bookies=lambda: open_bookies(
            session.views.resolve,
            reads_in_flight_max=FEED_READS_IN_FLIGHT_MAX,
            connector=session.connector,
        ),
    )
    await keeper.run()


def _switch_threads_often(is_writing_feed: bool) -> None:
    sys.setswitchinterval(FEED_SWITCH_INTERVAL_S if is_writing_feed else SWITCH_INTERVAL_S)


async def _end_with_vote(vote_lost: Awaitable[None]) -> None:
    await vote_lost
    raise LeadershipLostError("our vote was deleted")
