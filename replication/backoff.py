"""Decides when a deferred ledger is tried again, and tells all nodes.

A worker defers a ledger whose repair is blocked. ``WaitingList`` writes a note for all nodes
(``ledger_record.WaitingNote``), and ``Deferrals`` remembers which ledgers this node leaves alone
and until when.

The first and the longest wait depend on the reason (``PACES``): an unresponsive bookie may answer
in a moment, damaged metadata stays damaged. Each failure for the same reason doubles the wait. A
success, another reason, or a change in the cluster that warrants a retry starts from the first
wait.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import structlog

from ledgers.clock import Clock
from ledgers.errors import (
    LockLostError,
    RejectedError,
    UnavailableError,
)
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from replication.cluster import ClusterView, ViewSource
from replication.ledger_record import (
    ClusterFingerprint,
    UnprovenEnd,
    WaitingNote,
    WaitingNotesWriter,
    still_open,
)
from replication.locks import LedgerLease, QueuedLedger
from replication.orders import TriesOrder
from replication.outcome import Outcome
from replication.reasons import Blocked, Facts, Reason, named
from replication.work_queue import Queue

LONG, SHORT = (6.0, 12.0), (0.2, 0.2)
PACES: Mapping[Reason, tuple[float, float]] = {
    Reason.NO_COPY: LONG,
    Reason.CORRUPT_METADATA: LONG,
    Reason.ACCESS_DENIED: LONG,
    Reason.WRITE_REFUSED: LONG,
    Reason.DIGEST_SUSPECT: LONG,
    Reason.MISPLACED: LONG,
    Reason.NO_ANSWER: SHORT,
    Reason.CONFLICTS: SHORT,
}
"""The first and the longest wait, as multiples of the settings. Other reasons wait as the settings
say."""
JITTER = 0.2
"""Spreads the retries of ledgers that failed together."""
TRIES_COUNTED_MAX = 30
"""More doublings exceed any bound."""
REMEMBERED_S = 3_600.0
"""Time that a deferral is remembered after its retry was due, to count the tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPace:
    """The settings for the wait between tries."""

    wait_min_s: float
    wait_max_s: float

    def wait_s(self, reason: Reason | None, *, tries: int, rng: random.Random) -> float:
        """Return the wait after ``tries`` failures for this reason. None: an unexpected error."""
        assert tries >= 1, tries
        first, longest = (1.0, 1.0) if reason is None else PACES.get(reason, (1.0, 1.0))
        doubled_s = self.wait_min_s * first * 2.0 ** (min(tries, TRIES_COUNTED_MAX) - 1)
        return min(doubled_s, self.wait_max_s * longest) * rng.uniform(1 - JITTER, 1 + JITTER)


@dataclass(frozen=True, slots=True)
class _Deferral:
    due_s: float
    fingerprint: ClusterFingerprint
    reason: Reason | None
    tries: int
    is_loss: bool


