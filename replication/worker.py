"""The ReplicationWorker: leases marked ledgers, repairs many of them at once, and releases them.

``LedgerPicker`` selects ledgers, the most urgent first, and ``Repairer`` does the work. A
ledger that waits for its open-ledger grace keeps its lock but lends its slot. A ledger that cannot
be repaired now is deferred with a reason. Any node retries it after a growing backoff, or as soon
as a bookie registers or an order changes. Nothing is retried in a hot loop.

The log gets one line every few seconds while the worker repairs anything (``Summary``).
"""

import asyncio
import bisect
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import structlog
from prometheus_client import Counter, Gauge, Histogram

from ledgers.errors import LockLostError, RejectedError, SessionLostError, UnavailableError
from ledgers.mixing import mix64
from ledgers.tasks import wait_woken, wake_on
from replication.backoff import GONE_PAUSE_S, LOST_RACE_PAUSE_S, WaitingList
from replication.history import NO_HISTORY, Event, History, Kind
from replication.open_ledgers import WriterSighting, is_overtaken
from replication.reasons import Reason
from replication.repair import Outcome, OutcomeKind, Repairer
from replication.settings import ReplicationSettings
from replication.slots import Slots, kept_for_losses
from replication.work_queue import LedgerLease, QueuedLedger

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


@dataclass(eq=False, kw_only=True)
class ReplicationWorker:
    """The worker of one session. ``run`` ends only by cancellation or with the session."""

    waiting: WaitingList
    repairer: Repairer
    history: History = NO_HISTORY

    def __post_init__(self) -> None:
        settings = self.waiting.settings
        self._queue, self._views = self.waiting.queue, self.waiting.views
        self._clock = self.waiting.clock
        self._picker = LedgerPicker(self.waiting)
        self._ledgers_at_once = places = settings.ledgers_at_once
        self._slots = Slots(places)
        self._other_slots = Slots(places - kept_for_losses(places), within=self._slots)
        """Slots for ledgers that lost no copies."""
        self._is_for_losses_only = False
        """True if the last poll selected only losses, because the other slots were taken."""
        self._busy: set[int] = set()
        self._grace_count = 0
        self._summary = Summary(self.history)
        self._tidy_due_s = 0.0
        self._poll_backoff = PollBackoff(settings.idle_wait_s)
        self._wake = asyncio.Event()

    def apply(self, settings: ReplicationSettings) -> None:
        """Use the open-ledger grace and the waits between retries of these settings from now on.
        The other settings need another worker."""
        self.waiting.settings = settings

    @property
    def leased_count(self) -> int:
        """Ledgers that this worker has leased, or is about to lease. May be read on any thread."""
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
            now_s = self._clock.now_s()
            if now_s >= self._tidy_due_s:
                # Delete leftovers of repairs, also of other nodes, on one worker at random.
                self._tidy_due_s = now_s + TIDY_INTERVAL_S
                if self.waiting.rng.random() * self._picker.worker_count < 1:
                    await self._queue.tidy()
                    await self.waiting.tidy()
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
        """Lock the ledger. Returns None if that failed; then it is left alone for a while."""
        try:
            lease = await self._queue.lease(queued)
        except (UnavailableError, RejectedError) as error:  # a quota, or ACLs
            _NO_ZOOKEEPER.inc()
            log.warning("lock.refused", ledger_id=queued.ledger_id, error=str(error))
            self.waiting.back_off_after_error(queued)
            return None
        if lease is None:
            _RACE_LOST.inc()
            self.waiting.pause(queued.ledger_id, LOST_RACE_PAUSE_S)
        else:
            _LEASED.inc()
        return lease

    async def _process(self, lease: LedgerLease, slots: Slots) -> None:
        """Repair the ledger, record the outcome, and unlock the ledger."""
        note = None
        try:
            if await self.waiting.begin(lease):
                outcome = await self._repair(lease, slots)
                _CONCLUDED[outcome.kind].inc()
                self._summary.add(outcome)
                if outcome.kind is OutcomeKind.DONE:
                    self.waiting.complete(lease.ledger_id)
                    log.debug(
                        "ledger.repaired",
                        ledger_id=lease.ledger_id,
                        entry_count=outcome.entry_count,
                        entry_bytes=outcome.entry_bytes,
                    )
                    return
                if outcome.reason is not None:
                    _DEFERRED[outcome.reason].inc()
                    note = self.waiting.defer(lease, outcome)
        except SessionLostError:
            raise
        except LockLostError:
            _LOCK_LOST.inc()
            log.warning("lock.lost", ledger_id=lease.ledger_id)
            return
        except UnavailableError as error:
            _NO_ZOOKEEPER.inc()
            log.warning("repair.interrupted", ledger_id=lease.ledger_id, error=str(error))
            self.waiting.back_off_after_error(lease.queued, lease.fingerprint)
        except Exception:  # a defect in one repair must not stop the others
            _CRASHED.inc()
            log.exception("repair.crashed", ledger_id=lease.ledger_id)
            self.waiting.back_off_after_error(lease.queued, lease.fingerprint)
        await self.waiting.unlock(lease, note, slots)

    async def _repair(self, lease: LedgerLease, slots: Slots) -> Outcome:
        """Repair the ledger until it is done or blocked, again after an open-ledger grace."""
        sighting: WriterSighting | None = None
        while True:
            began_s, took_s = self._clock.now_s(), _INTERRUPTED_S
            try:
                outcome = await self.repairer.repair(lease, sighting, slots=slots)
                took_s = _TRIED_S[outcome.kind]
            finally:
                took_s.observe(self._clock.now_s() - began_s)
            sighting = outcome.sighting
            if sighting is None or self._grace_count >= GRACES_AT_ONCE_MAX:
                return outcome
            self._grace_count += 1
            try:
                await self.waiting.record_grace(lease, outcome)
                # Wait without a slot, until the grace is over or the reason for it has vanished.
                until_s = self._clock.now_s() + self.waiting.settings.open_ledger_grace_s
                async with slots.lent():
                    while sighting is not None and (left_s := until_s - self._clock.now_s()) > 0:
                        if is_overtaken(sighting, self._views.current):
                            sighting = None
                        else:
                            seen = self._views.change_count
                            await self._views.wait_change(seen, timeout_s=left_s)
            finally:
                self._grace_count -= 1
            if not self._queue.switch.may_lease:  # disabled during the grace: fence nothing
                return outcome
            lease.fingerprint = self.waiting.fingerprint

    async def _summarise(self) -> None:
        while True:
            await self._clock.sleep(SUMMARY_INTERVAL_S)
            self._summary.tell(at_work_count=len(self._busy))


