"""One look at the queue: what it costs is bounded, whatever its length and however many the nodes.

It lists ids (a part of a long queue), and reads marks and notes only of ledgers that this node may
take now: its own share, a window of it, and a few that others have left lying. What choice means is
said in ``choice``; who waits until when, in ``deferrals`` and in the notes of all nodes
(``waiting``).

Which of the ledgers that wait this node takes, and in what order: pure functions.

Each worker sees to its own share (``shares``). Others' ledgers it takes when its own are out, and
only those that their owner has left lying for a while: it may be busy, or stopped. So hardly two
workers reach for the same ledger, and none takes all of a short queue while its neighbours are
idle.

Which worker a ledger falls to, so that many nodes do not reach for the same one.

Every worker knows the others (``membership``) and comes to the same answer by itself: consistent
hashing, each worker at many points of a circle, a ledger falling to the next point from its own.
When a worker comes or goes only its own ledgers change hands; a node that has not heard of it yet
loses a few races, which cost a request each. A hash for each pair of ledger and worker would say
the same, but a look lists 20,000 ledgers, and 400 nodes are a real size.

How long a worker waits between two looks at the queue: the longer, the more workers share it.

A look costs ZooKeeper the same whether there is anything to do or not, so what is bounded is the
looks of all workers together, not those of each. What is soon to be seen is not left to chance: the
first mark in an empty tree, a bookie that comes or goes, and a worker's own last repair wake it at
once.
"""

import bisect
import math
import random
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from ledgers.clock import Clock
from ledgers.model import BookieId
from replication.backoff import WaitingList
from replication.ledger_record import WaitingNote
from replication.locks import QueuedLedger
from replication.work_queue import Queue, QueueListing

HELP_MAX = 25
"""Ledgers of other workers that one look takes at most: what goes into one transaction."""


class DueLedger(Struct, frozen=True, kw_only=True):
    """A marked ledger that is to be taken now, and why it waited so far, if it did.

    ``has_old_note``: there is one, of a mark that is gone. ``suspects``: as either kind of note
    has it; whoever unmarked the ledger need not have mended that.
    """

    queued: QueuedLedger
    note: WaitingNote | None
    has_old_note: bool = False
    suspects: frozenset[BookieId] = frozenset()

    @property
    def ledger_id(self) -> int:
        return self.queued.ledger_id


def own_to_read(
    own: Collection[int],
    urgent: Sequence[int],
    *,
    losses: Collection[int] = (),
    limit: int,
    rng: random.Random,
) -> list[int]:
    """Whose marks are worth reading: the urgent ones first, then losses, then any; at most
    ``limit``."""
    rest = set(own)
    chosen = [ledger_id for ledger_id in urgent if ledger_id in rest]
    rest.difference_update(chosen)
    lost = rest.intersection(losses)
    for each in (lost, rest - lost):
        count = max(0, min(limit - len(chosen), len(each)))
        chosen += rng.sample(sorted(each), count)
    return chosen[:limit]


def others_to_read(
    left_lying: Collection[int],
    urgent: Sequence[int],
    *,
    losses: Collection[int] = (),
    worker_count: int,
    others_max: int,
    rng: random.Random,
) -> list[int]:
    """Ledgers of other workers to help with: this worker's share of them, urgent ones first.

    ``others_max``: how many may be begun now besides our own. The others are left to the other helpers.
    """
    count = min(math.ceil(len(left_lying) / worker_count), others_max, HELP_MAX)
    return own_to_read(left_lying, urgent, losses=losses, limit=max(0, count), rng=rng)


def fewest_copies_first(
    found: Sequence[DueLedger], urgent: Collection[int], *, is_own: Callable[[int], bool]
) -> list[DueLedger]:
    """Losses, what the leader calls urgent, most bookies missing; among equals our own, then the
    oldest."""
    ranks = {ledger_id: rank for rank, ledger_id in enumerate(urgent)}

    def urgency(due: DueLedger) -> tuple[bool, bool, int, bool, int, int]:
        ledger_id, queued = due.ledger_id, due.queued
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
"""Shares differ by about an eighth then."""

_MASK = 2**64 - 1


class HashRing:
    """The ledgers of each of ``workers`` (session ids), seen by ``own``. Immutable."""

    def __init__(self, workers: Collection[int], *, own: int) -> None:
        self.workers = frozenset({*workers, own})
        placed = sorted(
            (_mixed(_mixed(worker) + number), worker == own)
            for worker in self.workers
            for number in range(POINTS_PER_WORKER)
        )
        self._points = [point for point, _ in placed]
        self._is_own = [is_own for _, is_own in placed]

    def is_own(self, ledger_id: int) -> bool:
        if len(self.workers) == 1:
            return True
        position = bisect.bisect_left(self._points, _mixed(ledger_id))
        return self._is_own[position % len(self._points)]


