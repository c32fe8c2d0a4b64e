"""The ReplicationWorker: leases marked ledgers, repairs many of them at once, and releases them.

``LedgerPicker`` selects ledgers, the most urgent first, and ``Repairer`` does the work. A
ledger that waits for its open-ledger grace keeps its lock but lends its slot. A ledger that cannot
be repaired now is deferred with a reason. Any node retries it after a growing backoff, or as soon
as a bookie registers or an order changes. Nothing is retried in a hot loop.

The log gets one line every few seconds while the worker repairs anything (``Summary``).
"""

import asyncio
import random
from dataclasses import dataclass, field

import structlog
from prometheus_client import Counter, Gauge, Histogram

from ledgers.clock import Clock
from ledgers.errors import LockLostError, RejectedError, SessionLostError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.tasks import wait_woken, wake_on
from replication.backoff import LeasedLedger, RetryPace, WaitingList
from replication.cluster import ViewSource
from replication.history import NO_HISTORY, Event, History, Kind
from replication.ledger_picker import DueLedger, LedgerPicker, PollBackoff
from replication.ledger_record import WaitingNotesWriter
from replication.locks import LedgerLease, QueuedLedger
from replication.open_ledgers import WriterSighting, is_overtaken
from replication.outcome import Outcome, OutcomeKind
from replication.reasons import Reason
from replication.repair import Repairer
from replication.settings import ReplicationSettings
from replication.slots import Slots, kept_for_losses
from replication.work_queue import Queue

log = structlog.get_logger()

SUMMARY_INTERVAL_S = 5.0


@dataclass(slots=True)
class Summary:
    """Counts since the last line. The history gets the same counts, by cause."""

    history: History = NO_HISTORY
    repaired_count: int = 0
    waiting_count: int = 0
    entry_count: int = 0
    entry_bytes: int = 0
    by_cause: dict[str, Event] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        is_done = outcome.kind is OutcomeKind.DONE
        self.repaired_count += is_done
        self.waiting_count += outcome.kind is OutcomeKind.WAITING
        self.entry_count += outcome.entry_count
        self.entry_bytes += outcome.entry_bytes
        if is_done or outcome.entry_count:
            why = outcome.caused_by
            event = Event(
                kind=Kind.LEDGERS_REPAIRED,
                cause="" if why is None else why.cause,
                bookies=() if why is None else why.bookies,
                ledger_count=int(is_done),
                entry_count=outcome.entry_count,
                entry_bytes=outcome.entry_bytes,
            )
            before = self.by_cause.get(event.cause)
            self.by_cause[event.cause] = event if before is None else before.plus(event)

    def tell(self, *, at_work_count: int) -> None:
        """Log the counts and reset them. Logs nothing if all are 0."""
        if not self.repaired_count and not self.waiting_count:
            return
        log.info(
            "ledgers.repaired",
            ledger_count=self.repaired_count,
            entry_count=self.entry_count,
            entry_bytes=self.entry_bytes,
            deferred_count=self.waiting_count,
            at_work_count=at_work_count,
        )
        for event in self.by_cause.values():
            self.history.record(event)
        self.by_cause = {}
        self.repaired_count = self.waiting_count = self.entry_count = self.entry_bytes = 0

    def tell_if_done(self) -> None:
        """Log at once when the queue runs empty, if anything was repaired. Deferred ledgers can
        wait for the next interval."""
        if self.repaired_count:
            self.tell(at_work_count=0)


LEASES = Counter(
    "bookmender_leases_total",
    "Attempts of the worker to lock a ledger, by outcome: leased, or lost to another worker.",
    ["outcome"],
)
REPAIRS = Counter(
    "bookmender_repairs_total",
    "Repairs that a worker has ended, by outcome: done, waiting (deferred) or marked-again.",
    ["outcome"],
)
REPAIR_S = Histogram(
    "bookmender_repair_seconds",
    "Duration of one try to repair a ledger, by outcome: done, waiting (deferred, or left to its "
    "writer for the open-ledger grace), marked-again or interrupted.",
    ["outcome"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120, 600, 3600),
)
DEFERRALS = Counter(
    "bookmender_deferrals_total",
    "Repairs that were blocked and postponed, by reason, as in the notes of waiting ledgers.",
    ["reason"],
)
INTERRUPTED = Counter(
    "bookmender_interrupted_repairs_total",
    "Repairs that ended early, by cause: zookeeper (no answer, or access denied), lock (lost) or "
    "crash (a defect).",
    ["cause"],
)
AT_WORK = Gauge(
    "bookmender_leased_ledgers", "Ledgers that this worker has leased, or is about to lease."
)
_LEASED, _RACE_LOST = LEASES.labels(outcome="leased"), LEASES.labels(outcome="lost")
_CONCLUDED = {kind: REPAIRS.labels(outcome=kind.value) for kind in OutcomeKind}
_TRIED_S = {kind: REPAIR_S.labels(outcome=kind.value) for kind in OutcomeKind}
_INTERRUPTED_S = REPAIR_S.labels(outcome="interrupted")
_DEFERRED = {reason: DEFERRALS.labels(reason=reason.value) for reason in Reason}
_NO_ZOOKEEPER, _LOCK_LOST, _CRASHED = (
    INTERRUPTED.labels(cause=cause) for cause in ("zookeeper", "lock", "crash")
)
"""Labels are looked up once, so that all outcomes are exported from the start, at 0."""

