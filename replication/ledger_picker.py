"""``LedgerPicker``: which ledgers a worker leases next, and how often it polls the queue.

A poll lists ids (a part of a long queue). It reads the marks and notes only of ledgers that this
worker may lease now: a window of its own share, and a few that other workers have left unlocked. So
the cost of a poll is bounded for any length of the queue and any number of nodes.

How many workers share the queue without talking to each other:

1. Every worker knows the other workers (``nodes``) and computes the same ``HashRing``. Each worker
   repairs its own share, so two workers hardly ever try to lock the same ledger, and none takes all
   of a short queue while others are idle.
2. A worker that joins or leaves moves only its own ledgers. A worker that has not heard of it yet
   loses a few races for locks, which cost one request each.
3. A worker whose own share is empty helps: it takes ledgers of others that have been unlocked for
   so long that even an idle owner must have polled. The owner may be busy or stopped.

``PollBackoff`` bounds the polls of all workers together, because a poll costs ZooKeeper the same
whether there is anything to do or not. Three events wake a worker at once: the first mark in an
empty tree, a bookie that registers or disappears, and the end of the worker's own last repair.
"""

import bisect
import math
import random
from collections.abc import Callable, Collection, Sequence

from ledgers.clock import Clock
from ledgers.mixing import mix64
from replication.backoff import GONE_PAUSE_S, WaitingList
from replication.locks import QueuedLedger
from replication.work_queue import Queue

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
    """Choose at most ``limit`` ledgers whose marks to read: urgent ones, then losses, then
    others."""
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
    """Computes the waits of one worker between two polls."""

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


class LedgerPicker:
    """Picks the ledgers that one worker leases next. ``idle_wait_s``: the setting."""

    def __init__(
        self,
        *,
        queue: Queue,
        waiting: WaitingList,
        clock: Clock,
        rng: random.Random,
        idle_wait_s: float,
    ) -> None:
        self._queue = queue
        self._waiting = waiting
        self._clock = clock
        self._rng = rng
        self._idle_wait_s = idle_wait_s
        self._ring = HashRing((), own=queue.session_id)
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
        self.is_queue_empty = listing.is_queue_empty
        if listing.marked is not None:
            self._waiting.forget_others(listing.marked.union(busy))
        named = {*listing.free, *filter(self._queue.may_hold, listing.urgent)}
        due = self._waiting.due(named.difference(busy), losses=listing.losses)
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
            self._waiting.pause(ledger_id, GONE_PAUSE_S)
        found = await self._waiting.without_waiting(marked)
        if losses_only:
            found = [each for each in found if each.is_loss]
        self.took_s = self._clock.now_s() - began_s
        return fewest_copies_first(found, listing.urgent, is_own=self._ring.is_own)

    def _left_by_owner(self, others: Collection[int]) -> list[int]:
        """Return the ledgers that were unlocked at every poll for so long that their owner must
        have polled, too."""
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
            self._ring = HashRing(workers, own=self._queue.session_id)
