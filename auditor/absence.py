"""When an absent bookie counts as lost: after the recovery delay, counted for each bookie by
itself.

While a maintenance window stands, its bookie is away on purpose, which is no absence. So the delay
counts from the end of the window or from the bookie's going, whichever is later: an operator who
ends a window by hand, or who forgot a bookie in it, has the same time to act as after any other
loss.

Who is found away after an outage of our own connection has time to return first (``outages``).

A leader goes on counting where the one before it was (``records``), unless nobody looked for a
while: then the bookie may have come back and gone again unseen, and counting begins anew.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from auditor.outages import Outage
from ledgers.metadata import BookieId

NO_OUTAGE = Outage()
NAMING_MAX_MS = 120_000
"""Counts that are older are of an earlier leader: whoever leads writes them twice in that time
(``noting``)."""
UNSEEN_MAX_MS = 600_000
"""So long nobody may have looked, between two leaders, for an absence to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copyless:
    """Ledgers that have entries whose every copy is on bookies that are away.

    ``first``: some of their ids, the least. ``enough_for``: of each of these bookies that one of
    them names, how many of them have a copy of each entry again once it alone is back.
    """

    count: int
    first: tuple[int, ...] = ()
    enough_for: Mapping[BookieId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAbsences:
    """What a leader left behind. Times are wall-clock milliseconds; ``seen_ms``: when it last
    looked.

    ``naming``: how many ledgers name each of them, and each that is away on purpose, for people;
    empty when an earlier release wrote it. ``are_all_named``: whether every ledger was counted.
    ``copyless``: the ledgers with entries whose every copy is on these; None where they were not
    counted.
    """

    since_ms: Mapping[BookieId, int] = field(default_factory=dict)
    seen_ms: int = 0
    naming: Mapping[BookieId, int] = field(default_factory=dict)
    are_all_named: bool = False
    copyless: Copyless | None = None
    excused_ms: Mapping[BookieId, int] = field(default_factory=dict)
    """Until when those are not lost that may return by themselves after an outage (``outages``)."""

    def named(self, *, now_ms: int) -> frozenset[BookieId]:
        """Those that some ledger names; none where that was noted too long ago."""
        if not self.is_fresh(now_ms=now_ms):
            return frozenset()
        return frozenset(bookie for bookie, count in self.naming.items() if count)

    def named_count(self, bookie: BookieId, *, now_ms: int) -> int | None:
        """How many ledgers name it; None where not all were counted lately."""
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
        """Since when each is away, in monotonic seconds of this process.

        Of two hosts' clocks one may be behind: what begins in the future begins now.
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
    """Since when each known bookie is away: those that came back are dropped, new ones begin now.

    ``excused``: bookies under maintenance, which are not away.
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
    """Bookies absent for at least the recovery delay, or since ``overruled_s`` or before.

    Times are monotonic seconds. ``overruled_s``: when somebody last asked not to wait any longer.
    ``outage``: the last one of our own connection.
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
    """Those whose loss the outage holds back, whatever the recovery delay, until when. Times as
    above."""
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
    """Seconds until the next absent bookie counts as lost; None when there is none to wait for."""
    losses_s = [_lost_at_s(since_s, delay_s, outage) for since_s in absent_since_s.values()]
    return min((lost_s - now_s for lost_s in losses_s if now_s < lost_s), default=None)


def _lost_at_s(since_s: float, delay_s: float, outage: Outage) -> float:
    return max(since_s + delay_s, outage.excuses_until_s(since_s))
