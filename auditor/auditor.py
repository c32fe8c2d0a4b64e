"""The Auditor: the leader's loop that notices lost bookies and marks their ledgers.

In each round the ``LossTracker`` decides which bookies are lost or reformatted. The auditor marks
those ledgers of theirs that are not marked yet. The index knows which ledgers a loss
affects, so no metadata is read. A failed round is repeated. What is done is remembered for one
leadership only, so that a new leader misses nothing.

While the index is being built or read again, a loss is handled with what is known, and completed
afterwards.
"""

import asyncio
import math
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.loss_tracker import LossTracker
from auditor.marker import LossMarks, Marked, Marker, Relisting
from auditor.records import AuditRecord, Records
from auditor.settings import AuditorSettings
from auditor.underreplication import LossCause, Missing, UnavailableLedgerCounter
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from ledgers.tasks import task_scope, until_answered, wait_woken, wake_on
from replication.cluster import ClusterView, ViewSource
from replication.orders import DisableSwitch
from replication.znodes import ClusterPaths

log = structlog.get_logger()

RETRY_S = 5.0
"""Wait after a failed audit."""
CHANGES_PAUSE_S = 0.1
"""Pause between two rounds for changed ledgers: ledgers handled together cost less."""
STANDSTILL_MAX_S = 20.0
"""Longest pause of a process that its session usually survives: twice the default session
timeout."""


@dataclass(slots=True)
class _Done:
    """What has been done and need not be repeated."""

    causes: frozenset[LossCause] = frozenset()
    """Losses (``Missing.causes``) whose ledgers have been marked."""
    completed_count: int = -1
    """``LedgerMapUpdater.completed_count`` at the last complete audit; -1 if an audit is due."""
    seen_count: int = 0
    """``LedgerMapUpdater.completed_count`` since which marks are remembered."""
    check_due_s: float = 0.0


