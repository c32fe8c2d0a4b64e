"""The leader's periodic checks, put together: what they read with, and how much of it.

They have a client of their own, kept to a pace of their own (``checks.reads_per_s``, ``checks.bytes_per_s``),
and never more than a few reads at a bookie: whoever reads and writes ledgers goes first.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from auditor.checks.all_ledgers import AllLedgersCheck
from auditor.checks.check import Check
from auditor.checks.copies import CopyReader
from auditor.checks.idle_open import IdleOpenCheck
from auditor.checks.idle_sightings import Sightings
from auditor.checks.overdue import OverdueMarks
from auditor.checks.placement import PlacementCheck
from auditor.checks.records import CheckRecords
from auditor.checks.replicas import ReplicasCheck
from auditor.checks.reports import Reports
from auditor.checks.runner import CheckRunner
from auditor.findings import Findings
from auditor.index.keeper import IndexKeeper
from auditor.marking import Marker
from daemon.limits import keep_to_our_share
from daemon.placing import Placing
from daemon.returns import tell_of_returns
from daemon.session import Session
from daemon.settings import Settings
from ledgers.bookie.budget import Budgets
from ledgers.bookie.bulk.transfers import BulkTransfers
from ledgers.bookie.quarantine import Quarantine
from ledgers.bookie.quarantining import QuarantiningBookies
from ledgers.bookies import Bookies
from replication.cluster.own_state import own_path
from replication.queue.batching import Batcher
from replication.queue.mark_tree import MarkTree

READS_IN_FLIGHT_MAX = 16
"""At one bookie, whatever a worker may have there."""
MEMORY_BYTES_MAX = 8 * 1024 * 1024
"""Of all entries on their way."""


async def run_checks(
    settings: Settings,
    session: Session,
    batcher: Batcher,
    *,
    keeper: IndexKeeper,
    findings: Findings,
    placing: Placing,
    is_audit_pending: Callable[[], bool],
) -> None:
    """As ``CheckRunner.run``, which says what is asked of most of it."""
    async with AsyncExitStack() as stack:
        budgets = Budgets(reads_in_flight_max=READS_IN_FLIGHT_MAX)
        bulk = BulkTransfers(
            budgets,
            resolve=session.views.resolve,
            memory_bytes_max=MEMORY_BYTES_MAX,
            paces_reads=True,
        )
        bulk.pace.set(
            bytes_per_s=settings.checks.bytes_per_s, entries_per_s=settings.checks.reads_per_s
        )
        bookies = session.bookie_client(budgets, bulk)
        stack.push_async_callback(bookies.close)
        records = CheckRecords(session.store, batcher, session.ur)
        runner = CheckRunner(
            (
                *_reading_checks(settings, session, batcher, bookies, findings),
                _placement_check(settings, session, batcher, keeper, findings, placing),
                *_idle_open_check(settings, session, batcher, keeper, bookies),
            ),
            store=session.store,
            ur=session.ur,
            index=keeper.index,
            is_index_ready=lambda: keeper.completed_count > 0,
            views=session.views,
            records=records,
            is_audit_pending=is_audit_pending,
            settings=settings.checks,
            clock=session.clock,
        )
        overdue = OverdueMarks(
            store=session.store,
            ur=session.ur,
            records=records,
            after_s=settings.checks.overdue_after_s,
            clock=session.clock,
        )
        async with asyncio.TaskGroup() as tasks:
            for work in (
                keep_to_our_share(
                    settings,
                    session.views,
                    session.membership,
                    budgets,
                    clock=session.clock,
                    count_max=READS_IN_FLIGHT_MAX,
                ),
                tell_of_returns(session.views, bookies, bulk),
                overdue.run(),
                runner.run(),
            ):
                tasks.create_task(work)


def _placement_check(
    settings: Settings,
    session: Session,
    batcher: Batcher,
    keeper: IndexKeeper,
    findings: Findings,
    placing: Placing,
) -> PlacementCheck:
    marker = Marker(session.store, batcher, own_path(session.ur), session.clock)
    return PlacementCheck(
        index=keeper.index,
        views=session.views,
        policy=placing.policy,
        rack_of=placing.racks.rack,
        has_rack_source=placing.keeper is not None,
        reports=Reports(marker, findings) if settings.checks.repairs_placement else None,
    )


def _idle_open_check(
    settings: Settings,
    session: Session,
    batcher: Batcher,
    keeper: IndexKeeper,
    bookies: Bookies,
) -> Sequence[Check]:
    """No check where nothing counts as idle."""
    checks = settings.checks
    if not checks.idle_open_after_s:
        return ()
    check = IdleOpenCheck(
        index=keeper.index,
        manager=session.manager,
        bookies=bookies,
        views=session.views,
        sightings=Sightings(session.store, batcher, session.ur),
        after_s=checks.idle_open_after_s,
        reads_per_s=checks.reads_per_s,
        clock=session.clock,
    )
    return (check,)


def _reading_checks(
    settings: Settings, session: Session, batcher: Batcher, bookies: Bookies, findings: Findings
) -> Sequence[Check]:
    """Of those that are due alike, the first runs first."""
    replication, store, ur = settings.replication, session.store, session.ur
    reader = CopyReader(
        manager=session.manager,
        bookies=QuarantiningBookies(bookies, Quarantine(session.clock, session.views.life)),
        views=session.views,
        clock=session.clock,
        rng=session.rng,
        fallback_digest=replication.fallback_digest,
        entry_lists=replication.entry_lists,
    )
    reports = Reports(Marker(store, batcher, ur, session.clock), findings)
    return (
        AllLedgersCheck(reader, reports, share=settings.checks.all_ledgers_share),
        ReplicasCheck(reader, reports, MarkTree(store, ur)),
    )