# --- Which ledgers come next ----------------------------------------------------------------------

HELP_MAX = 25
"""Maximum number of other workers' ledgers that one poll picks: as many as fit into one
transaction."""


def own_to_read(
    own: Collection[int],
    urgent: Sequence[int],
    *,
    losses: Collection[int] = (),
    limit: int,
    rng: random.Random,
) -> list[int]:
    """Choose at most ``limit`` ledgers to read: urgent ones, then losses, then others."""
    rest = set(own)
    chosen = [ledger_id for ledger_id in urgent if ledger_id in rest]
    rest.difference_update(chosen)
    lost = rest.intersection(losses)
    for each in (lost, rest - lost):
        count = max(0, min(limit - len(chosen), len(each)))
        chosen += rng.sample(sorted(each), count)
    return chosen[:limit]


def others_to_read(
    left_by_owner: Collection[int],
    urgent: Sequence[int],
    *,
    losses: Collection[int] = (),
    worker_count: int,
    others_max: int,
    rng: random.Random,
) -> list[int]:
    """Choose ledgers of other workers to help with: this worker's part of them, urgent ones first.

    ``others_max``: how many may be started now besides our own. The rest is left to other helpers.
    """
    count = min(math.ceil(len(left_by_owner) / worker_count), others_max, HELP_MAX)
    return own_to_read(left_by_owner, urgent, losses=losses, limit=max(0, count), rng=rng)


def fewest_copies_first(
    found: Sequence[QueuedLedger], urgent: Collection[int], *, is_own: Callable[[int], bool]
) -> list[QueuedLedger]:
    """Sort by: losses, the leader's urgent ledgers, most bookies missing, our own share, oldest."""
    ranks = {ledger_id: rank for rank, ledger_id in enumerate(urgent)}

    def urgency(queued: QueuedLedger) -> tuple[bool, bool, int, bool, int, int]:
        ledger_id = queued.ledger_id
        return (
            not queued.is_loss,
            ledger_id not in ranks,
            -len(queued.replicas),
            not is_own(ledger_id),
            ranks.get(ledger_id, 0),
            queued.since_ms,
        )

    return sorted(found, key=urgency)