class Auditor:
    """The leader's audit loop. ``run`` ends only by cancellation or with the session."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        paths: ClusterPaths,
        updater: LedgerMapUpdater,
        views: ViewSource,
        tracker: LossTracker,
        marker: Marker,
        records: Records,
        settings: AuditorSettings,
        clock: Clock,
        standstill_max_s: float = STANDSTILL_MAX_S,
    ) -> None:
        """The caller runs ``updater``, and gives ``tracker`` to nobody else.

        ``standstill_max_s``: how long a worker may be paused and still keep its session. What such
        a worker writes when it resumes relies on the bookies as they were before.
        """
        self._updater = updater
        self._views = views
        self._tracker = tracker
        self._records = records
        self._settings = settings
        self._clock = clock
        self._marks = LossMarks(updater.ledger_map, marker)
        self._relisting = Relisting(
            store, paths, self._marks, clock, updater=updater, on_gone=self._mark_again
        )
        self._unavailable = UnavailableLedgerCounter(
            updater, clock, on_count=tracker.absences.note_soon
        )
        self._gone: set[int] = set()
        """Ledgers whose marks disappeared and must be written again."""
        self._done = _Done()
        self._standstill_max_s = standstill_max_s
        self._again: frozenset[BookieId] = frozenset()
        """Bookies that went missing under this leader. A worker that still saw such a bookie
        registered may be about to delete a mark, so existing marks are renewed."""
        self._inherited: frozenset[BookieId] = frozenset()
        """Bookies for which an earlier leader made marks, and which have not returned since. Those
        marks belong to the current loss."""
        self._settling: dict[tuple[BookieId, int], float] = {}
        """By reformatted bookie and czxid of its cookie: until when it counts as missing, although
        its ledgers are marked. Until then metadata may start to name it for copies that the
        reformat deleted (``_settle``)."""
        self._switch = DisableSwitch(store, paths, clock)
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Audit until cancelled. Raises SessionLostError or LeadershipLostError."""
        await until_answered(self._prepare, event="audit.delayed", clock=self._clock)
        updater = self._updater
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wake_on(self._views.changes(), self._wake))
            tasks.create_task(self._wake_on_ledgers())
            tasks.create_task(self._wake_on_delay())
            # What happened while auto-recovery was disabled is handled when it is enabled again.
            tasks.create_task(wake_on(self._switch.watch(), self._wake))
            tasks.create_task(self._unavailable.run())
            tasks.create_task(self._relisting.run())
            tasks.create_task(
                self._tracker.absences.keep_noted(
                    self._records, updater.ledger_map.naming_count, self._unavailable.of
                )
            )
            while True:
                wait_s = await self._try_run_once()
                await wait_woken(self._wake, timeout_s=wait_s)

    @property
    def is_loss_pending(self) -> bool:
        """True if the recovery delay of an absent bookie is not over, or if no round has looked
        yet."""
        return self._tracker.is_loss_pending

    async def _prepare(self) -> None:
        await self._tracker.delay.create()
        await self._tracker.prepare()
        self._inherited = frozenset(self._tracker.causes.lost_since_s())

    async def _try_run_once(self) -> float:
        try:
            return await self.run_once()
        except (UnavailableError, UnauthorizedError) as error:
            self._done.completed_count = -1
            log.warning("audit.failed", error=str(error), retry_s=RETRY_S)
            return RETRY_S

    async def run_once(self) -> float:
        """Audit if there is a reason to. Return the seconds until the next round, at the latest."""
        self._wake.clear()
        tracker = self._tracker
        view = await tracker.look()
        self._unavailable.see(tracker.absences.away)
        await tracker.keep_hold(view)
        missing = self._missing(view)
        self._marks.see(missing)  # also if the last audit was interrupted
        self._inherited &= missing.lost_since_s.keys()
        if gone := self._done.causes - missing.causes:
            self._done.causes -= gone
            await self._note_causes(missing)
        await self._mark(missing)
        await self._settle(missing)
        return self._wait_s()

    def _missing(self, view: ClusterView) -> Missing:
        """Return the bookies whose ledgers must be marked now: none during a safety hold."""
        return Missing() if self._tracker.hold else self._tracker.missing(view)

    # --- Audits --------------------------------------------------------------------------------------

    async def _mark(self, missing: Missing) -> None:
        """Mark all ledgers of missing bookies, or only those that changed."""
        touched = self._gone.union(self._updater.take_touched())
        self._gone.clear()
        is_due = self._is_due(missing)
        if not is_due and not (touched and missing.bookies):
            return
        if await self._switch.is_on():
            self._done.completed_count = -1  # audit the touched ledgers when enabled again
            return
        if is_due:
            await self._audit(missing)
        else:
            await self._marks.mark_touched(touched, missing)

    def _is_due(self, missing: Missing) -> bool:
        """True if all ledgers of missing bookies must be inspected, not only the changed ones."""
        return (
            not missing.causes <= self._done.causes
            or self._updater.completed_count != self._done.completed_count
            or self._is_check_due()
        )

    def _is_check_due(self) -> bool:
        return self._clock.now_s() >= self._done.check_due_s

    async def _audit(self, missing: Missing) -> None:
        """Mark all ledgers of missing bookies. Raises UnavailableError if that could not be
        completed; the audit is still due then."""
        started_s, completed_count = self._clock.now_s(), self._updater.completed_count
        is_complete = self._updater.is_complete
        if self._is_check_due():
            # Set before the audit: a request during this audit then leads to another one.
            self._done.check_due_s = started_s + self._settings.bookie_check_interval_s
            self._marks.forget()
        if completed_count != self._done.seen_count:
            # All metadata was read again, perhaps after a lost connection. Bookies may have been
            # back meanwhile, and workers may have deleted marks.
            if self._done.seen_count:
                self._marks.forget()
            self._done.seen_count = completed_count
        self._done.completed_count = completed_count
        news = {bookie for bookie, *_ in missing.causes - self._done.causes}
        if lost := news & missing.lost_since_s.keys():
            log.info("bookies.lost", bookies=sorted(lost), is_index_complete=is_complete)
        self._again = (self._again | (news - self._inherited)) & missing.bookies
        async with task_scope() as scope:  # the first mark does not wait for this record
            noting = scope.start(self._note_causes(missing))
            marked = await self._marks.mark_naming(
                missing,
                first=sorted(news),
                is_over=lambda: self._is_superseded(missing),
                again=self._again,
            )
            await noting
        self._wake.set()  # handle what happened meanwhile
        self._inherited = frozenset()
        if not marked.is_whole:
            self._done.completed_count = -1
            return
        self._done.causes = missing.causes
        await self._records.write_urgent(marked.urgent, now_ms=self._clock.wall_ms())
        if is_complete:
            self._again = frozenset()
        await self._tell(marked, started_s=started_s, is_complete=is_complete)

    def _is_superseded(self, missing: Missing) -> bool:
        """True if the audit must start over, because what must be marked has changed.

        Another absent bookie is a reason too, lost or not yet: a safety hold may be due.
        """
        if not self._wake.is_set():
            return False
        self._wake.clear()
        tracker, view = self._tracker, self._views.current
        absent = tracker.absences.since_s.keys()
        tracker.see(view)
        self._unavailable.see(tracker.absences.away)
        return (
            not self._switch.may_lease
            or view.orders.is_held
            or bool(tracker.absences.since_s.keys() - absent)
            or self._missing(view).causes != missing.causes
        )

    async def _note_causes(self, missing: Missing) -> None:
        """Record the causes, except during a safety hold: bookies that the hold protects from
        marking are still missing."""
        if self._tracker.hold is None:
            await self._tracker.causes.note(self._records, missing)

    async def _settle(self, missing: Missing) -> None:
        """Stop treating reformatted bookies as missing, once all their ledgers are marked and some
        time has passed.

        The time defends against a paused worker (rule S3):

        1. A bookie acknowledges a worker's copies, and the worker is paused.
        2. The bookie is reformatted. The leader marks every ledger that names it.
        3. The worker resumes within its session, and writes metadata that names the bookie. The
           copies are gone.

        Until the time is over, ledgers that start to name the bookie are therefore marked too. A
        new leader starts the time again.
        """
        is_done = self._done.completed_count == self._updater.completed_count
        if not (missing.reformatted and is_done and self._updater.is_complete):
            return
        now_s = self._clock.now_s()
        self._settling = {
            (bookie, birth.czxid): self._settling.get(
                (bookie, birth.czxid), now_s + self._standstill_max_s if birth.was_known else now_s
            )
            for bookie, birth in missing.reformatted.items()
        }
        settled = {b: czxid for (b, czxid), until_s in self._settling.items() if now_s >= until_s}
        if settled:
            await self._write_identities(settled)
            self._wake.set()

    async def _write_identities(self, settled: dict[BookieId, int]) -> None:
        """Record the cookies of these bookies, so that they no longer count as reformatted.

        ``identities`` changes only after the write, so the next audit repeats a failed one.
        Bookies that are gone for good are dropped: they have no cookie, and no ledger names them.
        """
        kept = self._views.current.cookies.keys() | self._updater.ledger_map.bookies
        known = (self._tracker.identities | settled).items()
        identities = {bookie: czxid for bookie, czxid in known if bookie in kept}
        await self._records.write_identities(identities)
        self._tracker.identities = identities

    async def _tell(self, marked: Marked, *, started_s: float, is_complete: bool) -> None:
        ledger_map = self._updater.ledger_map
        log.info(
            "audit.finished",
            ledger_count=len(ledger_map),
            unreadable_count=len(ledger_map.unreadable),
            endangered_count=marked.endangered_count,
            mark_count=marked.mark_count,
            is_index_complete=is_complete,
            duration_s=round(self._clock.now_s() - started_s, 3),
        )
        if is_complete:
            await self._records.write_audit(
                AuditRecord(
                    finished_ms=self._clock.wall_ms(),
                    ledger_count=len(ledger_map),
                    mark_count=marked.mark_count,
                    unreadable_count=len(ledger_map.unreadable),
                    unreadable=tuple(sorted(ledger_map.unreadable)),
                )
            )

    def _mark_again(self, ledger_ids: Collection[int]) -> None:
        """Mark these ledgers in the next round. An audit in progress may have passed them
        already."""
        self._gone.update(ledger_ids)
        self._wake.set()

    # --- Time of the next round -------------------------------------------------------------------

    def _wait_s(self) -> float:
        is_disabled, now_s = not self._switch.may_lease, self._clock.now_s()
        return max(
            0.0,
            min(
                self._tracker.wait_s,
                math.inf if is_disabled else self._done.check_due_s - now_s,
                min((s - now_s for s in self._settling.values() if s > now_s), default=math.inf),
            ),
        )

    async def _wake_on_ledgers(self) -> None:
        seen = self._updater.change_count
        while True:
            await self._updater.wait_change(seen)
            seen = self._updater.change_count
            self._wake.set()
            await self._clock.sleep(CHANGES_PAUSE_S)

    async def _wake_on_delay(self) -> None:
        """Start an audit after each write of the recovery delay. A new delay takes effect at
        once."""
        async with aclosing(self._tracker.delay_changes()) as changes:
            async for _ in changes:
                self._done.check_due_s = self._clock.now_s()
                self._wake.set()