WINDOW_AGE_MAX_S = 5.0
"""Maximum age of the picked ledgers. Then the queue is listed again."""
GATHER_S = 0.05
"""With all slots taken, new ledgers start when half of the slots are free, or after this time.
Ledgers that start together share ZooKeeper transactions and writes to bookies; ledgers that start
one by one share few."""
POLL_PAUSE_FACTOR = 10
"""Minimum pause after a poll that found nothing, as a multiple of the duration of the poll. With a
long queue or a slow ZooKeeper, polls become rare."""
TIDY_INTERVAL_S = 60.0
"""Interval between two clean-ups of leftovers, each by one of the idle workers."""
REWRITE_INTERVAL_S = 60.0
"""Interval between two attempts to write a note that must exist before the ledger is unlocked."""
GRACES_AT_ONCE_MAX = 10_000
"""Maximum number of ledgers that wait for their grace under this worker's locks. Further ones are
unlocked."""


def _pace(settings: ReplicationSettings) -> RetryPace:
    return RetryPace(wait_min_s=settings.retry_min_s, wait_max_s=settings.retry_max_s)


class ReplicationWorker:
    """The worker of one session. ``run`` ends only by cancellation or with the session."""

    def __init__(
        self,
        *,
        queue: Queue,
        repairer: Repairer,
        views: ViewSource,
        notes: WaitingNotesWriter,
        manager: LedgerManager,
        settings: ReplicationSettings,
        node: str,
        clock: Clock,
        rng: random.Random,
        history: History = NO_HISTORY,
    ) -> None:
        self._queue = queue
        self._repairer = repairer
        self._views = views
        self._ledgers_at_once = settings.ledgers_at_once
        self._open_ledger_grace_s = settings.open_ledger_grace_s
        self._clock = clock
        self._rng = rng
        self._waiting = WaitingList(
            notes=notes,
            manager=manager,
            views=views,
            pace=_pace(settings),
            node=node,
            clock=clock,
            rng=rng,
        )
        self._picker = LedgerPicker(
            queue=queue,
            waiting=self._waiting,
            clock=clock,
            rng=rng,
            idle_wait_s=settings.idle_wait_s,
        )
        places = settings.ledgers_at_once
        self._slots = Slots(places)
        self._other_slots = Slots(places - kept_for_losses(places), within=self._slots)
        """Slots for ledgers that lost no copies."""
        self._is_for_losses_only = False
        """True if the last poll selected only losses, because the other slots were taken."""
        self._busy: set[int] = set()
        self._grace_count = 0
        self._summary = Summary(history)
        self._tidy_due_s = 0.0
        self._poll_backoff = PollBackoff(settings.idle_wait_s)
        self._wake = asyncio.Event()

    def apply(self, settings: ReplicationSettings) -> None:
        """Use the open-ledger grace and the waits between retries of these settings from now on.
        The other settings need another worker."""
        self._open_ledger_grace_s = settings.open_ledger_grace_s
        self._waiting.pace = _pace(settings)

    @property
    def leased_count(self) -> int:
        """Return how many ledgers this worker has leased, or is about to lease. May be read on any
        thread."""
        return len(self._busy)

    async def run(self) -> None:
        """Work until cancelled. Raises SessionLostError when the session is lost."""
        try:
            await self._run()
        finally:
            self._summary.tell(at_work_count=len(self._busy))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for watch in (*self._queue.watch_first_marks(), self._queue.switch.watch()):
                tasks.create_task(wake_on(watch, self._wake))
            # A ledger may wait for a bookie that just registered or disappeared.
            tasks.create_task(wake_on(self._views.changes(), self._wake))
            tasks.create_task(self._summarise())
            while True:
                has_found = await self._try_run_once(tasks)
                if has_found and self._picker.is_cut_short:
                    continue
                wait_s = self._poll_backoff.next_s(
                    worker_count=self._picker.worker_count,
                    is_queue_empty=self._picker.is_queue_empty,
                )
                pause_s = 0.0 if has_found else POLL_PAUSE_FACTOR * self._picker.took_s
                is_woken = await wait_woken(self._wake, timeout_s=max(wait_s, pause_s))
                if has_found or is_woken or self._picker.is_cut_short:
                    self._poll_backoff.reset()

    async def _try_run_once(self, tasks: asyncio.TaskGroup) -> bool:
        try:
            return await self.run_once(tasks)
        except (UnavailableError, RejectedError) as error:  # RejectedError: access denied by an ACL
            log.warning("queue.read_failed", error=str(error))
            return False

    async def run_once(self, tasks: asyncio.TaskGroup) -> bool:
        """Poll the queue once and start repairs. Returns False if nothing was found."""
        await self._slots.wait_free()  # first, so that the found ledgers are still current
        self._wake.clear()
        if await self._queue.switch.is_on():
            return False
        self._is_for_losses_only = self._other_slots.is_full
        due = await self._picker.pick(
            busy=self._busy,
            others_max=self._others_max(),
            losses_only=self._is_for_losses_only,
        )
        picked_s = self._clock.now_s()
        for ledger in due:
            slots = self._slots if ledger.queued.is_loss else self._other_slots
            if not await self._acquire_slot(slots):
                break
            is_old = self._clock.now_s() - picked_s > WINDOW_AGE_MAX_S
            if is_old or not self._queue.switch.may_lease:
                slots.release()
                break
            self._busy.add(ledger.ledger_id)
            AT_WORK.set(len(self._busy))
            tasks.create_task(self._work(ledger, slots))
        if not due and not self._busy:
            self._summary.tell_if_done()
            await self._tidy()
        return bool(due)

    async def _acquire_slot(self, slots: Slots) -> bool:
        """Take a slot. Returns False if the other slots stay taken; then the next poll selects only
        losses."""
        await self._slots.wait_half_free(GATHER_S)
        try:
            async with asyncio.timeout(None if slots is self._slots else WINDOW_AGE_MAX_S):
                await slots.acquire()
        except TimeoutError:
            return False
        return True

    def _others_max(self) -> int:
        """Return how many ledgers of other workers' shares this worker may take: none unless it is
        half idle."""
        room = self._ledgers_at_once - (len(self._busy) - self._slots.lent_count)
        return room if 2 * room >= self._ledgers_at_once else 0

    async def _work(self, ledger: DueLedger, slots: Slots) -> None:
        """Lock, repair and unlock one ledger. Releases the slot that the caller took."""
        try:
            fingerprint = self._waiting.fingerprint
            lease = await self._try_lease(ledger.queued)
            if lease is not None:
                leased = LeasedLedger(
                    lease=lease,
                    fingerprint=fingerprint,
                    note=ledger.note,
                    old_note=ledger.old_note,
                    suspects=ledger.suspects,
                )
                await self._process(leased, slots)
        finally:
            self._busy.discard(ledger.ledger_id)
            AT_WORK.set(len(self._busy))
            slots.release()
            has_room_again = self._is_for_losses_only and not self._other_slots.is_full
            if has_room_again or not self._busy:
                self._wake.set()

    async def _try_lease(self, queued: QueuedLedger) -> LedgerLease | None:
        """Lock the ledger. Returns None if that failed; then the ledger is left alone for a
        while."""
        try:
            lease = await self._queue.lease(queued)
        except (UnavailableError, RejectedError) as error:  # a quota, or ACLs
            _NO_ZOOKEEPER.inc()
            log.warning("lock.refused", ledger_id=queued.ledger_id, error=str(error))
            self._waiting.back_off_after_error(queued, self._waiting.fingerprint)
            return None
        if lease is None:
            _RACE_LOST.inc()
            self._waiting.back_off_after_lost_race(queued.ledger_id)
        else:
            _LEASED.inc()
        return lease

    async def _process(self, leased: LeasedLedger, slots: Slots) -> None:
        if not await self._repair_and_conclude(leased, slots):
            self._waiting.back_off_after_error(leased.lease.queued, leased.fingerprint)
            if found_bad := self._repairer.suspects(leased.ledger_id) - leased.suspects:
                await self._publish_suspects(found_bad, leased, slots)
            await self._queue.release(leased.lease)

    async def _publish_suspects(
        self, found_bad: frozenset[BookieId], leased: LeasedLedger, slots: Slots
    ) -> None:
        """Publish the suspects that an interrupted repair found, before the ledger is unlocked."""
        is_written = await self._waiting.record_suspects(leased, found_bad)
        while True:
            try:
                await self._wait_published(leased, slots, is_written=is_written)
                return
            except LockLostError:
                return
            except (UnavailableError, RejectedError) as error:
                log.warning("suspects.write_failed", ledger_id=leased.ledger_id, error=str(error))
            await self._clock.sleep(REWRITE_INTERVAL_S)

    async def _repair_and_conclude(self, leased: LeasedLedger, slots: Slots) -> bool:
        """Repair the ledger and record the outcome. Returns False if it was interrupted and the
        lock may still be held."""
        try:
            await self._waiting.delete_stale_note(leased)
            await self._conclude(leased, await self._repair(leased, slots), slots)
        except SessionLostError:
            raise
        except LockLostError:
            _LOCK_LOST.inc()
            log.warning("lock.lost", ledger_id=leased.ledger_id)
        except UnavailableError as error:
            _NO_ZOOKEEPER.inc()
            log.warning("repair.interrupted", ledger_id=leased.ledger_id, error=str(error))
            return False
        except Exception:  # a defect in one repair must not stop the others
            _CRASHED.inc()
            log.exception("repair.crashed", ledger_id=leased.ledger_id)
            return False
        return True

    async def _repair(self, leased: LeasedLedger, slots: Slots) -> Outcome:
        outcome = await self._try_repair(leased, None, slots)
        while outcome.sighting is not None and self._grace_count < GRACES_AT_ONCE_MAX:
            self._grace_count += 1
            try:
                grace_s = self._open_ledger_grace_s
                await self._waiting.record_grace(leased, outcome, grace_s=grace_s)
                is_over = await self._sit_out_grace(outcome.sighting, slots)
            finally:
                self._grace_count -= 1
            if not self._queue.switch.may_lease:  # disabled during the grace: fence nothing
                break
            leased.fingerprint = self._waiting.fingerprint
            sighting = outcome.sighting if is_over else None
            outcome = await self._try_repair(leased, sighting, slots)
        return outcome

    async def _try_repair(
        self, leased: LeasedLedger, sighting: WriterSighting | None, slots: Slots
    ) -> Outcome:
        began_s, took_s = self._clock.now_s(), _INTERRUPTED_S
        try:
            outcome = await self._repairer.repair(
                leased.lease, sighting, slots=slots, suspects=leased.suspects
            )
            took_s = _TRIED_S[outcome.kind]
            return outcome
        finally:
            took_s.observe(self._clock.now_s() - began_s)

    async def _sit_out_grace(self, sighting: WriterSighting, slots: Slots) -> bool:
        """Wait for the end of the grace without a slot. Returns False if the reason for the grace
        vanished earlier."""
        until_s = self._clock.now_s() + self._open_ledger_grace_s
        async with slots.lent():
            while (left_s := until_s - self._clock.now_s()) > 0:
                if is_overtaken(sighting, self._views.current):
                    return False
                await self._views.wait_change(self._views.change_count, timeout_s=left_s)
        return True

    async def _conclude(self, leased: LeasedLedger, outcome: Outcome, slots: Slots) -> None:
        _CONCLUDED[outcome.kind].inc()
        if outcome.reason is not None:
            _DEFERRED[outcome.reason].inc()
        self._summary.add(outcome)
        match outcome.kind:
            case OutcomeKind.DONE:
                await self._waiting.complete(leased)
                log.debug(
                    "ledger.repaired",
                    ledger_id=leased.ledger_id,
                    entry_count=outcome.entry_count,
                    entry_bytes=outcome.entry_bytes,
                )
            case OutcomeKind.MARKED_AGAIN:
                await self._queue.release(leased.lease)
            case OutcomeKind.WAITING:
                is_written = await self._waiting.defer(leased, outcome)
                if outcome.suspects - leased.suspects:
                    await self._wait_published(leased, slots, is_written=is_written)
                await self._queue.release(leased.lease)

    async def _wait_published(
        self, leased: LeasedLedger, slots: Slots, *, is_written: bool
    ) -> None:
        """Return when every worker that locks the ledger after us must know its suspects (rule S6).

        Without this, the mark of a damaged ledger could be deleted:

        1. Worker A finds that a copy lacks entries between its first and its last one.
        2. Worker B has read the ledger's marks and its waiting note, which names no suspect.
        3. A cannot repair the ledger now. It writes the suspect into the note and unlocks.
        4. B locks the ledger, checks only the first and the last entry of each copy, finds no
           fault, and deletes the mark.

        So A writes the marks again before it unlocks. Their versions change, B's lock in step 4
        fails, and B reads the marks and the note again.
        """
        async with slots.lent():
            while not is_written:
                await self._clock.sleep(REWRITE_INTERVAL_S)
                is_written = await self._waiting.rewrite_note(leased)
            await self._queue.renew_marks(leased.lease)

    async def _tidy(self) -> None:
        """Delete leftovers of repairs, also of other nodes. Runs when idle, each minute on one
        worker at random."""
        now_s = self._clock.now_s()
        if now_s < self._tidy_due_s:
            return
        self._tidy_due_s = now_s + TIDY_INTERVAL_S
        if self._rng.random() * self._picker.worker_count < 1:
            await self._queue.tidy()
            await self._waiting.tidy(self._queue)

    async def _summarise(self) -> None:
        while True:
            await self._clock.sleep(SUMMARY_INTERVAL_S)
            self._summary.tell(at_work_count=len(self._busy))
