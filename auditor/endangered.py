"""Which ledgers a loss touches, and which of them are to be marked first: values, no I/O.

Most endangered first: fewest good copies left of any entry, then the oldest loss, then most bytes.
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from auditor.index.ledger_index import IndexedLedger
from ledgers.metadata import BookieId
from ledgers.registration import UNTOLD_CZXID
from ledgers.store import Stat
from replication.queue.urgent import URGENT_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Endangered:
    """A ledger that names lost bookies. ``lost`` ascends; ``copies_left`` of its worst entry."""

    ledger_id: int
    lost: tuple[BookieId, ...]
    copies_left: int
    length: int
    """Payload bytes; 0 while the ledger is not closed."""


def endangered(ledger: IndexedLedger, lost: Collection[BookieId]) -> Endangered | None:
    """What the loss means for one ledger; None when no segment names a lost bookie."""
    named = ledger.bookies.intersection(lost)
    if not named:
        return None
    return Endangered(
        ledger_id=ledger.ledger_id,
        lost=tuple(sorted(named)),
        copies_left=min(
            _copies_left(ensemble, ledger.write_quorum, named) for ensemble in ledger.ensembles
        ),
        length=ledger.length,
    )


def _copies_left(
    ensemble: Sequence[BookieId], write_quorum: int, lost: Collection[BookieId]
) -> int:
    """Bookies left of the worst write set: any ``write_quorum`` consecutive indexes, cyclically."""
    is_left = [bookie not in lost for bookie in ensemble]
    ensemble_size, left_count = len(is_left), sum(is_left)
    if write_quorum == ensemble_size:
        return left_count
    if left_count >= ensemble_size - 1:  # nearly always: one is lost, which some write set has
        return write_quorum - (ensemble_size - left_count)
    return min(
        sum(is_left[(first + offset) % ensemble_size] for offset in range(write_quorum))
        for first in range(ensemble_size)
    )


# --- Bookies whose copies are missing -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebirth:
    """A bookie was set up: its cookie's ``czxid``, and whether it was known under another one
    before."""

    czxid: int
    was_known: bool

    def is_after(self, ledger: IndexedLedger) -> bool:
        """Whether the bookie, if the ledger names it, may have lost its copies.

        A later write of the metadata proves nothing of one that was known: a writer may have
        changed another ensemble since. One that is new to us is more likely to have come in by such
        a write.
        """
        return self.czxid > (ledger.czxid if self.was_known else ledger.mzxid)


def reborn_bookies(
    cookies: Mapping[BookieId, Stat],
    identities: Mapping[BookieId, int],
    *,
    first_seen: Mapping[BookieId, int] | None = None,
    trusted: Mapping[BookieId, int] = MappingProxyType({}),
) -> dict[BookieId, Rebirth]:
    """Bookies that were set up since their ledgers were looked at. ``identities``: the cookies'
    czxids then; ``first_seen``: those of any time before, also while nobody was to look.
    ``trusted``: cookies' czxids that an operator's order calls old (``IdentitiesOrder``).

    One that comes back under its old id may have lost everything (its disk was replaced): its
    return withdraws no mark, and where there is none, calls for one (rule S6). Of one whose cookie
    ACLs shut away nobody can tell.
    """
    former = {**(first_seen or {}), **identities}
    return {
        bookie: Rebirth(
            czxid=stat.czxid,
            was_known=former.get(bookie, stat.czxid) != stat.czxid,
        )
        for bookie, stat in cookies.items()
        if stat.czxid not in (identities.get(bookie), trusted.get(bookie), UNTOLD_CZXID)
    }


LossCause = tuple[BookieId, int, float]
"""A bookie, and its new cookie's czxid (0: it is away) or since when it is away, monotonic
seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Bookies whose copies are missing, in whole or, where one was set up anew, of older
    ledgers."""

    lost_since_s: Mapping[BookieId, float] = field(default_factory=dict)
    """Monotonic seconds."""
    reborn: Mapping[BookieId, Rebirth] = field(default_factory=dict)

    @property
    def bookies(self) -> frozenset[BookieId]:
        return frozenset((*self.lost_since_s, *self.reborn))

    @property
    def causes(self) -> frozenset[LossCause]:
        """One for each loss: who goes again, or is wiped again, is lost anew."""
        lost = ((bookie, 0, since_s) for bookie, since_s in self.lost_since_s.items())
        return frozenset((*lost, *((b, birth.czxid, 0.0) for b, birth in self.reborn.items())))

    def danger(self, ledger: IndexedLedger) -> Endangered | None:
        """What they mean for one ledger; None when it misses none of its copies."""
        if not self.reborn:
            return endangered(ledger, self.lost_since_s.keys())
        missing = [bookie for bookie in ledger.bookies if self._is_missing(bookie, ledger)]
        return endangered(ledger, missing)

    def _is_missing(self, bookie: BookieId, ledger: IndexedLedger) -> bool:
        if bookie in self.lost_since_s:
            return True
        birth = self.reborn.get(bookie)
        return birth is not None and birth.is_after(ledger)


# --- In order ------------------------------------------------------------------------------------------


def most_endangered_first(
    found: Collection[Endangered], absent_since_s: Mapping[BookieId, float]
) -> list[Endangered]:
    """In the order in which they are to be marked.

    ``absent_since_s`` holds every bookie that is away; one that is not came back, perhaps empty.
    """
    return sorted(found, key=lambda ledger: _urgency(ledger, absent_since_s))


class DangerQueue:
    """The most endangered of what was added so far comes first; a heap, as more is added
    meanwhile."""

    def __init__(self, absent_since_s: Mapping[BookieId, float]) -> None:
        self._absent_since_s = absent_since_s
        self._heap: list[tuple[tuple[int, float, int], int, Endangered]] = []
        self._first: dict[int, list[int]] = {}
        """By copies left, the first ``URGENT_MAX`` ids that were taken out."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, ledger: Endangered) -> None:
        urgency = _urgency(ledger, self._absent_since_s)
        heapq.heappush(self._heap, (urgency, ledger.ledger_id, ledger))

    def take(self) -> Endangered:
        ledger = heapq.heappop(self._heap)[2]
        first = self._first.setdefault(ledger.copies_left, [])
        if len(first) < URGENT_MAX:
            first.append(ledger.ledger_id)
        return ledger

    @property
    def urgent(self) -> list[int]:
        """Of those taken out, the ones that all workers should take before any other.

        With one copy left, or none, or with fewer than the rest has; at most ``URGENT_MAX``.
        """
        safest = max(self._first, default=0)
        chosen = [left for left in sorted(self._first) if left <= 1 or left < safest]
        return [ledger_id for left in chosen for ledger_id in self._first[left]][:URGENT_MAX]


def _urgency(
    ledger: Endangered, absent_since_s: Mapping[BookieId, float]
) -> tuple[int, float, int]:
    oldest_s = min(absent_since_s.get(bookie, math.inf) for bookie in ledger.lost)
    return ledger.copies_left, oldest_s, -ledger.length
