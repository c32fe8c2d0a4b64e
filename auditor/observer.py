"""Observe mode: what our leader would do now, and how that differs from the existing marks.

The observer uses the leader's own code and writes nothing. One observation has three steps:

1. ``LossTracker`` decides which bookies are lost or reformatted.
2. ``SafetyHolds`` keeps the safety hold in memory that the leader would write as an order.
3. ``find_underreplicated`` finds the ledgers that the leader would mark.

The records that a leader would write of its marks do not exist. So each observation shows what a
leader would do that begins now, with all that the observer has seen of the bookies. Beside Java
alone there are no records of an earlier leader, so absences count from the observer's start.
"""

import asyncio
import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from auditor.absence import LossTracker
from auditor.mark_reasons import PrivateQueue, read_private_queue
from auditor.underreplication import (
    BookieLosses,
    UnderreplicatedLedger,
    fewest_copies_first,
    find_underreplicated,
    lost_bytes,
)
from ledgers.model import BookieId
from replication.marks import marked_ledger_ids, read_marks
from replication.orders import HoldOrder


class BookieCondition(enum.Enum):
    """Shown by commands: never change a value."""

    LOST = "lost"
    ABSENT = "absent"
    """Absent for less than the recovery delay."""
    REFORMATTED = "reformatted"
    """Registered, but reformatted after ledgers were placed on it, so it may have lost them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AffectedBookie:
    """A bookie whose copies count as missing now, or, if it is ``ABSENT``, when its recovery delay
    ends. Commands show these fields.

    ``left_s``: rest of that delay; otherwise 0. ``ledgers``: number of ledgers that lack copies
    because of this bookie, now or then.
    """

    bookie: BookieId
    state: BookieCondition
    left_s: int = 0
    ledgers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference between the marks that we would make and those in the shared queue. Ids ascend in
    ``surplus``.

    ``unmarked``: ledgers that we would mark and that have no mark, most urgent first.
    ``partly_marked``: ledgers whose marks lack a lost replica, in the same order. ``surplus``:
    marks that we would not make; a worker may be about to delete them.
    """

    agreed_count: int
    unmarked: tuple[int, ...]
    partly_marked: tuple[int, ...]
    surplus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The state at one moment. ``underreplicated``: ledgers that lack copies, most urgent first."""

    seen_ms: int
    """Wall clock."""
    is_ledger_map_complete: bool
    ledger_count: int
    unreadable: tuple[int, ...]
    """Ledgers whose metadata cannot be read, ascending."""
    writable_count: int
    read_only_count: int
    recovery_delay_s: int
    affected: tuple[AffectedBookie, ...]
    """Bookies with most ledgers first."""
    underreplicated: Sequence[UnderreplicatedLedger]
    lost_bytes: int
    """Approximate size of the lost copies."""
    marked_count: int
    """Marks in the shared queue, made by any leader."""
    difference: Difference
    private: PrivateQueue = field(default_factory=PrivateQueue)
    """Marks that Java's workers do not see. None of the counts above includes them."""
    is_disabled: bool
    hold: HoldOrder | None
    """The safety hold in force, or the one that we would begin; None if there is neither."""
    is_hold_ordered: bool
    """False if we would only begin the hold."""

    @property
    def is_kept_from_marking(self) -> bool:
        """True if nothing would be marked now, even if ledgers are under-replicated."""
        return self.is_disabled or self.hold is not None

    @property
    def queued_count(self) -> int:
        """Number of ledgers marked in either queue."""
        return self.marked_count + len(self.private)

    @property
    def would_mark(self) -> Sequence[UnderreplicatedLedger]:
        return () if self.is_kept_from_marking else self.underreplicated

    @property
    def would_repair(self) -> list[int]:
        """The ledgers that workers of ours would repair, in order; none while auto-recovery is
        disabled.

        First what is marked or would be marked for lost copies, then other marks, then our own
        queue, the damaged ledgers first.
        """
        if self.is_disabled:
            return []
        unmarked = frozenset(self.difference.unmarked if self.hold is not None else ())
        at_risk = (
            each.ledger_id for each in self.underreplicated if each.ledger_id not in unmarked
        )
        private = (*self.private.damaged, *self.private.others)
        return list(dict.fromkeys([*at_risk, *self.difference.surplus, *private]))

    @property
    def by_copies_left(self) -> dict[int, int]:
        """Number of under-replicated ledgers by the copies left of their worst entry, ascending."""
        return dict(sorted(Counter(each.copies_left for each in self.underreplicated).items()))