class Deferrals:
    """The ledgers that this worker leaves alone for now, because of its own tries or of notes.

    Times are monotonic seconds. All other ledgers are due.
    """

    def __init__(self) -> None:
        self._deferrals: dict[int, _Deferral] = {}

    def defer(
        self,
        ledger_id: int,
        *,
        due_s: float,
        fingerprint: ClusterFingerprint,
        reason: Reason | None,
        tries: int = 1,
        is_loss: bool = True,
    ) -> None:
        """Leave the ledger alone until ``due_s``. ``is_loss``: it was known to have lost copies."""
        self._deferrals[ledger_id] = _Deferral(due_s, fingerprint, reason, tries, is_loss)

    def is_due(
        self, ledger_id: int, *, now_s: float, fingerprint: ClusterFingerprint, is_loss: bool = True
    ) -> bool:
        """Return True if the ledger may be tried. ``is_loss``: it has lost copies now. A ledger
        that was deferred while being moved is due once it lost copies."""
        deferral = self._deferrals.get(ledger_id)
        return (
            deferral is None
            or deferral.due_s <= now_s
            or (is_loss and not deferral.is_loss)
            or fingerprint.warrants_retry(deferral.fingerprint, deferral.reason)
        )

    def tries(
        self, ledger_id: int, reason: Reason | None, *, fingerprint: ClusterFingerprint
    ) -> int:
        """Return how often the ledger failed in a row for this reason, without a change that
        warrants a retry."""
        deferral = self._deferrals.get(ledger_id)
        if deferral is None or deferral.reason is not reason:
            return 0
        return 0 if fingerprint.warrants_retry(deferral.fingerprint, reason) else deferral.tries

    def waits_for(self, ledger_id: int, reason: Reason) -> bool:
        """Return True if the ledger was last deferred for this reason."""
        deferral = self._deferrals.get(ledger_id)
        return deferral is not None and deferral.reason is reason

    def forget_all(self, reason: Reason) -> None:
        """Make all ledgers due that were deferred for this reason."""
        self._deferrals = {
            ledger_id: deferral
            for ledger_id, deferral in self._deferrals.items()
            if deferral.reason is not reason
        }

    def forget_others(self, ledger_ids: Set[int]) -> None:
        """Forget all ledgers but these."""
        for ledger_id in self._deferrals.keys() - ledger_ids:
            del self._deferrals[ledger_id]

    def forget(self, ledger_id: int) -> None:
        self._deferrals.pop(ledger_id, None)

    def prune(self, *, now_s: float) -> None:
        """Forget ledgers that were due long ago: other nodes have repaired them."""
        self._deferrals = {
            ledger_id: deferral
            for ledger_id, deferral in self._deferrals.items()
            if deferral.due_s + REMEMBERED_S > now_s
        }


log = structlog.get_logger()

LOST_RACE_PAUSE_S = 0.5
"""Pause for a ledger that another worker leased first."""
GONE_PAUSE_S = 60.0
"""Pause for a ledger that the leader lists as urgent, but that is not marked."""
PROBE_INTERVAL_S = 30.0
"""Interval at which one ledger is tried while the journal cannot be written. Nothing else shows
that the disk has space again, and each try may copy in vain."""
NOTES_TIDIED_MAX = 1_000
"""Notes whose marks are checked at once."""

PRUNE_INTERVAL_S = 60.0


@dataclass(slots=True)
class LeasedLedger:
    """A ledger that this worker has leased.

    ``fingerprint``: the cluster when the repair began. ``note``: the note in ZooKeeper.
    ``old_note``: instead, the note of an earlier mark that ZooKeeper has.
    """

    lease: LedgerLease
    fingerprint: ClusterFingerprint
    note: WaitingNote | None
    old_note: WaitingNote | None = None
    suspects: frozenset[BookieId] = frozenset()
    """Bookies whose copies an earlier try, of any node, found bad."""

    @property
    def ledger_id(self) -> int:
        return self.lease.ledger_id

    @property
    def is_loss(self) -> bool:
        return self.lease.queued.is_loss


