"""The auditor service: stands for election, and runs all tasks of the leader while elected.

Everything opened here is closed here, in reverse order.
"""

import asyncio
from collections.abc import Awaitable

from auditor.activity import ActivityWatch
from auditor.auditor import Auditor
from auditor.draining import Drainer
from auditor.election import Election, Leadership
from auditor.findings import Findings
from auditor.fsck.results.last import meter_last
from auditor.holds import Holds
from auditor.index.keeper import IndexKeeper
from auditor.index.note import IndexTeller
from auditor.index.own_writes import OwnWrites
from auditor.marking import Marker
from auditor.outages import Outages
from auditor.records import Records
from daemon.checking import LeaderChecks
from daemon.placing import Placing, placing_of
from daemon.session import Session, open_session
from daemon.settings import Settings
from ledgers.bookie.opening import open_bookies
from ledgers.clock import SystemClock
from ledgers.errors import LeadershipLostError
from replication.cluster.membership import Half
from replication.cluster.own_state import own_path
from replication.cluster.rack_memory import RackMemory
from replication.journal import MetadataJournal
from replication.queue.batching import Batcher

SESSION_TIMEOUT_LEAST_S = 4.0
"""ZooKeeper's default lower bound of a session timeout: two ticks."""


def new_outages(settings: Settings) -> Outages:
    """Return the record of ZooKeeper outages that all sessions of the auditor share.

    After an outage bookies have two session timeouts to register again.
    """
    return Outages(SystemClock(), return_s=2 * settings.zookeeper.session_timeout_s)


async def run_auditor_session(
    settings: Settings, journal: MetadataJournal, outages: Outages, own_writes: OwnWrites
) -> None:
    """Stand for election, and audit while elected. Ends with SessionLostError, LeadershipLostError
    or another error.

    ``own_writes``: metadata writes of this node's worker, which the index takes over without
    reading them again.
    """
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
            own_writes=own_writes,
        )
        if settings.auditor.standbys_keep_index:
            tasks.create_task(keeper.run())
        # Prepared before the election, so that a new leader can act at once.
        placing = await placing_of(session, settings.placement)
        tasks.create_task(placing.run())
        election = Election(
            session.store,
            session.ur,
            session.membership,
            candidate=session.node,
            clock=session.clock,
        )
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
    """Run all tasks of the leader until its session or its leadership ends."""
    batcher = Batcher(session.store, leadership.guards)
    records = Records(session.store, batcher, session.ur)
    findings = Findings(session.store, batcher, session.ur, session.clock)
    auditor = _auditor(settings, session, batcher, keeper, placing, records, outages)
    checks = LeaderChecks(
        settings=settings,
        session=session,
        batcher=batcher,
        keeper=keeper,
        findings=findings,
        placing=placing,
        is_audit_pending=lambda: auditor.is_loss_pending,
    )
    drainer = _drainer(session, batcher, keeper, records)
    teller = IndexTeller(
        keeper, records.write_index, session_id=session.store.session_id, clock=session.clock
    )
    async with asyncio.TaskGroup() as tasks:
        for work in (
            batcher.run(),
            drainer.run(),
            findings.run(),
            _remember_racks(session, batcher, placing),
            checks.run(),
            teller.run(),
            meter_last(session.store, session.ur),
            _watch_activity(session, keeper, records),
        ):
            tasks.create_task(work)
        await auditor.run()


def _auditor(
    settings: Settings,
    session: Session,
    batcher: Batcher,
    keeper: IndexKeeper,
    placing: Placing,
    records: Records,
    outages: Outages,
) -> Auditor:
    return Auditor(
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
        standstill_max_s=2 * max(settings.zookeeper.session_timeout_s, SESSION_TIMEOUT_LEAST_S),
    )


async def _watch_activity(session: Session, keeper: IndexKeeper, records: Records) -> None:
    """Watch client activity with separate connections, so that its few reads never wait behind
    checks."""
    async with open_bookies(session.views.resolve, clock=session.clock, rng=session.rng) as bookies:
        watch = ActivityWatch(
            store=session.store,
            ur=session.ur,
            keeper=keeper,
            views=session.views,
            bookies=bookies,
            records=records,
            clock=session.clock,
        )
        await watch.run()


def _drainer(session: Session, batcher: Batcher, keeper: IndexKeeper, records: Records) -> Drainer:
    return Drainer(
        store=session.store,
        ur=session.ur,
        manager=session.manager,
        keeper=keeper,
        views=session.views,
        marker=Marker(session.store, batcher, own_path(session.ur), session.clock),
        records=records,
        clock=session.clock,
    )


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


async def _end_with_vote(vote_lost: Awaitable[None]) -> None:
    await vote_lost
    raise LeadershipLostError("our vote is gone")
