"""Builds the periodic checks of the leader and the bookie client that they read with.

Checks have their own client with their own rate limits (``checks.reads_per_s``,
``checks.bytes_per_s``) and few reads in flight per bookie, so that clients of the bookies are not
disturbed.
"""

import asyncio
from collections.abc import Callable

from auditor.checks.copies import AllLedgersCheck, CopyInspector, ReplicasCheck
from auditor.checks.idle import IdleOpenCheck
from auditor.checks.placement import PlacementCheck
from auditor.checks.records import Check, CheckRecords, FindingReporter
from auditor.checks.runner import CheckRunner
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.mark_reasons import Findings
from daemon.limits import keep_to_our_share
from daemon.live_settings import LiveSettings
from daemon.placement import SessionPlacement
from daemon.session import Session, tell_of_returns
from daemon.settings import Settings
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient
from ledgers.health import AnsweringBookies, BookieHealth
from replication.history import History
from replication.marks import MarkTree
from replication.transactions import Batcher

READS_IN_FLIGHT_MAX = 16
"""Reads in flight at one bookie. The worker's reads count separately."""
MEMORY_BYTES_MAX = 8 * 1024 * 1024
"""Bound on the entries in memory."""


async def run_checks(
    live: LiveSettings,
    session: Session,
    *,
    batcher: Batcher,
    updater: LedgerMapUpdater,
    findings: Findings,
    placement: SessionPlacement,
    is_audit_pending: Callable[[], bool],
    history: History,
) -> None:
    """Run the checks of one leader until cancelled. ``batcher``: guards every write by the leader's
    vote. Raises what ``CheckRunner.run`` raises."""
    store, paths, views, clock = session.store, session.paths, session.views, session.clock
    ours = live.current.checks
    budgets = Budgets(reads_in_flight_max=READS_IN_FLIGHT_MAX)
    bulk = BulkTransfers(
        budgets,
        resolve=views.resolve,
        memory_bytes_max=MEMORY_BYTES_MAX,
        limits_check_rate=True,
        connector=session.connector,
        health=BookieHealth(clock, views.life, session.rng),
    )
    client = BookieClient(bulk)
    bookies = AnsweringBookies(client, bulk.health)
    inspector = CopyInspector(
        manager=session.manager,
        bookies=bookies,
        views=views,
        clock=clock,
        rng=session.rng,
        fallback_digest=live.current.replication.fallback_digest,
    )
    reports = FindingReporter(findings)
    checks: list[Check] = [
        AllLedgersCheck(inspector, reports, share=ours.all_ledgers_share),
        ReplicasCheck(inspector, reports, MarkTree(store, paths)),
        PlacementCheck(
            ledger_map=updater.ledger_map,
            views=views,
            policy=placement.policy,
            rack_of=placement.racks.rack,
            has_rack_source=placement.rack_keeper is not None,
            reports=reports if ours.repairs_placement else None,
        ),
    ]
    records = CheckRecords(store, batcher, paths)
    idle_open = IdleOpenCheck(
        records=records,
        ledger_map=updater.ledger_map,
        manager=session.manager,
        bookies=bookies,
        views=views,
        after_s=ours.idle_open_after_s,
        reads_per_s=ours.reads_per_s,
        clock=clock,
    )
    if ours.idle_open_after_s:
        checks.append(idle_open)
    runner = CheckRunner(
        checks=checks,
        ledger_map=updater.ledger_map,
        is_ledger_map_ready=lambda: updater.completed_count > 0,
        views=views,
        records=records,
        is_audit_pending=is_audit_pending,
        settings=ours,
        clock=clock,
        history=history,
    )

    def apply(settings: Settings) -> None:
        now = settings.checks
        bulk.rate_limit.set(bytes_per_s=now.bytes_per_s, entries_per_s=now.reads_per_s)
        idle_open.reads_per_s = now.reads_per_s
        runner.apply(now)

    try:
        async with asyncio.TaskGroup() as tasks:
            for work in (
                keep_to_our_share(
                    live,
                    views,
                    session.membership,
                    budgets,
                    clock=clock,
                    count_max=READS_IN_FLIGHT_MAX,
                ),
                tell_of_returns(views, client),
                runner.run(),
                live.follow(apply, clock=clock),
            ):
                tasks.create_task(work)
    finally:
        await client.close()
