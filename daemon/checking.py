"""Builds the periodic checks of the leader and the bookie client that they read with.

Checks have their own client with their own rate limits (``checks.reads_per_s``,
``checks.bytes_per_s``) and few reads in flight per bookie, so that clients of the bookies are not
disturbed.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.checks.base import Check, FindingReporter
from auditor.checks.copies import AllLedgersCheck, CopyInspector, ReplicasCheck
from auditor.checks.idle import IdleOpenCheck, IdleRecords
from auditor.checks.placement import PlacementCheck
from auditor.checks.records import CheckRecords
from auditor.checks.runner import CheckRunner
from auditor.finding_marker import FindingMarker
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.mark_reasons import Findings
from daemon.limits import keep_to_our_share
from daemon.live_settings import LiveSettings
from daemon.placement import SessionPlacement
from daemon.session import Session, tell_of_returns
from daemon.settings import Settings
from ledgers.bookies import Bookies
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.health import Quarantine, QuarantiningBookies
from replication.history import History
from replication.marks import MarkTree
from replication.transactions import Batcher

READS_IN_FLIGHT_MAX = 16
"""Reads in flight at one bookie. The worker's reads count separately."""
MEMORY_BYTES_MAX = 8 * 1024 * 1024
"""Bound on the entries in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderChecks:
    """Builds and runs the checks of one leader. ``batcher``: guards every write by the leader's
    vote."""

    live: LiveSettings
    session: Session
    batcher: Batcher
    updater: LedgerMapUpdater
    findings: Findings
    placement: SessionPlacement
    is_audit_pending: Callable[[], bool]
    history: History

    async def run(self) -> None:
        """Run the checks until cancelled. Raises what ``CheckRunner.run`` raises."""
        budgets = Budgets(reads_in_flight_max=READS_IN_FLIGHT_MAX)
        bulk = self._bulk(budgets)
        bookies = self.session.bookie_client(budgets, bulk)
        records = CheckRecords(self.session.store, self.batcher, self.session.paths)
        try:
            async with asyncio.TaskGroup() as tasks:
                for work in (
                    keep_to_our_share(
                        self.live,
                        self.session.views,
                        self.session.membership,
                        budgets,
                        clock=self.session.clock,
                        count_max=READS_IN_FLIGHT_MAX,
                    ),
                    tell_of_returns(self.session.views, bookies, bulk),
                    *self._checks(bookies, bulk, records),
                ):
                    tasks.create_task(work)
        finally:
            await bookies.close()

    def _checks(
        self, bookies: Bookies, bulk: BulkTransfers, records: CheckRecords
    ) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the tasks that run the checks and keep them to the current settings."""
        bookies = QuarantiningBookies(
            bookies, Quarantine(self.session.clock, self.session.views.life)
        )
        idle = self._idle_open(bookies)
        runner = self._runner((*self._reading(bookies), self._placement(), *idle), records)

        def apply(settings: Settings) -> None:
            ours = settings.checks
            bulk.rate_limit.set(bytes_per_s=ours.bytes_per_s, entries_per_s=ours.reads_per_s)
            for check in idle:
                check.reads_per_s = ours.reads_per_s
            runner.apply(ours)

        return (runner.run(), self.live.follow(apply, clock=self.session.clock))

    # --- Reading -------------------------------------------------------------------------------

    def _bulk(self, budgets: Budgets) -> BulkTransfers:
        return BulkTransfers(
            budgets,
            resolve=self.session.views.resolve,
            memory_bytes_max=MEMORY_BYTES_MAX,
            limits_check_rate=True,
            connector=self.session.connector,
        )

    # --- The checks ----------------------------------------------------------------------------

    def _runner(self, checks: Sequence[Check], records: CheckRecords) -> CheckRunner:
        return CheckRunner(
            checks,
            store=self.session.store,
            paths=self.session.paths,
            ledger_map=self.updater.ledger_map,
            is_ledger_map_ready=lambda: self.updater.completed_count > 0,
            views=self.session.views,
            records=records,
            is_audit_pending=self.is_audit_pending,
            settings=self.live.current.checks,
            clock=self.session.clock,
            history=self.history,
        )

    def _reading(self, bookies: Bookies) -> Sequence[Check]:
        """Return the checks that read entries. Of two checks due at the same time the first runs
        first."""
        session, replication = self.session, self.live.current.replication
        inspector = CopyInspector(
            manager=session.manager,
            bookies=bookies,
            views=session.views,
            clock=session.clock,
            rng=session.rng,
            fallback_digest=replication.fallback_digest,
            entry_lists=replication.entry_lists,
        )
        reports = self._reports()
        return (
            AllLedgersCheck(inspector, reports, share=self.live.current.checks.all_ledgers_share),
            ReplicasCheck(inspector, reports, MarkTree(session.store, session.paths)),
        )

    def _placement(self) -> PlacementCheck:
        repairs = self.live.current.checks.repairs_placement
        return PlacementCheck(
            ledger_map=self.updater.ledger_map,
            views=self.session.views,
            policy=self.placement.policy,
            rack_of=self.placement.racks.rack,
            has_rack_source=self.placement.rack_keeper is not None,
            reports=self._reports() if repairs else None,
        )

    def _idle_open(self, bookies: Bookies) -> Sequence[IdleOpenCheck]:
        """Return the check for idle open ledgers; none if it is switched off."""
        session, ours = self.session, self.live.current.checks
        if not ours.idle_open_after_s:
            return ()
        check = IdleOpenCheck(
            ledger_map=self.updater.ledger_map,
            manager=session.manager,
            bookies=bookies,
            views=session.views,
            idle_records=IdleRecords(session.store, self.batcher, session.paths),
            after_s=ours.idle_open_after_s,
            reads_per_s=ours.reads_per_s,
            clock=session.clock,
        )
        return (check,)

    def _reports(self) -> FindingReporter:
        session = self.session
        queues = FindingMarker(session.store, self.batcher, session.paths, session.clock)
        return FindingReporter(queues, self.findings)
