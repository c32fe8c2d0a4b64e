"""The ledgers that wait: told to all nodes (``waiting``), and remembered by this one
(``deferrals``).

When a ledger that could not be repaired is tried again, and which ones this node leaves alone
till then.

The first wait and the longest depend on what was in the way: a bookie that does not answer may
answer in a moment, damaged metadata will be so in an hour. Each failure for the same reason doubles
the wait; a success, another reason or a better world begins anew.
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
from ledgers.model import BookieId
from replication.cluster import ClusterView, ViewSource
from replication.ledger_record import (
    ClusterFingerprint,
    UnprovenEnds,
    WaitingNote,
    WaitingNotesWriter,
)
from replication.locks import LedgerLease, QueuedLedger
from replication.orders import TriesOrder
from replication.outcome import Outcome
from replication.reasons import Reason, whereabouts
from replication.work_queue import Queue

LONG, SHORT = (6.0, 12.0), (0.2, 0.2)
PACES: Mapping[Reason, tuple[float, float]] = {
    Reason.NO_COPY: LONG,
    Reason.CORRUPT_METADATA: LONG,
    Reason.SHUT_AWAY: LONG,
    Reason.WRITE_REFUSED: LONG,
    Reason.DIGEST_SUSPECT: LONG,
    Reason.MISPLACED: LONG,
    Reason.NO_ANSWER: SHORT,
    Reason.CONFLICTS: SHORT,
}
"""The first wait and the longest, in terms of the settings'; those as they are for all other
reasons."""
JITTER = 0.2
"""Ledgers that failed together are not all to come back in one moment."""
TRIES_COUNTED_MAX = 30
"""Doubling more often reaches any bound."""
REMEMBERED_S = 3_600.0
"""How long after it was due a deferral still counts as a try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPace:
    """How long to wait between tries, as the settings have it."""

    wait_min_s: float
    wait_max_s: float

    def wait_s(self, reason: Reason | None, *, tries: int, rng: random.Random) -> float:
        """After so many tries that failed for this reason; None: for one that nobody knows."""
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
    """The ledgers that this worker leaves alone for now, by its own tries or the notes of others.

    Times are monotonic seconds. Ledgers without one are due.
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
        """``is_loss``: whether it was known to have lost copies."""
        self._deferrals[ledger_id] = _Deferral(due_s, fingerprint, reason, tries, is_loss)

    def is_due(
        self, ledger_id: int, *, now_s: float, fingerprint: ClusterFingerprint, is_loss: bool = True
    ) -> bool:
        """``is_loss``: as it is now. What was in the way of a move is not waited with when copies
        are lost."""
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
        """How often it failed in a row for this reason, in a world no worse than this one."""
        deferral = self._deferrals.get(ledger_id)
        if deferral is None or deferral.reason is not reason:
            return 0
        return 0 if fingerprint.warrants_retry(deferral.fingerprint, reason) else deferral.tries

    def waits_for(self, ledger_id: int, reason: Reason) -> bool:
        """Whether that is why it was left alone at last."""
        deferral = self._deferrals.get(ledger_id)
        return deferral is not None and deferral.reason is reason

    def forget_all(self, reason: Reason) -> None:
        """What they waited for is over: they are due."""
        self._deferrals = {
            ledger_id: deferral
            for ledger_id, deferral in self._deferrals.items()
            if deferral.reason is not reason
        }

    def forget_others(self, ledger_ids: Set[int]) -> None:
        """All but those of these ledgers."""
        for ledger_id in self._deferrals.keys() - ledger_ids:
            del self._deferrals[ledger_id]

    def forget(self, ledger_id: int) -> None:
        self._deferrals.pop(ledger_id, None)

    def prune(self, *, now_s: float) -> None:
        """Forget those that were due long ago: the ledgers are done, by others."""
        self._deferrals = {
            ledger_id: deferral
            for ledger_id, deferral in self._deferrals.items()
            if deferral.due_s + REMEMBERED_S > now_s
        }


log = structlog.get_logger()

LOST_RACE_PAUSE_S = 0.5
"""Whoever was quicker is left alone with the ledger at first."""
GONE_PAUSE_S = 60.0
"""How long a ledger is left out that the leader calls urgent and that is not marked (any more)."""
PROBE_INTERVAL_S = 30.0
"""While nothing can be recorded on this host, one of the ledgers that wait for that is tried so
long after the last that was: nothing else tells when there is room again, and each try may copy for
nothing."""
NOTES_TIDIED_MAX = 1_000
"""Notes whose marks are looked for in one go."""

PRUNE_INTERVAL_S = 60.0


@dataclass(slots=True)
class LeasedLedger:
    """A ledger in our hands. ``fingerprint``: when its repair began. ``note``: what stands in ZooKeeper.

    ``has_old_note``: in place of ``note`` there stands one of a mark that is gone.
    """

    lease: LedgerLease
    fingerprint: ClusterFingerprint
    note: WaitingNote | None
    has_old_note: bool = False
    suspects: frozenset[BookieId] = frozenset()
    """Whose copies an earlier try found bad, whichever node's it was."""

    @property
    def ledger_id(self) -> int:
        return self.lease.ledger_id

    @property
    def is_loss(self) -> bool:
        return self.lease.queued.is_loss


