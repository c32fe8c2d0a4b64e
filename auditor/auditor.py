"""The Auditor: the leader's loop that notices lost bookies and marks their ledgers.

In each round the ``LossTracker`` decides which bookies are lost or reformatted. The auditor marks
those ledgers of theirs that are not marked yet. The ledger map knows which ledgers a loss affects,
so no metadata is read. A failed round is repeated. What is done is remembered for one leadership
only, so that a new leader misses nothing.

While the ledger map is being built or read again, a loss is handled with what is known, and
completed afterwards.
"""

import asyncio
import math
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass

import structlog
from prometheus_client import Counter, Gauge, Histogram

from auditor.absence import LossTracker
from auditor.backlog import UnavailableLedgerCounter
from auditor.marker import LossMarker, Marker
from auditor.records import UNREADABLE_KEPT_MAX, AuditRecord, Identities, Records
from auditor.underreplication import BookieLosses, LossId
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from ledgers.tasks import task_scope, until_answered, wait_woken, wake_on
from replication.orders import DisableSwitch

log = structlog.get_logger()
BOOKIES = Gauge(
    "bookmender_unregistered_bookies",
    "Bookies that are not registered and not in maintenance, by state: absent, or lost (absent "
    "longer than the recovery delay). 0 on all nodes except the leader.",
    ["state"],
)
DELAYS = Counter(
    "bookmender_recovery_delays_total",
    "Recovery delays of absent bookies, by event: began, expired (the bookie is lost) or cancelled "
    "(it is registered again, in maintenance or no longer named).",
    ["event"],
)
AUDIT_S = Histogram(
    "bookmender_audit_seconds",
    "Duration of an audit of all ledgers: finding and marking those that miss copies. By bookies: "
    "lost (or reformatted, with ledgers that miss copies) or none.",
    ["bookies"],
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)
AUDIT_LEDGERS = Histogram(
    "bookmender_audit_underreplicated_ledgers",
    "Under-replicated ledgers that an audit of all ledgers found while bookies were lost, marked "
    "before or not.",
    buckets=(1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000),
)
AUDIT_BYTES = Histogram(
    "bookmender_audit_underreplicated_bytes",
    "Payload bytes of the under-replicated ledgers that an audit of all ledgers found while "
    "bookies were lost. Open ledgers count as empty.",
    buckets=(1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14),
)
for _event in ("began", "expired", "cancelled"):  # so that every label exists from the start
    DELAYS.labels(event=_event)
for _bookies in ("lost", "none"):
    AUDIT_S.labels(bookies=_bookies)
_ABSENT, _LOST = (BOOKIES.labels(state=state) for state in ("absent", "lost"))

RETRY_S = 5.0
"""Wait after a failed audit."""
CHANGES_PAUSE_S = 0.1
"""Pause between two rounds for changed ledgers: ledgers handled together cost less."""
STANDSTILL_MAX_S = 20.0
"""Longest pause of a process that its session usually survives: twice the default session
timeout."""