POINTS_PER_WORKER = 64
"""With 64 points the shares differ by about an eighth."""


class HashRing:
    """Consistent hashing: assigns each ledger to one of ``workers`` (session ids). Immutable.

    Each worker has many points on a circle, and a ledger belongs to the next point after its own. A
    hash for each pair of ledger and worker would do the same, but a poll lists 20,000 ledgers, and
    there may be 400 nodes.
    """

    def __init__(self, workers: Collection[int], *, own: int) -> None:
        self.workers = frozenset({*workers, own})
        placed = sorted(
            (mix64(mix64(worker) + number), worker == own)
            for worker in self.workers
            for number in range(POINTS_PER_WORKER)
        )
        self._points = [point for point, _ in placed]
        self._is_own = [is_own for _, is_own in placed]

    def is_own(self, ledger_id: int) -> bool:
        if len(self.workers) == 1:
            return True
        position = bisect.bisect_left(self._points, mix64(ledger_id))
        return self._is_own[position % len(self._points)]


WAIT_MIN_S = 0.05
"""The first wait after an event; each further wait is twice as long, up to the longest. The marks
appear shortly after the event: after a bookie disappeared, or the first mark directory was made."""
BUSY_LOOKS_PER_S = 200
"""Polls of all workers together right after an event. More than ten workers wait longer at
first."""
IDLE_LOOKS_PER_S = 20
"""Polls of all workers together while nothing happens. Up to forty workers wait no longer than
the default setting."""

EMPTY_QUEUE_FACTOR = 5
"""Factor of the longest wait while no ledger is marked, because the first mark wakes the worker."""


def longest_wait_s(idle_wait_s: float, *, worker_count: int) -> float:
    """Return the longest wait: the setting ``idle_wait_s``, or more if there are many workers."""
    assert worker_count >= 1, worker_count
    return max(idle_wait_s, worker_count / IDLE_LOOKS_PER_S)


class PollBackoff:
    """Computes the waits of one worker between two polls.

    It bounds the polls of all workers together, because a poll costs ZooKeeper the same whether
    there is anything to do or not. Three events wake a worker at once: the first mark in an empty
    tree, a bookie that registers or disappears, and the end of the worker's own last repair.
    """

    def __init__(self, idle_wait_s: float) -> None:
        self._idle_wait_s = idle_wait_s
        self._doubled_s = 0.0

    def reset(self) -> None:
        """Start with the shortest wait again, after an event."""
        self._doubled_s = 0.0

    def next_s(self, *, worker_count: int, is_queue_empty: bool) -> float:
        shortest_s = max(WAIT_MIN_S, worker_count / BUSY_LOOKS_PER_S)
        longest_s = longest_wait_s(self._idle_wait_s, worker_count=worker_count)
        if is_queue_empty:
            longest_s *= EMPTY_QUEUE_FACTOR
        wait_s = min(max(shortest_s, self._doubled_s), longest_s)
        self._doubled_s = 2 * wait_s
        return wait_s


WINDOW_LEDGERS_MAX = 1_000
"""Maximum number of marks that one poll reads."""
SHARES_AGE_MAX_S = 5.0
"""Maximum age of the list of workers behind the hash ring."""
IDLE_SHARES_AGE_MAX_S = 60.0
"""Maximum age while no ledger is due. Then the list only determines how often to poll."""
OTHERS_WATCHED_MAX = 5_000
"""Maximum number of other workers' ledgers whose unlocked time is tracked."""


