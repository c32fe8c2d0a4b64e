"""``WaitingList``: decides which ledgers a worker tries again, and when, and tells all nodes.

A worker defers a ledger whose repair is blocked. It remembers until when it leaves the ledger alone
(``Deferral``), and writes a note for all nodes (``ledger_record.WaitingNote``). A node follows the
notes of others twice: as a hint before it locks a ledger, so that it does not lock a long queue in
vain, and under the lock, where the note cannot change.

The first and the longest wait depend on the reason's ``Trait``: an unresponsive bookie may answer
in a moment, damaged metadata stays damaged. Each failure for the same reason doubles the wait. A
success, another reason, or a change in the cluster that warrants a retry starts from the first
wait.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import structlog
from msgspec.structs import replace as replace_struct

from ledgers.clock import Clock
from ledgers.errors import LockLostError, RejectedError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.tasks import until_answered
from replication.cluster import ClusterView, ViewSource
from replication.ledger_record import ClusterFingerprint, UnprovenEnd, WaitingNote, still_open
from replication.orders import TriesOrder
from replication.reasons import Blocked, Facts, Reason, Trait, named, traits
from replication.repair import Outcome
from replication.settings import ReplicationSettings
from replication.slots import Slots
from replication.work_queue import LedgerLease, Queue, QueuedLedger

LATE, SOON = (6.0, 12.0), (0.2, 0.2)
"""The first and the longest wait, as multiples of the settings, of ``Trait.RETRIED_LATE`` and
``Trait.RETRIED_SOON``."""
JITTER = 0.2
"""Spreads the retries of ledgers that failed together."""
TRIES_COUNTED_MAX = 30
"""More doublings exceed any bound."""
REMEMBERED_S = 3_600.0
"""Time that a deferral is remembered after its retry was due, to count the tries."""
PRUNE_INTERVAL_S = 60.0
LOST_RACE_PAUSE_S = 0.5
"""Pause for a ledger that another worker leased first."""
GONE_PAUSE_S = 60.0
"""Pause for a ledger that the leader lists as urgent, but that is not marked."""
PROBE_INTERVAL_S = 30.0
"""Interval at which one ledger is tried while the journal cannot be written. Nothing else shows
that the disk has space again, and each try may copy in vain."""
REWRITE_INTERVAL_MAX_S = 60.0
"""Longest interval between two attempts to write a note that must exist before the ledger is
unlocked."""
NOTES_TIDIED_MAX = 1_000
"""Notes whose marks are checked at once."""

log = structlog.get_logger()


def retry_wait_s(
    settings: ReplicationSettings, reason: Reason | None, *, tries: int, rng: random.Random
) -> float:
    """Return the wait after ``tries`` failures for this reason. None: an unexpected error."""
    assert tries >= 1, tries
    first, longest = 1.0, 1.0
    if Trait.RETRIED_LATE in traits(reason):
        first, longest = LATE
    elif Trait.RETRIED_SOON in traits(reason):
        first, longest = SOON
    doubled_s = settings.retry_min_s * first * 2.0 ** (min(tries, TRIES_COUNTED_MAX) - 1)
    return min(doubled_s, settings.retry_max_s * longest) * rng.uniform(1 - JITTER, 1 + JITTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferral:
    """Until when this node leaves a ledger alone, in monotonic seconds, and why.

    ``fingerprint``: the cluster when the try began. ``reason``: None after an unexpected error.
    ``is_loss``: the ledger was known to have lost copies.
    """

    due_s: float
    fingerprint: ClusterFingerprint
    reason: Reason | None = None
    tries: int = 1
    is_loss: bool = True

    def is_due(
        self, *, now_s: float, fingerprint: ClusterFingerprint, is_loss: bool = True
    ) -> bool:
        """Return True if the ledger may be tried. ``is_loss``: it has lost copies now. A ledger
        that was deferred while being moved is due once it lost copies."""
        return (
            self.due_s <= now_s
            or (is_loss and not self.is_loss)
            or fingerprint.warrants_retry(self.fingerprint, self.reason)
        )

    def tries_for(self, reason: Reason | None, *, fingerprint: ClusterFingerprint) -> int:
        """Return how often it failed in a row for this reason without a change that helps."""
        is_same = self.reason is reason and not fingerprint.warrants_retry(self.fingerprint, reason)
        return self.tries if is_same else 0


@dataclass(eq=False, kw_only=True)
class WaitingList:
    """The ledgers that a worker leaves alone for now. All other marked ledgers are due.
    ``settings``: may be changed at any time. ``node``: the name of this node in its notes."""

    queue: Queue
    manager: LedgerManager
    views: ViewSource
    settings: ReplicationSettings
    node: str
    clock: Clock
    rng: random.Random

    def __post_init__(self) -> None:
        self._deferrals: dict[int, Deferral] = {}
        self._prune_due_s = 0.0
        self._probe_due_s = math.inf
        """Infinite while no ledger waits for the journal."""
        self._seen: tuple[ClusterView, ClusterFingerprint] | None = None
        """The last fingerprint, with its view."""
        self._heeded = TriesOrder()
        """The orders to retry that were followed already."""
        self._has_notes = True
        """False if there was no note at all when the marks were last read. This saves a request for
        each ledger while nothing is blocked."""
        self._is_untold = False
        """True while notes cannot be written."""

    @property
    def fingerprint(self) -> ClusterFingerprint:
        """The fingerprint of the cluster now."""
        view = self.views.current
        if self._seen is None or self._seen[0] is not view:
            self._seen = view, ClusterFingerprint.of(view)
        return self._seen[1]

    # --- Which ledgers are due --------------------------------------------------------------------

    def due(self, ledger_ids: Collection[int], *, losses: Collection[int]) -> list[int]:
        """Return the ledgers that are due, as far as is known. ``losses``: lost copies."""
        now_s, fingerprint = self.clock.now_s(), self.fingerprint
        if now_s >= self._prune_due_s:  # other nodes have repaired ledgers that were due long ago
            self._prune_due_s = now_s + PRUNE_INTERVAL_S
            self._keep(lambda _, deferral: deferral.due_s + REMEMBERED_S > now_s)
        tries = self.views.current.orders.tries
        if tries is not self._heeded:  # an operator ordered to try these ledgers now
            for ledger_id, _ in tries.ordered_ms.items() - self._heeded.ordered_ms.items():
                self._deferrals.pop(ledger_id, None)
            self._heeded = tries
        known = self._deferrals
        due = [
            i
            for i in ledger_ids
            if i not in known
            or known[i].is_due(now_s=now_s, fingerprint=fingerprint, is_loss=i in losses)
        ]
        if now_s >= self._probe_due_s:
            others = set(ledger_ids).difference(due)
            waiting = [i for i in others if known[i].reason is Reason.JOURNAL]
            self._probe_due_s = now_s + PROBE_INTERVAL_S if waiting else math.inf
            due += [self.rng.choice(waiting)] if waiting else []
        return due

    def forget_others(self, marked: Set[int]) -> None:
        """Forget ledgers that are not marked. A new mark is a new matter."""
        self._keep(lambda ledger_id, _: ledger_id in marked)

    def _keep(self, is_kept: Callable[[int, Deferral], bool]) -> None:
        self._deferrals = {i: each for i, each in self._deferrals.items() if is_kept(i, each)}

    async def without_waiting(self, found: Sequence[QueuedLedger]) -> list[QueuedLedger]:
        """Return the ledgers whose notes, as they are now, do not say to wait. This is a hint,
        which saves the locks of many ledgers. ``begin`` decides."""
        if not found:
            return []
        notes = self.queue.notes
        self._has_notes = await notes.are_any()  # after the marks, see ``Queue.unlock_with_note``
        if not self._has_notes:
            return list(found)
        read = {note.ledger_id: note for note in await notes.read_all([q.ledger_id for q in found])}
        return [q for q in found if not self._must_wait(q, read.get(q.ledger_id))]

    async def begin(self, lease: LedgerLease) -> bool:
        """Read the note of a ledger that was just locked. Returns False if the ledger must wait.

        The note of an earlier mark blocks nothing, and readers must not take it for the result of
        this try, so it is deleted. Raises UnavailableError.
        """
        lease.fingerprint = self.fingerprint
        if self._has_notes:
            await self.queue.read_note(lease)
        note = lease.note
        if note is None:
            return True
        if self._must_wait(lease.queued, note):
            return False
        lease.suspects.update(note.suspects)
        if note.is_older_than(lease.queued.czxid):
            lease.note = note.let_go()
            guards = self.queue.guards(lease)
            if await self._try_to_tell(self.queue.notes.let_go(lease.ledger_id, guards=guards)):
                await self.queue.read_note(lease)
        return True

    def _must_wait(self, queued: QueuedLedger, note: WaitingNote | None) -> bool:
        """Return True if the next try is not due yet, and remember that, to read the note once."""
        if note is None or note.fingerprint is None or note.is_older_than(queued.czxid):
            return False
        wait_ms = note.wait_ms(now_ms=self.clock.wall_ms(), fingerprint=self.fingerprint)
        if wait_ms:
            self._deferrals[queued.ledger_id] = Deferral(
                due_s=self.clock.now_s() + wait_ms / 1000,
                fingerprint=note.fingerprint,
                reason=note.reason,
                tries=note.tries,
                is_loss=queued.is_loss,
            )
        return wait_ms > 0

    # --- The end of a try -------------------------------------------------------------------------

    def complete(self, ledger_id: int) -> None:
        """Forget a repaired ledger. If it waited for the journal, the journal works again, so all
        others that wait for it are due."""
        deferral = self._deferrals.pop(ledger_id, None)
        if deferral is not None and deferral.reason is Reason.JOURNAL:
            self._keep(lambda _, each: each.reason is not Reason.JOURNAL)

    def defer(self, lease: LedgerLease, outcome: Outcome) -> WaitingNote | None:
        """Leave the ledger alone on this node, and return the note for all nodes; None if the note
        in ZooKeeper says enough."""
        blocked, ledger_id = outcome.blocked, lease.ledger_id
        assert blocked is not None, outcome
        assert lease.fingerprint is not None, lease
        reason, now = blocked.reason, lease.fingerprint
        before = self._deferrals.get(ledger_id)
        noted = 0 if lease.note is None else lease.note.tries_for(reason, fingerprint=now)
        own = 0 if before is None else before.tries_for(reason, fingerprint=now)
        tries = 1 + max(noted, own)
        if blocked.until_ms is None:  # time may help one of several parts of the ledger
            wait_s = min(
                retry_wait_s(self.settings, each, tries=tries, rng=self.rng)
                for each in dict.fromkeys(blocked.all_reasons)
            )
        else:
            left_s = max(0, blocked.until_ms - self.clock.wall_ms()) / 1000
            wait_s = left_s + self.rng.uniform(0, self.settings.retry_min_s)
        self._deferrals[ledger_id] = Deferral(
            due_s=self.clock.now_s() + wait_s,
            fingerprint=now,
            reason=reason,
            tries=tries,
            is_loss=lease.queued.is_loss,
        )
        if reason is Reason.JOURNAL:
            self._probe_due_s = self.clock.now_s() + PROBE_INTERVAL_S
        log.debug(
            "ledger.retry_scheduled", ledger_id=ledger_id, wait_s=round(wait_s, 1), tries=tries
        )
        return self._note(lease, blocked, tries=tries, wait_s=wait_s)

    async def unlock(self, lease: LedgerLease, note: WaitingNote | None, slots: Slots) -> None:
        """Unlock a ledger that is not repaired, and write its note in the same transaction.

        A note that cannot be written keeps no ledger locked, unless it names new suspects: another
        worker would check only the first and the last entry of their copies, find the ledger whole
        and delete the mark (rule S6).
        """
        if not lease.new_suspects:
            if note is None or not await self._try_to_tell(
                self.queue.unlock_with_note(lease, note)
            ):
                await self.queue.release(lease)
            return
        # Without a note, the try was interrupted, or the mark has changed.
        note = note or lease.note
        if note is None:
            suspected = Facts(lacking=named(lease.suspects))
            note = WaitingNote(
                ledger_id=lease.ledger_id,
                blocked=Blocked(reason=Reason.LEFT_TO_OTHERS, facts=suspected),
                node=self.node,
                since_ms=self.clock.wall_ms(),
            )
        note = replace(note, suspects=note.suspects | lease.suspects)
        with suppress(LockLostError):  # or an earlier attempt, whose reply was lost, succeeded
            async with slots.lent():
                await until_answered(
                    partial(self.queue.unlock_with_note, lease, note),
                    event="suspects.write_failed",
                    clock=self.clock,
                    errors=(UnavailableError, RejectedError),
                    retry_max_s=REWRITE_INTERVAL_MAX_S,
                    ledger_id=lease.ledger_id,
                )

    async def record_grace(self, lease: LedgerLease, outcome: Outcome) -> None:
        """Write that the ledger waits for its grace under our lock. If this node dies, other nodes
        need not wait.

        If the last recovery failed, the note keeps that reason, unless a change warrants a retry.
        """
        assert outcome.blocked is not None, outcome
        assert lease.fingerprint is not None, lease
        until_ms = self.clock.wall_ms() + int(self.settings.open_ledger_grace_s * 1000)
        before, note = lease.note, None
        if (
            before is not None
            and Trait.OF_RECOVERY in traits(before.reason)
            and before.fingerprint is not None
            and not lease.fingerprint.warrants_retry(before.fingerprint, before.reason)
        ):
            suspects = before.suspects.union(lease.suspects)
            note = replace(before, next_try_ms=0, grace_until_ms=until_ms, suspects=suspects)
        else:
            note = self._note(lease, outcome.blocked, grace_until_ms=until_ms)
        if note is not None and not await self._try_to_tell(self.queue.write_note(lease, note)):
            lease.note = note  # for the count of tries; its version is found out when it is written

    def back_off_after_error(
        self, queued: QueuedLedger, then: ClusterFingerprint | None = None
    ) -> None:
        """Defer the ledger on this node. ``then``: the cluster when the failed try began."""
        fingerprint, before = then or self.fingerprint, self._deferrals.get(queued.ledger_id)
        tries = 1 + (0 if before is None else before.tries_for(None, fingerprint=fingerprint))
        wait_s = retry_wait_s(self.settings, None, tries=tries, rng=self.rng)
        self._deferrals[queued.ledger_id] = Deferral(
            due_s=self.clock.now_s() + wait_s,
            fingerprint=fingerprint,
            tries=tries,
            is_loss=queued.is_loss,
        )

    def pause(self, ledger_id: int, pause_s: float) -> None:
        """Leave the ledger alone for a moment: it was lost to another worker, or is not marked."""
        self._deferrals[ledger_id] = Deferral(
            due_s=self.clock.now_s() + pause_s, fingerprint=self.fingerprint, tries=0
        )

    async def tidy(self) -> None:
        """Delete the notes of ledgers that are not marked. If there are many notes, look at some of
        them at random.

        A note that says why the ledger's end is not proven stays until the ledger is closed.
        """

        async def tidy_one(ledger_id: int) -> None:
            # The note is read first, because a note that is written later belongs to a new mark.
            stored = await self.queue.notes.read_stored(ledger_id)
            if stored.stat is None or await self.queue.is_marked(ledger_id):
                return
            is_unproven = stored.value is not None and stored.value.unproven is not None
            if not (is_unproven and await still_open(self.manager, [ledger_id])):
                version = stored.stat.version
                await self._try_to_tell(self.queue.delete_note(ledger_id, version=version))

        noted = sorted(await self.queue.notes.ledger_ids())
        some = self.rng.sample(noted, min(len(noted), NOTES_TIDIED_MAX))
        await asyncio.gather(*map(tidy_one, some))

    # --- Notes ------------------------------------------------------------------------------------

    def _note(
        self,
        lease: LedgerLease,
        blocked: Blocked,
        *,
        tries: int = 1,
        wait_s: float | None = None,
        grace_until_ms: int = 0,
    ) -> WaitingNote | None:
        """Return the note that says why the ledger waits; None if the one in ZooKeeper says enough.
        ``wait_s``: for how long; None: other nodes need not wait."""
        before, reason, now_ms = lease.note, blocked.reason, self.clock.wall_ms()
        # An existing note holds for all nodes, and this reason only here. But a journal that failed
        # again is written: who waits for the ledger learns that it was tried.
        is_repeated = before is not None and before.reason is reason is Reason.JOURNAL
        if before and not before.is_released and reason.is_of_this_node and not is_repeated:
            return None
        was = None if before is None else replace_struct(before.blocked, until_ms=None)
        if was != replace_struct(blocked, until_ms=None):
            # The journal logs its own failure once, so it is not a warning for each ledger.
            write = log.debug if reason is Reason.JOURNAL else log.warning
            record = blocked.to_record()
            write(
                "ledger.deferred",
                ledger_id=lease.ledger_id,
                reason=record["reason"],
                facts=record.get("facts", {}),
                besides=record.get("besides", []),
            )
        unproven = None if before is None else before.unproven
        if reason is Reason.END_UNPROVEN:
            unproven = UnprovenEnd(ledger_id=lease.ledger_id, facts=blocked.facts, tried_ms=now_ms)
        return WaitingNote(
            ledger_id=lease.ledger_id,
            blocked=blocked,
            node=self.node,
            since_ms=before.since_ms if before is not None and before.reason is reason else now_ms,
            tries=tries,
            next_try_ms=0 if wait_s is None else now_ms + int(wait_s * 1000),
            grace_until_ms=grace_until_ms,
            fingerprint=lease.fingerprint,
            suspects=frozenset(lease.suspects),
            unproven=unproven,
        )

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
