"""Decides when an absent bookie counts as lost: when its recovery delay is over.

During a maintenance window a bookie is absent on purpose, which does not count. The delay is
counted from the end of the window, or from the bookie's departure if that is later. So an operator
who ends a window early, or forgot a bookie in it, has the same time to act as after any other loss.

A bookie that is found absent after an outage of our own connection first gets time to return
(``outages``).

A new leader continues the count of the leader before it (``records``). If no leader looked for a
while, the bookie may have returned and gone again unseen, so the count starts over.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from auditor.outages import Outage
from ledgers.metadata import BookieId

NO_OUTAGE = Outage()
NAMING_MAX_MS = 120_000
"""Maximum age of the counts. Older ones are from an earlier leader: a leader writes them twice in
this time (``noting``)."""
UNSEEN_MAX_MS = 600_000
"""Longest time without a leader's look after which a new leader still continues the absences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copyless:
    """Ledgers with entries whose every copy is on absent bookies.

    ``first``: the lowest of their ids. ``enough_for``: for each absent bookie that one of them
    names, the number of these ledgers that have a copy of each entry again when this bookie alone
    returns.
    """

    count: int
    first: tuple[int, ...] = ()
    enough_for: Mapping[BookieId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAbsences:
    """Absences as a leader recorded them. Times are wall-clock milliseconds; ``seen_ms``: when the
    leader last looked.

    ``naming``: by bookie absent for any reason, the number of ledgers that name it, for people;
    empty if an earlier release wrote the record. ``are_all_named``: True if every ledger was
    counted. ``copyless``: the ledgers with entries whose every copy is on these bookies; None if
    they were not counted.
    """

    since_ms: Mapping[BookieId, int] = field(default_factory=dict)
    seen_ms: int = 0
    naming: Mapping[BookieId, int] = field(default_factory=dict)
    are_all_named: bool = False
    copyless: Copyless | None = None
    excused_ms: Mapping[BookieId, int] = field(default_factory=dict)
    """By bookie, until when it does not count as lost because it may return by itself after an
    outage (``outages``)."""

    def named(self, *, now_ms: int) -> frozenset[BookieId]:
        """Return the absent bookies that ledgers name; none if the counts are too old."""
        if not self.is_fresh(now_ms=now_ms):
            return frozenset()
        return frozenset(bookie for bookie, count in self.naming.items() if count)

    def named_count(self, bookie: BookieId, *, now_ms: int) -> int | None:
        """Return how many ledgers name the bookie; None if not all ledgers were counted
        recently."""
        is_known = self.are_all_named and self.is_fresh(now_ms=now_ms)
        return self.naming.get(bookie) if is_known else None

    def is_fresh(self, *, now_ms: int) -> bool:
        return now_ms - self.seen_ms <= NAMING_MAX_MS

    @classmethod
    def of(
        cls,
        absent_since_s: Mapping[BookieId, float],
        *,
        now_s: float,
        wall_ms: int,
        naming: Mapping[BookieId, int] | None = None,
        are_all_named: bool = False,
        copyless: Copyless | None = None,
        excused_until_s: Mapping[BookieId, float] | None = None,
    ) -> "StoredAbsences":
        def wall(at_s: float) -> int:
            return max(0, wall_ms + round((at_s - now_s) * 1000))

        return cls(
            since_ms={bookie: wall(since_s) for bookie, since_s in absent_since_s.items()},
            seen_ms=wall_ms,
            naming=naming or {},
            are_all_named=are_all_named,
            copyless=copyless,
            excused_ms={b: wall(until_s) for b, until_s in (excused_until_s or {}).items()},
        )

    def resumed(self, *, now_s: float, wall_ms: int) -> dict[BookieId, float]:
        """Return since when each bookie is absent, in monotonic seconds of this process.

        The clocks of two hosts may differ: an absence that begins in the future begins now.
        """
        if wall_ms - self.seen_ms > UNSEEN_MAX_MS:
            return {}
        return {
            bookie: now_s - max(0, wall_ms - since_ms) / 1000
            for bookie, since_ms in self.since_ms.items()
        }


def still_absent(
    absent_since_s: Mapping[BookieId, float],
    *,
    known: Collection[BookieId],
    available: Collection[BookieId],
    excused: Collection[BookieId] = (),
    now_s: float,
) -> dict[BookieId, float]:
    """Return since when each known bookie is absent. Newly absent bookies start at ``now_s``.

    ``excused``: bookies under maintenance, which do not count as absent.
    """
    return {
        bookie: absent_since_s.get(bookie, now_s)
        for bookie in known
        if bookie not in available and bookie not in excused
    }


def lost_bookies(
    absent_since_s: Mapping[BookieId, float],
    *,
    now_s: float,
    delay_s: float,
    overruled_s: float = -math.inf,
    outage: Outage = NO_OUTAGE,
) -> frozenset[BookieId]:
    """Return the bookies that are absent for at least the recovery delay, or since ``overruled_s``
    or before.

    Times are monotonic seconds. ``overruled_s``: when an operator last asked not to wait any
    longer. ``outage``: the last outage of our own connection.
    """
    assert delay_s >= 0
    return frozenset(
        bookie
        for bookie, since_s in absent_since_s.items()
        if now_s >= _lost_at_s(since_s, delay_s, outage) or since_s <= overruled_s
    )


def excused_until_s(
    absent_since_s: Mapping[BookieId, float],
    *,
    overruled_s: float = -math.inf,
    outage: Outage = NO_OUTAGE,
) -> dict[BookieId, float]:
    """Return, by bookie, until when the outage keeps it from counting as lost, whatever the
    recovery delay. Arguments as for ``lost_bookies``."""
    return {
        bookie: outage.excuses_until_s(since_s)
        for bookie, since_s in absent_since_s.items()
        if since_s > overruled_s and outage.excuses_until_s(since_s) > -math.inf
    }


def next_loss_s(
    absent_since_s: Mapping[BookieId, float],
    *,
    now_s: float,
    delay_s: float,
    outage: Outage = NO_OUTAGE,
) -> float | None:
    """Return the seconds until the next absent bookie counts as lost; None if none will."""
    losses_s = [_lost_at_s(since_s, delay_s, outage) for since_s in absent_since_s.values()]
    return min((lost_s - now_s for lost_s in losses_s if now_s < lost_s), default=None)


def _lost_at_s(since_s: float, delay_s: float, outage: Outage) -> float:
    return max(since_s + delay_s, outage.excuses_until_s(since_s))