def _mixed(number: int) -> int:
    """64 bits of which each depends on all of the number's. The same in every release and
    process."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


WAIT_MIN_S = 0.05
"""The first wait after something happened; each further one is twice as long, up to the longest.
The marks come after what wakes us: the bookie that went, the first directory of the mark tree."""
BUSY_LOOKS_PER_S = 200
"""Of all workers together, right after something happened. More than ten workers wait longer at
first."""
IDLE_LOOKS_PER_S = 20
"""Of all workers together, while nothing happens. Up to forty wait no longer than is set by
default."""

EMPTY_QUEUE_FACTOR = 5
"""So many times as long an idle worker waits while no ledger at all is marked: the first mark wakes
it."""


def longest_wait_s(idle_wait_s: float, *, worker_count: int) -> float:
    """``idle_wait_s`` is the setting, which few workers keep to."""
    assert worker_count >= 1, worker_count
    return max(idle_wait_s, worker_count / IDLE_LOOKS_PER_S)


class PollBackoff:
    """One worker's waits."""

    def __init__(self, idle_wait_s: float) -> None:
        self._idle_wait_s = idle_wait_s
        self._doubled_s = 0.0

    def reset(self) -> None:
        """Something happened, of which there may be more."""
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
"""Marks read in one look at the queue."""
SHARES_AGE_MAX_S = 5.0
"""How old the list of workers may be that shares are reckoned from."""
IDLE_SHARES_AGE_MAX_S = 60.0
"""Likewise while no ledger is due: then it only says how seldom to look."""
OTHERS_WATCHED_MAX = 5_000
"""Other workers' ledgers of which it is remembered since when they lie free."""


class LedgerPicker:
    """A worker's eye on the queue.

    ``idle_wait_s``: the setting. Others' ledgers are left to them until even an idle one of them
    has surely looked.
    """

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
        """Other workers' ledgers that lie free."""
        self.is_cut_short = False
        """The last look left some of our own share unread: there is more."""
        self.is_queue_empty = False
        """As the last look found it."""
        self.took_s = 0.0
        """How long it took."""

    @property
    def worker_count(self) -> int:
        """As last heard; 1 when this one is alone."""
        return len(self._ring.workers)

    async def pick(
        self, *, busy: Collection[int], others_max: int, losses_only: bool = False
    ) -> list[DueLedger]:
        """Ledgers to take, most endangered first.

        ``busy``: those at hand. ``others_max``: how many may be begun now of others' ledgers, less those
        that are found of our own; 0: none. ``losses_only``: nothing else may be begun.
        """
        began_s = self._clock.now_s()
        self.is_queue_empty = False
        listing = await self._queue.list_ledgers(self._rng)
        self.is_queue_empty = listing.is_queue_empty
        if listing.marked is not None:
            self._waiting.forget_others(listing.marked.union(busy))
        own, others = await self._due(listing, busy)
        if losses_only:
            losses = listing.losses.union(listing.urgent)
            own, others = own & losses, others & losses
        chosen = self._choose(listing, own, others, others_max=others_max)
        found = await self._read(chosen)
        for ledger_id in set(chosen).difference(listing.free, (each.ledger_id for each in found)):
            self._waiting.back_off_while_unmarked(ledger_id)
        if losses_only:
            found = [each for each in found if each.queued.is_loss]
        self.took_s = self._clock.now_s() - began_s
        return fewest_copies_first(found, listing.urgent, is_own=self._ring.is_own)

    async def _due(self, listing: QueueListing, busy: Collection[int]) -> tuple[set[int], set[int]]:
        """Ledgers that need not wait any longer: of our own share, and of others' those left
        lying."""
        named = {*listing.free, *filter(self._queue.may_hold, listing.urgent)}
        due = self._waiting.due(named.difference(busy), losses=listing.losses)
        await self._update_ring(age_max_s=SHARES_AGE_MAX_S if due else IDLE_SHARES_AGE_MAX_S)
        own = {ledger_id for ledger_id in due if self._ring.is_own(ledger_id)}
        return own, set(self._left_lying(set(due) - own))

    def _choose(
        self,
        listing: QueueListing,
        own: Collection[int],
        others: Collection[int],
        *,
        others_max: int,
    ) -> list[int]:
        """Whose marks are worth reading: of our own a window, and of others' what there is room for
        besides."""
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
        return [*ours, *theirs]

    def _left_lying(self, others: Collection[int]) -> list[int]:
        """Those that have been free at every look since one so long ago that their owner has
        looked, too."""
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

    async def _read(self, ledger_ids: Sequence[int]) -> list[DueLedger]:
        """Those that are marked, and that no note bids to wait."""
        if not ledger_ids:
            return []
        found = await self._queue.read(ledger_ids)
        # After the marks: who notes what the next must know renews them then
        # (``Queue.renew_marks``).
        notes = await self._waiting.notes_of(ledger_ids)
        read = [_with_note(queued, notes.get(queued.ledger_id)) for queued in found]
        return [
            each
            for each in read
            if each.note is None
            or not self._waiting.must_wait(each.note, is_loss=each.queued.is_loss)
        ]


def _with_note(queued: QueuedLedger, note: WaitingNote | None) -> DueLedger:
    """What was noted of a mark before the ledger's own counts for nothing."""
    is_old = note is not None and note.is_older_than(queued.czxid)
    return DueLedger(
        queued=queued,
        note=None if is_old else note,
        has_old_note=is_old,
        suspects=frozenset() if note is None else note.suspects,
    )