class WaitingList:
    """One worker's part in what waits, and its knowledge of the rest. ``node``: what our notes
    say."""

    def __init__(
        self,
        *,
        notes: WaitingNotesWriter,
        ends: UnprovenEnds,
        views: ViewSource,
        pace: RetryPace,
        node: str,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._notes = notes
        self._ends = ends
        self._views = views
        self._pace = pace
        self._node = node
        self._clock = clock
        self._rng = rng
        self._deferrals = Deferrals()
        self._prune_due_s = 0.0
        self._probe_due_s = math.inf
        """Never, while no ledger waits for the journal."""
        self._seen: tuple[ClusterView, ClusterFingerprint] | None = None
        """The view that ``fingerprint`` was last reckoned from."""
        self._heeded = TriesOrder()
        """As it stood at the last look."""
        self._is_untold = False
        """The last note could not be written."""

    @property
    def fingerprint(self) -> ClusterFingerprint:
        """As it is now."""
        if self._seen is None or self._seen[0] is not self._view:
            self._seen = self._view, ClusterFingerprint.of(self._view)
        return self._seen[1]

    @property
    def _view(self) -> ClusterView:
        return self._views.current

    # --- Who waits --------------------------------------------------------------------------------

    def due(self, ledger_ids: Collection[int], *, losses: Collection[int]) -> list[int]:
        """Those that are not to be left alone now, as far as this node has heard. ``losses``: that
        lost copies."""
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
        """What somebody ordered to be tried since the last look is due."""
        tries = self._view.orders.tries
        if tries is not self._heeded:
            for ledger_id, _ in tries.ordered_ms.items() - self._heeded.ordered_ms.items():
                self._deferrals.forget(ledger_id)
            self._heeded = tries

    def _probe(self, ledger_ids: Collection[int]) -> list[int]:
        """One of those that wait for the journal, where there are any."""
        waiting = [i for i in ledger_ids if self._deferrals.waits_for(i, Reason.JOURNAL)]
        if not waiting:
            self._probe_due_s = math.inf
            return []
        self._probe_due_s = self._clock.now_s() + PROBE_INTERVAL_S
        return [self._rng.choice(waiting)]

    def forget_others(self, marked: Set[int]) -> None:
        """What was in the way of ledgers that are marked no more: should one be again, that is
        another matter."""
        self._deferrals.forget_others(marked)

    async def delete_stale_note(self, leased: LeasedLedger) -> None:
        """We hold the ledger, so nobody writes another. What it tells of bad sources is to be known
        as long as they are."""
        if leased.has_old_note and not leased.suspects:
            await self._told(self._notes.delete(leased.ledger_id))

    async def notes_of(self, ledger_ids: Sequence[int]) -> dict[int, WaitingNote]:
        """Their notes, as far as there are any."""
        if not await self._notes.are_any():
            return {}
        return {note.ledger_id: note for note in await self._notes.read_all(ledger_ids)}

    def must_wait(self, note: WaitingNote, *, is_loss: bool) -> bool:
        """Whether some node found that it is too early; remembered, so that the note is read once.

        ``is_loss``: of the ledger, as it is marked now.
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

    # --- Who is to wait ---------------------------------------------------------------------------

    async def defer(self, leased: LeasedLedger, outcome: Outcome) -> bool:
        """Nobody is to try it again before its time, or a better one. False where no other node
        could be told."""
        reason, ledger_id = outcome.reason, leased.ledger_id
        assert reason is not None, outcome
        noted = (
            0
            if leased.note is None
            else leased.note.tries_for(reason, fingerprint=leased.fingerprint)
        )
        tries = 1 + max(
            noted, self._deferrals.tries(ledger_id, reason, fingerprint=leased.fingerprint)
        )
        wait_s = self._wait_s(outcome, tries=tries)
        is_told = await self._write(leased, outcome, tries=tries, wait_s=wait_s)
        if reason is Reason.END_UNPROVEN:  # to be known when its mark is gone, too
            await self._told(self._ends.note(ledger_id, outcome.detail))
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
        log.debug("ledger.deferred", ledger_id=ledger_id, wait_s=round(wait_s, 1), tries=tries)
        return is_told

    async def rewrite_note(self, leased: LeasedLedger) -> bool:
        """What could not be written when the ledger was put aside; whether it can now."""
        assert leased.note is not None, leased
        return await self._told(self._notes.write(leased.note))

    async def record_suspects(self, leased: LeasedLedger, found_bad: Collection[BookieId]) -> bool:
        """Its repair broke off: whoever tries it next, at any time, must know of these. False where
        no other node could be told."""
        before = leased.note or WaitingNote(
            ledger_id=leased.ledger_id,
            reason=Reason.LEFT_TO_OTHERS,
            detail=f"its repair broke off; {', '.join(sorted(found_bad))} lack some of what they should have",
            node=self._node,
            since_ms=self._clock.wall_ms(),
        )
        note = replace(before, suspects=before.suspects.union(leased.suspects, found_bad))
        is_likely_there = leased.note is not None or leased.has_old_note
        leased.note = note
        return await self._told(self._notes.write(note, is_likely_there=is_likely_there))

    async def record_grace(self, leased: LeasedLedger, outcome: Outcome, *, grace_s: float) -> None:
        """It waits under our lock: should we die, others need not wait for anything.

        That its recovery failed the last time stays, unless the world is a better one since.
        """
        until_ms = self._clock.wall_ms() + int(grace_s * 1000)
        before = leased.note
        if before is None or not _is_told_on(before, leased.fingerprint):
            await self._write(leased, outcome, tries=1, wait_s=None, grace_until_ms=until_ms)
            return
        suspects = before.suspects | outcome.suspects
        leased.note = replace(before, next_try_ms=0, grace_until_ms=until_ms, suspects=suspects)
        await self._told(self._notes.write(leased.note, is_likely_there=True))

    def back_off_after_error(self, queued: QueuedLedger, fingerprint: ClusterFingerprint) -> None:
        """The try, begun in such a world, broke off for no reason that a note could give."""
        tries = 1 + self._deferrals.tries(queued.ledger_id, None, fingerprint=fingerprint)
        wait_s = self._pace.wait_s(None, tries=tries, rng=self._rng)
        self._defer(
            queued.ledger_id, wait_s, fingerprint, reason=None, tries=tries, is_loss=queued.is_loss
        )

    def back_off_after_lost_race(self, ledger_id: int) -> None:
        """Another worker was quicker."""
        self._defer(ledger_id, LOST_RACE_PAUSE_S, self.fingerprint, reason=None, tries=0)

    def back_off_while_unmarked(self, ledger_id: int) -> None:
        """The leader's note names it, and there is no mark: it is not to be asked for at every
        look."""
        self._defer(ledger_id, GONE_PAUSE_S, self.fingerprint, reason=None, tries=0)

    async def complete(self, leased: LeasedLedger) -> None:
        """It is done. Where it waited for the journal, that can be written to again: so the others
        may."""
        if self._deferrals.waits_for(leased.ledger_id, Reason.JOURNAL):
            self._deferrals.forget_all(Reason.JOURNAL)
        self._deferrals.forget(leased.ledger_id)
        if leased.note is not None or leased.has_old_note:
            await self._told(self._notes.delete(leased.ledger_id))

    async def tidy(self, queue: Queue) -> None:
        """Delete notes of ledgers that are marked no more, some of them where there are many; and
        records of ends that are known by now."""
        noted = sorted(await self._notes.ledger_ids())
        some = self._rng.sample(noted, min(len(noted), NOTES_TIDIED_MAX))
        await asyncio.gather(*(self._tidy_one(ledger_id, queue) for ledger_id in some))
        await self._ends.tidy(self._rng)

    async def _tidy_one(self, ledger_id: int, queue: Queue) -> None:
        """Its version first: one that is written since tells of another mark."""
        version = await self._notes.version(ledger_id)
        if version is not None and not await queue.is_marked(ledger_id):
            await self._told(self._notes.delete(ledger_id, version=version))

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

    def _wait_s(self, outcome: Outcome, *, tries: int) -> float:
        if outcome.retry_at_ms is None:
            # Time may help with one of several.
            return min(
                self._pace.wait_s(reason, tries=tries, rng=self._rng)
                for reason in (outcome.reason, *outcome.besides)
            )
        left_s = max(0, outcome.retry_at_ms - self._clock.wall_ms()) / 1000
        return left_s + self._rng.uniform(0, self._pace.wait_min_s)

    async def _write(
        self,
        leased: LeasedLedger,
        outcome: Outcome,
        *,
        tries: int,
        wait_s: float | None,
        grace_until_ms: int = 0,
    ) -> bool:
        """Tell everybody why the ledger waits. ``wait_s``: for how long; None: for no time."""
        before, reason, now_ms = leased.note, outcome.reason, self._clock.wall_ms()
        assert reason is not None, outcome
        # That the journal failed again is told: whoever waits for the ledger learns that it was
        # tried.
        is_told_anew = before is not None and before.reason is reason is Reason.JOURNAL
        if reason.is_of_this_node and before is not None and not is_told_anew:
            before = replace(before, suspects=before.suspects | outcome.suspects)
            if before == leased.note:  # what stands there holds for all nodes
                return True
            leased.note = before
            return await self._told(self._notes.write(before, is_likely_there=True))
        since_ms = before.since_ms if before is not None and before.reason is reason else now_ms
        detail = self._detail(leased, outcome)
        if before is None or (before.reason, before.detail) != (reason, detail):
            # Of its own trouble the journal tells once, not for each ledger.
            tell = log.debug if reason is Reason.JOURNAL else log.warning
            tell("ledger.put_aside", ledger_id=leased.ledger_id, reason=reason.value, detail=detail)
        leased.note = WaitingNote(
            ledger_id=leased.ledger_id,
            reason=reason,
            detail=detail,
            node=self._node,
            since_ms=since_ms,
            tries=tries,
            next_try_ms=0 if wait_s is None else now_ms + int(wait_s * 1000),
            grace_until_ms=grace_until_ms,
            fingerprint=leased.fingerprint,
            suspects=outcome.suspects,
        )
        return await self._told(self._notes.write(leased.note, is_likely_there=before is not None))

    async def _told(self, writing: Awaitable[None]) -> bool:
        """What others are told keeps no ledger from its repair where it cannot be written: that is
        said once."""
        try:
            await writing
        except (UnavailableError, LockLostError, RejectedError) as error:
            if not self._is_untold:
                log.warning("notes.unwritable", error=str(error))
            self._is_untold = True
        else:
            self._is_untold = False
        return not self._is_untold

    def _detail(self, leased: LeasedLedger, outcome: Outcome) -> str:
        if outcome.reason is not Reason.NO_COPY:
            return outcome.detail
        told = whereabouts(leased.lease.queued.replicas, self._view)
        return f"{outcome.detail}; {told}" if told else outcome.detail


def _is_told_on(before: WaitingNote, fingerprint: ClusterFingerprint) -> bool:
    """Whether a note says more than that the ledger's next grace has begun."""
    if before.fingerprint is None or not before.reason.is_of_recovery:
        return False
    return not fingerprint.warrants_retry(before.fingerprint, before.reason)