@dataclass
class Observer:
    """Observes during one session. The caller prepares ``tracker``, whose holds write nothing, and
    runs its ``updater``."""

    tracker: LossTracker
    _found: tuple[object, Sequence[UnderreplicatedLedger], int] | None = field(
        default=None, init=False
    )
    """The under-replicated ledgers and ``lost_bytes``, after what they were computed from."""
    _marks: dict[int, Collection[BookieId]] = field(default_factory=dict, init=False)
    """The shared queue as last read: by ledger, the replicas that its mark names."""
    _private: PrivateQueue = field(default_factory=PrivateQueue, init=False)
    """Our private queue as last read."""

    async def run(self) -> None:
        """Follow the recovery delay until cancelled."""
        async with aclosing(self.tracker.delay_changes()) as changes:
            async for _ in changes:
                pass

    async def observe(self) -> Observation:
        """Return what the leader would do now. Raises UnavailableError if something could not be
        read completely."""
        tracker, updater = self.tracker, self.tracker.updater
        store, paths, ledger_map = tracker.store, tracker.paths, updater.ledger_map
        await tracker.read_records()  # a leader of ours may have changed them
        view = await tracker.refresh()
        await tracker.update_hold(view)
        losses, left_s = tracker.losses(view), tracker.delay_left_s()
        underreplicated, weight = await self._underreplicated(losses)
        await self._read_marks(underreplicated)
        self._private = await read_private_queue(
            store, paths, shared=self._marks, known_damaged=self._private.damaged
        )
        return Observation(
            seen_ms=tracker.clock.wall_ms(),
            is_ledger_map_complete=updater.is_complete,
            ledger_count=len(ledger_map),
            unreadable=tuple(sorted(ledger_map.unreadable)),
            writable_count=len(view.writable),
            read_only_count=len(view.available) - len(view.writable),
            recovery_delay_s=tracker.delay.delay_s,
            affected=affected_bookies(
                losses,
                left_s,
                underreplicated=underreplicated,
                naming={bookie: ledger_map.naming_count(bookie) for bookie in left_s},
            ),
            underreplicated=underreplicated,
            lost_bytes=weight,
            marked_count=len(self._marks),
            difference=compare(underreplicated, self._marks),
            private=self._private,
            is_disabled=await store.exists(paths.disable) is not None,
            hold=tracker.hold,
            is_hold_ordered=tracker.hold is not None and view.orders.is_held,
        )

    async def _underreplicated(
        self, losses: BookieLosses
    ) -> tuple[Sequence[UnderreplicatedLedger], int]:
        """Return the under-replicated ledgers, most urgent first, and ``lost_bytes`` of all of
        them, whether or not a hold is in force. They are computed again only after a change."""
        updater, source = self.tracker.updater, (losses, self.tracker.updater.change_count)
        if self._found is None or self._found[0] != source:
            found: list[UnderreplicatedLedger] = []
            weight = 0.0
            for part in find_underreplicated(updater.ledger_map, losses):
                for ledger, each in part:
                    found.append(each)
                    weight += lost_bytes(ledger, each.lost)
                await asyncio.sleep(0)
            underreplicated = tuple(fewest_copies_first(found, losses.lost_since_s))
            self._found = source, underreplicated, round(weight)
        return self._found[1:]

    async def _read_marks(self, underreplicated: Sequence[UnderreplicatedLedger]) -> None:
        """Read all existing marks, except those that already named all we would name: a mark only
        gains replicas.

        If such a mark was deleted, its ledger was repaired and is no longer under-replicated. A
        later mark of it is then read again.
        """
        store, paths = self.tracker.store, self.tracker.paths
        listed = await marked_ledger_ids(store, paths)
        agreed = {
            each.ledger_id
            for each in underreplicated
            if set(each.lost) <= set(self._marks.get(each.ledger_id, ()))
        }
        marks = {i: self._marks[i] for i in listed if i in agreed}
        rest = [i for i in listed if i not in agreed]
        for marked in await read_marks(store, paths, rest):
            marks[marked.ledger_id] = () if marked.mark is None else marked.mark.replicas
        self._marks = marks


def compare(
    underreplicated: Sequence[UnderreplicatedLedger], marks: Mapping[int, Collection[BookieId]]
) -> Difference:
    """Return how the marks in the shared queue differ from the marks that we would make. ``marks``:
    by marked ledger, the bookies that its mark names; none if the mark cannot be read."""
    unmarked = tuple(each.ledger_id for each in underreplicated if each.ledger_id not in marks)
    partly_marked = tuple(
        each.ledger_id
        for each in underreplicated
        if each.ledger_id in marks and not set(each.lost) <= set(marks[each.ledger_id])
    )
    surplus = marks.keys() - {each.ledger_id for each in underreplicated}
    return Difference(
        agreed_count=len(underreplicated) - len(unmarked) - len(partly_marked),
        unmarked=unmarked,
        partly_marked=partly_marked,
        surplus=tuple(sorted(surplus)),
    )


def affected_bookies(
    losses: BookieLosses,
    left_s: Mapping[BookieId, float],
    *,
    underreplicated: Sequence[UnderreplicatedLedger],
    naming: Mapping[BookieId, int],
) -> tuple[AffectedBookie, ...]:
    """Return the lost, absent and reformatted bookies, those with most ledgers first.

    ``left_s``: rest of the recovery delay of bookies that are absent and not lost yet; ``naming``:
    number of ledgers that name each of these. A reformatted bookie that endangers no ledger is left
    out, as it is like any other.
    """
    counts = Counter(bookie for each in underreplicated for bookie in each.lost)
    rows = [(bookie, BookieCondition.ABSENT, s, naming[bookie]) for bookie, s in left_s.items()]
    for bookie in losses.bookies:
        is_lost = bookie in losses.lost_since_s
        if is_lost or counts[bookie]:
            condition = BookieCondition.LOST if is_lost else BookieCondition.REFORMATTED
            rows.append((bookie, condition, 0.0, counts[bookie]))
    return tuple(
        AffectedBookie(bookie=bookie, state=condition, left_s=round(s), ledgers=count)
        for bookie, condition, s, count in sorted(rows, key=lambda row: (-row[3], row[0]))
    )