class WaitingList:
    """Decides for a worker which ledgers are due, and defers ledgers for all nodes.

    ``node``: the name of this node in its notes.
    """

    def __init__(
        self,
        *,
        notes: WaitingNotesWriter,
        manager: LedgerManager,
        views: ViewSource,
        pace: RetryPace,
        node: str,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._notes = notes
        self._manager = manager
        self._views = views
        self.pace = pace
        """May be changed at any time."""
        self._node = node
        self._clock = clock
        self._rng = rng
        self._deferrals = Deferrals()
        self._prune_due_s = 0.0
        self._probe_due_s = math.inf
        """Infinite while no ledger waits for the journal."""
        self._seen: tuple[ClusterView, ClusterFingerprint] | None = None
        """The last fingerprint, with its view."""
        self._heeded = TriesOrder()
        """The orders to retry that were followed already."""
        self._is_untold = False
        """True while notes cannot be written."""

    @property
    def fingerprint(self) -> ClusterFingerprint:
        """The fingerprint of the cluster now."""
        if self._seen is None or self._seen[0] is not self._view:
            self._seen = self._view, ClusterFingerprint.of(self._view)
        return self._seen[1]

    @property
    def _view(self) -> ClusterView:
        return self._views.current

    # --- Which ledgers are due --------------------------------------------------------------------

    def due(self, ledger_ids: Collection[int], *, losses: Collection[int]) -> list[int]:
        """Return the ledgers that are due, as far as this node knows. ``losses``: those that lost
        copies."""
        now_s, fingerprint = self._clock.now_s(), self.fingerprint
        if now_s >= self._prune_due_s:
            self._prune_due_s = now_s + PRUNE_INTERVAL_S
            self._deferrals.prune(now_s=now_s)
        self._heed_tries()
        due = [
            i
            for i in ledger_ids
            if self._deferrals.is_due(i, now_s=now_s, fingerprint=fingerprint, is_loss=i in losses)
        ]
        if now_s >= self._probe_due_s:
            due += self._probe(set(ledger_ids).difference(due))
        return due

    def _heed_tries(self) -> None:
        """Make ledgers due that an operator ordered to be tried since the last call."""
        tries = self._view.orders.tries
        if tries is not self._heeded:
            for ledger_id, _ in tries.ordered_ms.items() - self._heeded.ordered_ms.items():
                self._deferrals.forget(ledger_id)
            self._heeded = tries

    def _probe(self, ledger_ids: Collection[int]) -> list[int]:
        """Return one ledger that waits for the journal, if there is any."""
        waiting = [i for i in ledger_ids if self._deferrals.waits_for(i, Reason.JOURNAL)]
        if not waiting:
            self._probe_due_s = math.inf
            return []
        self._probe_due_s = self._clock.now_s() + PROBE_INTERVAL_S
        return [self._rng.choice(waiting)]

    def forget_others(self, marked: Set[int]) -> None:
        """Forget ledgers that are not marked. A new mark is a new matter."""
        self._deferrals.forget_others(marked)

    async def delete_stale_note(self, leased: LeasedLedger) -> None:
        """Delete the note of an earlier mark, unless it names bad sources. We hold the lease, so no
        other node writes a note."""
        if leased.old_note is not None and not leased.suspects:
            await self._try_to_tell(self._notes.delete(leased.old_note))

    async def notes_of(self, ledger_ids: Sequence[int]) -> dict[int, WaitingNote]:
        """Return the notes of these ledgers."""
        if not await self._notes.are_any():
            return {}
        return {note.ledger_id: note for note in await self._notes.read_all(ledger_ids)}

    def must_wait(self, note: WaitingNote, *, is_loss: bool) -> bool:
        """Return True if the next try is not due yet. This node remembers it, so that it reads the
        note once.

        ``is_loss``: the mark says now that copies are lost.
        """
        if note.fingerprint is None:
            return False
        wait_ms = note.wait_ms(now_ms=self._clock.wall_ms(), fingerprint=self.fingerprint)
        if wait_ms:
            self._defer(
                note.ledger_id,
                wait_ms / 1000,
                note.fingerprint,
                reason=note.reason,
                tries=note.tries,
                is_loss=is_loss,
            )
        return wait_ms > 0

    # --- Deferring and completing -----------------------------------------------------------------

    async def defer(self, leased: LeasedLedger, outcome: Outcome) -> bool:
        """Defer the ledger for all nodes. Returns False if the note could not be written."""
        blocked, ledger_id = outcome.blocked, leased.ledger_id
        assert blocked is not None, outcome
        reason = blocked.reason
        noted = (
            0
            if leased.note is None
            else leased.note.tries_for(reason, fingerprint=leased.fingerprint)
        )
        tries = 1 + max(
            noted, self._deferrals.tries(ledger_id, reason, fingerprint=leased.fingerprint)
        )
        wait_s = self._wait_s(blocked, tries=tries)
        is_told = await self._write(leased, outcome, tries=tries, wait_s=wait_s)
        self._defer(
            ledger_id,
            wait_s,
            leased.fingerprint,
            reason=reason,
            tries=tries,
            is_loss=leased.is_loss,
        )
        if reason is Reason.JOURNAL:
            self._probe_due_s = self._clock.now_s() + PROBE_INTERVAL_S
        log.debug(
            "ledger.retry_scheduled", ledger_id=ledger_id, wait_s=round(wait_s, 1), tries=tries
        )
        return is_told

    async def rewrite_note(self, leased: LeasedLedger) -> bool:
        """Write the note that could not be written when the ledger was deferred. Returns True if it
        was written."""
        assert leased.note is not None, leased
        return await self._write_note(leased, leased.note)

    async def record_suspects(self, leased: LeasedLedger, found_bad: Collection[BookieId]) -> bool:
        """Record the bad copies that an interrupted repair found: the next try, on any node, must
        know of them. Returns False if the note could not be written."""
        before = leased.note or WaitingNote(
            ledger_id=leased.ledger_id,
            blocked=Blocked(reason=Reason.LEFT_TO_OTHERS, facts=Facts(lacking=named(found_bad))),
            node=self._node,
            since_ms=self._clock.wall_ms(),
        )
        note = replace(before, suspects=before.suspects.union(leased.suspects, found_bad))
        return await self._write_note(leased, note)

    async def record_grace(self, leased: LeasedLedger, outcome: Outcome, *, grace_s: float) -> None:
        """Write that the ledger waits for its grace under our lock. If this node dies, other nodes
        need not wait.

        If the last recovery failed, the note keeps that reason, unless a change warrants a retry.
        """
        until_ms = self._clock.wall_ms() + int(grace_s * 1000)
        before = leased.note
        if before is None or not _keeps_reason(before, leased.fingerprint):
            await self._write(leased, outcome, tries=1, wait_s=None, grace_until_ms=until_ms)
            return
        suspects = before.suspects | outcome.suspects
        note = replace(before, next_try_ms=0, grace_until_ms=until_ms, suspects=suspects)
        await self._write_note(leased, note)

    def back_off_after_error(self, queued: QueuedLedger, fingerprint: ClusterFingerprint) -> None:
        """Defer the ledger on this node after an unexpected error. ``fingerprint``: the cluster
        when the try began."""
        tries = 1 + self._deferrals.tries(queued.ledger_id, None, fingerprint=fingerprint)
        wait_s = self.pace.wait_s(None, tries=tries, rng=self._rng)
        self._defer(
            queued.ledger_id, wait_s, fingerprint, reason=None, tries=tries, is_loss=queued.is_loss
        )

    def back_off_after_lost_race(self, ledger_id: int) -> None:
        """Defer the ledger for a moment: another worker leased it first."""
        self._defer(ledger_id, LOST_RACE_PAUSE_S, self.fingerprint, reason=None, tries=0)

    def back_off_while_unmarked(self, ledger_id: int) -> None:
        """Defer a ledger that the leader calls urgent, and that is not marked, so that it is not
        read again at once."""
        self._defer(ledger_id, GONE_PAUSE_S, self.fingerprint, reason=None, tries=0)

    async def complete(self, leased: LeasedLedger) -> None:
        """Forget a repaired ledger and delete its note. If it waited for the journal, the journal
        works again, so all others that wait for it are due."""
        if self._deferrals.waits_for(leased.ledger_id, Reason.JOURNAL):
            self._deferrals.forget_all(Reason.JOURNAL)
        self._deferrals.forget(leased.ledger_id)
        if (note := leased.note or leased.old_note) is not None:
            await self._try_to_tell(self._notes.delete(note))

    async def tidy(self, queue: Queue) -> None:
        """Delete the notes of ledgers that are not marked. If there are many notes, look at some of
        them at random.

        A note that says why the ledger's end is not proven stays until the ledger is closed.
        """
        noted = sorted(await self._notes.ledger_ids())
        some = self._rng.sample(noted, min(len(noted), NOTES_TIDIED_MAX))
        await asyncio.gather(*(self._tidy_one(ledger_id, queue) for ledger_id in some))

    async def _tidy_one(self, ledger_id: int, queue: Queue) -> None:
        """Delete the note if the ledger is not marked. The note is read first, because a note that
        is written later belongs to a new mark."""
        stored = await self._notes.read_stored(ledger_id)
        if stored.stat is None or await queue.is_marked(ledger_id):
            return
        is_unproven = stored.value is not None and stored.value.unproven is not None
        if not (is_unproven and await still_open(self._manager, [ledger_id])):
            version = stored.stat.version
            await self._try_to_tell(self._notes.delete_unchanged(ledger_id, version=version))

    def _defer(
        self,
        ledger_id: int,
        wait_s: float,
        fingerprint: ClusterFingerprint,
        *,
        reason: Reason | None,
        tries: int,
        is_loss: bool = True,
    ) -> None:
        due_s = self._clock.now_s() + wait_s
        self._deferrals.defer(
            ledger_id,
            due_s=due_s,
            fingerprint=fingerprint,
            reason=reason,
            tries=tries,
            is_loss=is_loss,
        )

    def _wait_s(self, blocked: Blocked, *, tries: int) -> float:
        if blocked.until_ms is None:
            # Time may help one of several parts of the ledger.
            return min(
                self.pace.wait_s(reason, tries=tries, rng=self._rng)
                for reason in dict.fromkeys(blocked.all_reasons)
            )
        left_s = max(0, blocked.until_ms - self._clock.wall_ms()) / 1000
        return left_s + self._rng.uniform(0, self.pace.wait_min_s)

    async def _write(
        self,
        leased: LeasedLedger,
        outcome: Outcome,
        *,
        tries: int,
        wait_s: float | None,
        grace_until_ms: int = 0,
    ) -> bool:
        """Write the note that says why the ledger waits. ``wait_s``: for how long; None: other
        nodes need not wait."""
        before, blocked, now_ms = leased.note, outcome.blocked, self._clock.wall_ms()
        assert blocked is not None, outcome
        reason = blocked.reason
        is_blocked_already = before is not None and not before.is_released
        # A journal that failed again is written: who waits for the ledger learns that it was tried.
        is_repeated = before is not None and before.reason is reason is Reason.JOURNAL
        if reason.is_of_this_node and before and is_blocked_already and not is_repeated:
            before = replace(before, suspects=before.suspects | outcome.suspects)
            if before == leased.note:  # the existing note holds for all nodes
                return True
            return await self._write_note(leased, before)
        since_ms = before.since_ms if before is not None and before.reason is reason else now_ms
        if before is None or not _is_same(before.blocked, blocked):
            _log_deferred(leased.ledger_id, blocked)
        unproven = None if before is None else before.unproven
        if reason is Reason.END_UNPROVEN:
            unproven = UnprovenEnd(ledger_id=leased.ledger_id, facts=blocked.facts, tried_ms=now_ms)
        note = WaitingNote(
            ledger_id=leased.ledger_id,
            blocked=blocked,
            node=self._node,
            since_ms=since_ms,
            tries=tries,
            next_try_ms=0 if wait_s is None else now_ms + int(wait_s * 1000),
            grace_until_ms=grace_until_ms,
            fingerprint=leased.fingerprint,
            suspects=outcome.suspects,
            unproven=unproven,
            version=None if before is None else before.version,
        )
        return await self._write_note(leased, note)

    async def _write_note(self, leased: LeasedLedger, note: WaitingNote) -> bool:
        """Write the note of the leased ledger. Returns False if it cannot be written."""
        leased.note = note

        async def write() -> None:
            leased.note = await self._notes.write(note)

        return await self._try_to_tell(write())

    async def _try_to_tell(self, writing: Awaitable[None]) -> bool:
        """Write something for other nodes. Returns False if it cannot be written, which must not
        stop the repair. The first failure in a row is logged."""
        try:
            await writing
        except (UnavailableError, LockLostError, RejectedError) as error:
            if not self._is_untold:
                log.warning("notes.write_failed", error=str(error))
            self._is_untold = True
        else:
            self._is_untold = False
        return not self._is_untold


def _is_same(before: Blocked, now: Blocked) -> bool:
    """Return True if the same things block the ledger, regardless of the times."""
    return (before.reason, before.facts, before.besides) == (now.reason, now.facts, now.besides)


def _log_deferred(ledger_id: int, blocked: Blocked) -> None:
    # The journal logs its own failure once, so it is not a warning for each ledger.
    write = log.debug if blocked.reason is Reason.JOURNAL else log.warning
    record = blocked.to_record()
    write(
        "ledger.deferred",
        ledger_id=ledger_id,
        reason=record["reason"],
        facts=record.get("facts", {}),
        besides=record.get("besides", []),
    )


def _keeps_reason(before: WaitingNote, fingerprint: ClusterFingerprint) -> bool:
    """Return True if the note says more than that the next grace has begun."""
    if before.fingerprint is None or not before.reason.is_of_recovery:
        return False
    return not fingerprint.warrants_retry(before.fingerprint, before.reason)