@dataclass(eq=False)
class LedgerPicker:
    """Picks the ledgers that one worker leases next.

    A poll lists ids (a part of a long queue). It reads the marks and notes only of ledgers that
    this worker may lease now: a window of its own share, and a few that other workers have left
    unlocked. So the cost of a poll is bounded for any length of the queue and any number of nodes.

    How many workers share the queue without talking to each other:

    1. Every worker knows the other workers (``nodes``) and computes the same ``HashRing``. Each
       worker repairs its own share, so two workers hardly ever try to lock the same ledger, and
       none takes all of a short queue while others are idle.
    2. A worker that joins or leaves moves only its own ledgers. A worker that has not heard of it
       yet loses a few races for locks, which cost one request each.
    3. A worker whose own share is empty helps: it takes ledgers of others that have been unlocked
       for so long that even an idle owner must have polled. The owner may be busy or stopped.
    """

    waiting: WaitingList

    def __post_init__(self) -> None:
        self._queue, self._clock = self.waiting.queue, self.waiting.clock
        self._rng = self.waiting.rng
        self._idle_wait_s = self.waiting.settings.idle_wait_s
        self._ring = HashRing((), own=self._queue.store.session_id)
        self._ring_updated_s = -math.inf
        self._free_since_s: dict[int, float] = {}
        """Since when each unlocked ledger of other workers has been due."""
        self.is_cut_short = False
        """True if the last poll did not read all of our own share."""
        self.is_queue_empty = False
        """True if the last poll found no marked ledger."""
        self.took_s = 0.0
        """Duration of the last poll."""

    @property
    def worker_count(self) -> int:
        """Number of workers as last read, including this one."""
        return len(self._ring.workers)

    async def pick(
        self, *, busy: Collection[int], others_max: int, losses_only: bool = False
    ) -> list[QueuedLedger]:
        """Return the ledgers to lease, most urgent first.

        ``busy``: ledgers that this worker has already. ``others_max``: maximum number of ledgers to
        start if others' ledgers are among them; 0: no ledgers of others. ``losses_only``: pick only
        ledgers that lost copies.
        """
        began_s = self._clock.now_s()
        self.is_queue_empty = False
        listing = await self._queue.list_ledgers(self._rng)
        if listing.marked is not None:
            self.is_queue_empty = not listing.marked  # ``Queue.watch_first_marks`` tells the next
            self.waiting.forget_others(listing.marked.union(busy))
        named = {*listing.free, *filter(self._queue.may_hold, listing.urgent)}
        due = self.waiting.due(named.difference(busy), losses=listing.losses)
        await self._update_ring(age_max_s=SHARES_AGE_MAX_S if due else IDLE_SHARES_AGE_MAX_S)
        own = {ledger_id for ledger_id in due if self._ring.is_own(ledger_id)}
        others = set(self._left_by_owner(set(due) - own))
        if losses_only:
            losses = listing.losses.union(listing.urgent)
            own, others = own & losses, others & losses
        ours = own_to_read(
            own, listing.urgent, losses=listing.losses, limit=WINDOW_LEDGERS_MAX, rng=self._rng
        )
        self.is_cut_short = len(ours) < len(own)
        theirs = others_to_read(
            others,
            listing.urgent,
            losses=listing.losses,
            worker_count=self.worker_count,
            others_max=others_max - len(ours),
            rng=self._rng,
        )
        chosen = [*ours, *theirs]
        marked = await self._queue.read(chosen) if chosen else []
        for ledger_id in set(chosen).difference(listing.free, (each.ledger_id for each in marked)):
            self.waiting.pause(ledger_id, GONE_PAUSE_S)
        found = await self.waiting.without_waiting(marked)
        if losses_only:
            found = [each for each in found if each.is_loss]
        self.took_s = self._clock.now_s() - began_s
        return fewest_copies_first(found, listing.urgent, is_own=self._ring.is_own)

    def _left_by_owner(self, others: Collection[int]) -> list[int]:
        """Return the ledgers unlocked at every poll for longer than any owner waits to poll."""
        now_s, before = self._clock.now_s(), self._free_since_s
        watched = sorted(others)[:OTHERS_WATCHED_MAX]
        self._free_since_s = {i: before.get(i, now_s) for i in watched}
        help_after_s = longest_wait_s(self._idle_wait_s, worker_count=self.worker_count)
        return [i for i, s in self._free_since_s.items() if now_s - s >= help_after_s]

    async def _update_ring(self, *, age_max_s: float) -> None:
        now_s = self._clock.now_s()
        if now_s < self._ring_updated_s + age_max_s:
            return
        self._ring_updated_s = now_s
        workers = await self._queue.workers()
        if workers != self._ring.workers:
            self._ring = HashRing(workers, own=self._queue.store.session_id)
