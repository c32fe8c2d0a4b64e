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
from ledgers.tasks import wait_woken, wake_on
from replication.backoff import LOST_RACE_PAUSE_S, WaitingList
from replication.cluster import ViewSource
from replication.history import NO_HISTORY, Event, History, Kind
from replication.ledger_picker import LedgerPicker, PollBackoff
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
    """Counts since the last line, by cause. The history gets the same counts."""

    history: History = NO_HISTORY
    waiting_count: int = 0
    by_cause: dict[str, Event] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.waiting_count += outcome.kind is OutcomeKind.WAITING
        is_done, why = outcome.kind is OutcomeKind.DONE, outcome.caused_by
        if is_done or outcome.entry_count:
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

    @property
    def repaired_count(self) -> int:
        return sum(event.ledger_count for event in self.by_cause.values())

    def tell(self, *, at_work_count: int) -> None:
        """Log the counts and reset them. Logs nothing if no ledger was repaired or deferred."""
        events, repaired_count = self.by_cause.values(), self.repaired_count
        if not repaired_count and not self.waiting_count:
            return
        log.info(
            "ledgers.repaired",
            ledger_count=repaired_count,
            entry_count=sum(event.entry_count for event in events),
            entry_bytes=sum(event.entry_bytes for event in events),
            deferred_count=self.waiting_count,
            at_work_count=at_work_count,
        )
        for event in events:
            self.history.record(event)
        self.by_cause, self.waiting_count = {}, 0

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
GRACES_AT_ONCE_MAX = 10_000
"""Maximum number of ledgers that wait for their grace under this worker's locks. Further ones are
unlocked."""


class ReplicationWorker:
    """The worker of one session. ``run`` ends only by cancellation or with the session."""

    def __init__(
        self,
        *,
        queue: Queue,
        repairer: Repairer,
        views: ViewSource,
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
            queue=queue,
            manager=manager,
            views=views,
            settings=settings,
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
        self._waiting.settings = settings

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
                try:
                    has_found = await self.run_once(tasks)
                except (UnavailableError, RejectedError) as error:  # RejectedError: by an ACL
                    log.warning("queue.read_failed", error=str(error))
                    has_found = False
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

    async def run_once(self, tasks: asyncio.TaskGroup) -> bool:
        """Poll the queue once and start repairs. Returns False if nothing was found."""
        await self._slots.wait_free()  # first, so that the found ledgers are still current
        self._wake.clear()
        if await self._queue.switch.is_on():
            return False
        self._is_for_losses_only = self._other_slots.is_full
        # A worker that is not half idle takes no ledgers of other workers' shares.
        room = self._ledgers_at_once - (len(self._busy) - self._slots.lent_count)
        due = await self._picker.pick(
            busy=self._busy,
            others_max=room if 2 * room >= self._ledgers_at_once else 0,
            losses_only=self._is_for_losses_only,
        )
        picked_s = self._clock.now_s()
        for ledger in due:
            slots = self._slots if ledger.is_loss else self._other_slots
            await self._slots.wait_half_free(GATHER_S)
            try:  # if the other slots stay taken, the next poll selects only losses
                async with asyncio.timeout(None if ledger.is_loss else WINDOW_AGE_MAX_S):
                    await slots.acquire()
            except TimeoutError:
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

    async def _work(self, queued: QueuedLedger, slots: Slots) -> None:
        """Lock, repair and unlock one ledger. Releases the slot that the caller took."""
        try:
            lease = await self._try_lease(queued)
            if lease is not None:
                await self._process(lease, slots)
        finally:
            self._busy.discard(queued.ledger_id)
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
            self._waiting.back_off_after_error(queued)
            return None
        if lease is None:
            _RACE_LOST.inc()
            self._waiting.pause(queued.ledger_id, LOST_RACE_PAUSE_S)
        else:
            _LEASED.inc()
        return lease

    async def _process(self, lease: LedgerLease, slots: Slots) -> None:
        """Repair the ledger, record the outcome, and unlock the ledger."""
        note = None
        try:
            if await self._waiting.begin(lease):
                outcome = await self._repair(lease, slots)
                _CONCLUDED[outcome.kind].inc()
                self._summary.add(outcome)
                if outcome.kind is OutcomeKind.DONE:
                    self._waiting.complete(lease.ledger_id)
                    log.debug(
                        "ledger.repaired",
                        ledger_id=lease.ledger_id,
                        entry_count=outcome.entry_count,
                        entry_bytes=outcome.entry_bytes,
                    )
                    return
                if outcome.reason is not None:
                    _DEFERRED[outcome.reason].inc()
                    note = self._waiting.defer(lease, outcome)
        except SessionLostError:
            raise
        except LockLostError:
            _LOCK_LOST.inc()
            log.warning("lock.lost", ledger_id=lease.ledger_id)
            return
        except UnavailableError as error:
            _NO_ZOOKEEPER.inc()
            log.warning("repair.interrupted", ledger_id=lease.ledger_id, error=str(error))
            self._waiting.back_off_after_error(lease.queued, lease.fingerprint)
        except Exception:  # a defect in one repair must not stop the others
            _CRASHED.inc()
            log.exception("repair.crashed", ledger_id=lease.ledger_id)
            self._waiting.back_off_after_error(lease.queued, lease.fingerprint)
        await self._waiting.unlock(lease, note, slots)

    async def _repair(self, lease: LedgerLease, slots: Slots) -> Outcome:
        """Repair the ledger until it is done or blocked. Starts again after an open-ledger
        grace."""
        sighting: WriterSighting | None = None
        while True:
            began_s, took_s = self._clock.now_s(), _INTERRUPTED_S
            try:
                outcome = await self._repairer.repair(lease, sighting, slots=slots)
                took_s = _TRIED_S[outcome.kind]
            finally:
                took_s.observe(self._clock.now_s() - began_s)
            sighting = outcome.sighting
            if sighting is None or self._grace_count >= GRACES_AT_ONCE_MAX:
                return outcome
            self._grace_count += 1
            try:
                grace_s = self._open_ledger_grace_s
                await self._waiting.record_grace(lease, outcome, grace_s=grace_s)
                if not await self._sit_out_grace(sighting, slots):
                    sighting = None
            finally:
                self._grace_count -= 1
            if not self._queue.switch.may_lease:  # disabled during the grace: fence nothing
                return outcome
            lease.fingerprint = self._waiting.fingerprint

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

    async def _tidy(self) -> None:
        """Delete leftovers of repairs, also of other nodes. Runs when idle, each minute on one
        worker at random."""
        now_s = self._clock.now_s()
        if now_s < self._tidy_due_s:
            return
        self._tidy_due_s = now_s + TIDY_INTERVAL_S
        if self._rng.random() * self._picker.worker_count < 1:
            await self._queue.tidy()
            await self._waiting.tidy()

    async def _summarise(self) -> None:
        while True:
            await self._clock.sleep(SUMMARY_INTERVAL_S)
            self._summary.tell(at_work_count=len(self._busy))