@dataclass(kw_only=True)
class Auditor:
    """The leader's audit loop. ``run`` ends only by cancellation or with the session."""

    tracker: LossTracker
    """Used for nothing else. The caller runs its ``updater`` and its ``views``."""
    marker: Marker
    records: Records
    standstill_max_s: float = STANDSTILL_MAX_S
    """How long a worker may be paused and still keep its session. What such a worker writes when it
    resumes relies on the bookies as they were before."""

    def __post_init__(self) -> None:
        tracker = self.tracker
        self.updater, self.views, self.clock = tracker.updater, tracker.views, tracker.clock
        self._marks = LossMarker(
            marker=self.marker,
            updater=self.updater,
            on_gone=self._mark_again,
            history=tracker.holds.history,
        )
        self._marks_gone: set[int] = set()
        """Ledgers whose marks disappeared and must be written again."""
        self._unavailable = UnavailableLedgerCounter(self.updater, tracker.was_updated.set)
        self._switch = DisableSwitch(tracker.store, tracker.paths, self.clock)
        self._wake = asyncio.Event()
        self.is_deciding = False
        """True during a round."""
        self._has_looked = False
        """True once a round knows the records of the leaders before."""
        self._delayed: frozenset[BookieId] = frozenset()
        """Absent bookies whose recovery delay was not over in the last round."""
        self._marked_ids: frozenset[LossId] = frozenset()
        """Losses whose ledgers have been marked."""
        self._audited_count = -1
        """``LedgerMapUpdater.completed_count`` at the last complete audit; -1 if an audit is
        due."""
        self._seen_count = 0
        """``LedgerMapUpdater.completed_count`` since which marks are remembered."""
        self._check_due_s = 0.0
        self._again: frozenset[BookieId] = frozenset()
        """Bookies that were lost or reformatted under this leader. A worker that still saw such a
        bookie registered may be about to delete a mark, so existing marks are renewed."""
        self._inherited: frozenset[BookieId] = frozenset()
        """Bookies for which an earlier leader made marks, and which have not returned since. Those
        marks belong to the current loss."""
        self._settling: dict[tuple[BookieId, int], float] = {}
        """By reformatted bookie and czxid of its cookie: until when its copies count as missing,
        although its ledgers are marked. Until then metadata may start to name it for copies that
        the reformat deleted (``_settle``)."""

    async def run(self) -> None:
        """Audit until cancelled. Raises SessionLostError or LeadershipLostError."""
        try:
            await until_answered(self._prepare, event="audit.delayed", clock=self.clock)
            async with asyncio.TaskGroup() as tasks:
                for work in (
                    wake_on(self.views.changes(), self._wake),
                    self._wake_on_ledgers(),
                    self._wake_on_delay(),
                    # What happened while auto-recovery was disabled is handled when it is enabled
                    # again.
                    wake_on(self._switch.watch(), self._wake),
                    self._unavailable.run(),
                    self._marks.run(),
                    self.tracker.keep_recorded(self.records, self._unavailable.found_for),
                ):
                    tasks.create_task(work)
                while True:
                    self.is_deciding = True
                    try:
                        wait_s = await self.run_once()
                    except (UnavailableError, UnauthorizedError) as error:
                        self._audited_count, wait_s = -1, RETRY_S
                        log.warning("audit.failed", error=str(error), retry_s=RETRY_S)
                    finally:
                        self.is_deciding = False
                    await wait_woken(self._wake, timeout_s=wait_s)
        finally:
            for gauge in (_ABSENT, _LOST):
                gauge.set(0)

    @property
    def losses(self) -> BookieLosses:
        """The lost and reformatted bookies, also during a hold; none before the first round."""
        return self.tracker.losses(self.views.current) if self._has_looked else BookieLosses()

    async def _prepare(self) -> None:
        await self.tracker.create_delay()
        await self.tracker.prepare()
        self._inherited = frozenset(self.tracker.marked_since_s())

    async def run_once(self) -> float:
        """Audit if there is a reason to. Return the seconds until the next round, at the latest."""
        self._wake.clear()
        tracker = self.tracker
        view = await tracker.refresh()
        self._unavailable.update(tracker.states.all_absent)
        await tracker.update_hold(view)
        self._has_looked = True
        losses = tracker.losses(view)
        delayed, lost = frozenset(tracker.delay_left_s()), losses.lost_since_s.keys()
        ended = self._delayed - delayed
        DELAYS.labels(event="began").inc(len(delayed - self._delayed))
        DELAYS.labels(event="expired").inc(len(ended & lost))
        DELAYS.labels(event="cancelled").inc(len(ended - lost))
        self._delayed = delayed
        _ABSENT.set(len(delayed))
        _LOST.set(len(lost))
        if tracker.hold:  # nothing is marked during a safety hold
            losses = BookieLosses()
        self._marks.update(losses)  # also if the last audit was interrupted
        self._inherited &= losses.lost_since_s.keys()
        if ended_ids := self._marked_ids - losses.ids:
            self._marked_ids -= ended_ids
            await tracker.record_losses(self.records, losses)
        await self._mark(losses)
        await self._settle(losses)
        now_s = self.clock.now_s()
        check_s = self._check_due_s - now_s if self._switch.may_lease else math.inf
        settling_s = (until_s - now_s for until_s in self._settling.values() if until_s > now_s)
        return max(0.0, min(tracker.wait_s, check_s, *settling_s))

    # --- Audits -----------------------------------------------------------------------------------

    async def _mark(self, losses: BookieLosses) -> None:
        """Mark all ledgers of lost and reformatted bookies, or only those that changed."""
        touched = self._marks_gone.union(self.updater.take_touched())
        self._marks_gone.clear()
        is_due = (
            not losses.ids <= self._marked_ids
            or self.updater.completed_count != self._audited_count
            or self.clock.now_s() >= self._check_due_s
        )
        if not is_due and not (touched and losses.bookies):
            return
        if await self._switch.is_on():
            self._audited_count = -1  # audit the touched ledgers when enabled again
        elif is_due:
            await self._audit(losses)
        else:
            await self._marks.mark_touched(touched, losses)

    async def _audit(self, losses: BookieLosses) -> None:
        """Mark all ledgers of lost and reformatted bookies. Raises UnavailableError if that could
        not be completed; the audit is still due then."""
        updater, started_s = self.updater, self.clock.now_s()
        is_complete, completed_count = updater.is_complete, updater.completed_count
        if started_s >= self._check_due_s:
            # Set before the audit: a request during this audit then leads to another one.
            self._check_due_s = started_s + self.tracker.settings.bookie_check_interval_s
            self._marks.forget_all()
        if completed_count != self._seen_count:
            # All metadata was read again, perhaps after a lost connection. Bookies may have been
            # back meanwhile, and workers may have deleted marks.
            if self._seen_count:
                self._marks.forget_all()
            self._seen_count = completed_count
        self._audited_count = completed_count
        new_bookies = {bookie for bookie, *_ in losses.ids - self._marked_ids}
        if lost := new_bookies & losses.lost_since_s.keys():
            log.info("bookies.lost", bookies=sorted(lost), is_ledger_map_complete=is_complete)
        self._again = (self._again | (new_bookies - self._inherited)) & losses.bookies
        async with task_scope() as scope:  # the first mark does not wait for this record
            recording = scope.start(self.tracker.record_losses(self.records, losses))
            audit = await self._marks.mark_naming(
                losses,
                first=sorted(new_bookies),
                is_over=lambda: self._is_superseded(losses),
                again=self._again,
            )
            await recording
        self._wake.set()  # handle what happened meanwhile
        self._inherited = frozenset()
        if not audit.is_complete:
            self._audited_count = -1
            return
        self._marked_ids = losses.ids
        await self.records.write_urgent(audit.queue.urgent, now_ms=self.clock.wall_ms())
        unreadable = sorted(updater.ledger_map.unreadable)
        took_s = self.clock.now_s() - started_s
        log.info(
            "audit.finished",
            ledger_count=len(updater.ledger_map),
            unreadable_count=len(unreadable),
            underreplicated_count=audit.underreplicated_count,
            mark_count=audit.mark_count,
            is_ledger_map_complete=is_complete,
            duration_s=round(took_s, 3),
        )
        if not is_complete:
            return
        self._again = frozenset()
        is_loss = bool(losses.lost_since_s or audit.underreplicated_count)
        AUDIT_S.labels(bookies="lost" if is_loss else "none").observe(took_s)
        if is_loss:
            AUDIT_LEDGERS.observe(audit.underreplicated_count)
            AUDIT_BYTES.observe(audit.underreplicated_bytes)
        await self.records.write(
            AuditRecord(
                finished_ms=self.clock.wall_ms(),
                ledger_count=len(updater.ledger_map),
                mark_count=audit.mark_count,
                unreadable_count=len(unreadable),
                unreadable=tuple(unreadable[:UNREADABLE_KEPT_MAX]),
                recovery_delay_s=self.tracker.delay.delay_s,
            )
        )

    def _is_superseded(self, losses: BookieLosses) -> bool:
        """True if the audit must start over, because what must be marked changed. Another absent
        bookie is a reason too, lost or not yet: a safety hold may be due."""
        if not self._wake.is_set():
            return False
        self._wake.clear()
        tracker, view = self.tracker, self.views.current
        absent = tracker.states.absent_since_s.keys()
        tracker.update(view)
        self._unavailable.update(tracker.states.all_absent)
        now = BookieLosses() if tracker.hold else tracker.losses(view)
        return (
            not self._switch.may_lease
            or view.orders.is_held
            or bool(tracker.states.absent_since_s.keys() - absent)
            or now.ids != losses.ids
        )

    async def _settle(self, losses: BookieLosses) -> None:
        """Stop counting the copies of reformatted bookies as missing, once all their ledgers are
        marked and some time has passed.

        The time defends against a paused worker (rule S3):

        1. A bookie acknowledges a worker's copies, and the worker is paused.
        2. The bookie is reformatted. The leader marks every ledger that names it.
        3. The worker resumes within its session, and writes metadata that names the bookie. The
           copies are gone.

        Until the time is over, ledgers that start to name the bookie are therefore marked too. A
        new leader starts the time again.
        """
        tracker, updater = self.tracker, self.updater
        is_done = self._audited_count == updater.completed_count
        if not (losses.reformatted and is_done and updater.is_complete):
            return
        now_s = self.clock.now_s()
        self._settling = {
            (bookie, each.czxid): self._settling.get(
                (bookie, each.czxid), now_s + self.standstill_max_s if each.was_known else now_s
            )
            for bookie, each in losses.reformatted.items()
        }
        settled = {b: czxid for (b, czxid), until_s in self._settling.items() if now_s >= until_s}
        if not settled:
            return
        # Bookies that have no cookie, and that no ledger names, are dropped.
        kept = self.views.current.cookies.keys() | updater.ledger_map.bookies
        known = (tracker.identities | settled).items()
        identities = {bookie: czxid for bookie, czxid in known if bookie in kept}
        # ``identities`` changes only after the write, so the next audit repeats a failed one.
        await self.records.write(Identities(cookies=identities))
        tracker.identities = identities
        self._wake.set()

    def _mark_again(self, ledger_ids: Collection[int]) -> None:
        """Mark these ledgers in the next round: an audit in progress may have passed them."""
        self._marks_gone.update(ledger_ids)
        self._wake.set()

    async def _wake_on_ledgers(self) -> None:
        seen = self.updater.change_count
        while True:
            await self.updater.wait_change(seen)
            seen = self.updater.change_count
            self._wake.set()
            await self.clock.sleep(CHANGES_PAUSE_S)

    async def _wake_on_delay(self) -> None:
        """Start an audit after each write of the recovery delay: it takes effect at once."""
        async with aclosing(self.tracker.delay_changes()) as changes:
            async for _ in changes:
                self._check_due_s = self.clock.now_s()
                self._wake.set()
