"""One look at the queue: what it costs is bounded, whatever its length and however many the nodes.

It lists ids (a part of a long queue), and reads marks and notes only of ledgers that this node may
take now: its own share, a window of it, and a few that others have left lying. What choice means is
said in ``choice``; who waits until when, in ``deferrals`` and in the notes of all nodes
(``waiting``).
"""

import math
import random
from collections.abc import Collection, Sequence

from ledgers.clock import Clock
from replication.queue.choice import DueLedger, most_endangered_first, others_to_read, own_to_read
from replication.queue.idle_waits import longest_wait_s
from replication.queue.queue import Look, Queue
from replication.queue.shares import Shares
from replication.queue.take import QueuedLedger
from replication.waiting.notes import WaitingNote
from replication.waiting.waiting_list import WaitingList

WINDOW_LEDGERS_MAX = 1_000
"""Marks read in one look at the queue."""
SHARES_AGE_MAX_S = 5.0
"""How old the list of workers may be that shares are reckoned from."""
IDLE_SHARES_AGE_MAX_S = 60.0
"""Likewise while no ledger is due: then it only says how seldom to look."""
OTHERS_WATCHED_MAX = 5_000
"""Other workers' ledgers of which it is remembered since when they lie free."""


class Lookout:
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
        self._shares = Shares((), own=queue.session_id)
        self._shares_reckoned_s = -math.inf
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
        return len(self._shares.workers)

    async def look(
        self, *, busy: Collection[int], room: int, losses_only: bool = False
    ) -> list[DueLedger]:
        """Ledgers to take, most endangered first.

        ``busy``: those at hand. ``room``: how many may be begun now of others' ledgers, less those
        that are found of our own; 0: none. ``losses_only``: nothing else may be begun.
        """
        began_s = self._clock.now_s()
        self.is_queue_empty = False
        look = await self._queue.look(self._rng)
        self.is_queue_empty = look.is_queue_empty
        if look.marked is not None:
            self._waiting.forget_others(look.marked.union(busy))
        own, others = await self._due(look, busy)
        if losses_only:
            losses = look.losses.union(look.urgent)
            own, others = own & losses, others & losses
        chosen = self._choose(look, own, others, room=room)
        found = await self._read(chosen)
        for ledger_id in set(chosen).difference(look.free, (each.ledger_id for each in found)):
            self._waiting.put_off_gone(ledger_id)
        if losses_only:
            found = [each for each in found if each.queued.is_loss]
        self.took_s = self._clock.now_s() - began_s
        return most_endangered_first(found, look.urgent, is_own=self._shares.is_own)

    async def _due(self, look: Look, busy: Collection[int]) -> tuple[set[int], set[int]]:
        """Ledgers that need not wait any longer: of our own share, and of others' those left
        lying."""
        named = {*look.free, *filter(self._queue.may_hold, look.urgent)}
        due = self._waiting.due(named.difference(busy), losses=look.losses)
        await self._reckon_shares(age_max_s=SHARES_AGE_MAX_S if due else IDLE_SHARES_AGE_MAX_S)
        own = {ledger_id for ledger_id in due if self._shares.is_own(ledger_id)}
        return own, set(self._left_lying(set(due) - own))

    def _choose(
        self, look: Look, own: Collection[int], others: Collection[int], *, room: int
    ) -> list[int]:
        """Whose marks are worth reading: of our own a window, and of others' what there is room for
        besides."""
        ours = own_to_read(
            own, look.urgent, losses=look.losses, limit=WINDOW_LEDGERS_MAX, rng=self._rng
        )
        self.is_cut_short = len(ours) < len(own)
        theirs = others_to_read(
            others,
            look.urgent,
            losses=look.losses,
            worker_count=self.worker_count,
            room=room - len(ours),
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

    async def _reckon_shares(self, *, age_max_s: float) -> None:
        now_s = self._clock.now_s()
        if now_s < self._shares_reckoned_s + age_max_s:
            return
        self._shares_reckoned_s = now_s
        workers = await self._queue.workers()
        if workers != self._shares.workers:
            self._shares = Shares(workers, own=self._queue.session_id)

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
        bad_sources=frozenset() if note is None else note.bad_sources,
    )
