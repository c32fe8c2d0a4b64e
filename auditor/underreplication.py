"""Decides which ledgers are under-replicated, and in which order they are marked. No I/O.

A bookie's copies count as missing if the bookie is lost. If it was reformatted, its copies of older
ledgers count as missing (``BookieLosses``). A ledger that names such a bookie is under-replicated.

The order is: fewest copies left of the worst entry, then the oldest loss, then most bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import MappingProxyType

from auditor.ledger_map import LedgerMap, MappedLedger
from ledgers.model import BookieId, write_set
from ledgers.registration import HIDDEN_CZXID
from ledgers.store import Stat
from replication.marks import URGENT_MAX

SLICE = 500
"""Ledgers looked up without a pause. That takes a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderreplicatedLedger:
    """A ledger whose copies on ``lost`` bookies are missing. ``lost`` ascends."""

    ledger_id: int
    lost: tuple[BookieId, ...]
    copies_left: int
    """Copies left of the entry with the fewest; the write quorum if no entry lacks a copy."""
    length: int
    """Payload bytes; 0 while the ledger is not closed."""


def underreplicated(
    ledger: MappedLedger, lost: Collection[BookieId]
) -> UnderreplicatedLedger | None:
    """Return what the loss of these bookies means for one ledger; None if no segment names one of
    them."""
    named = ledger.bookies.intersection(lost)
    if not named:
        return None
    return UnderreplicatedLedger(
        ledger_id=ledger.ledger_id,
        lost=tuple(sorted(named)),
        copies_left=copies_left(ledger, named),
        length=ledger.length,
    )


def copies_left(ledger: MappedLedger, lost: Collection[BookieId]) -> int:
    """Return how many bookies are left of the worst write set that has entries.

    The last segment of a ledger that is not closed counts as if it had entries in every write set.
    """
    write_quorum = ledger.write_quorum
    if not ledger.write_sets:  # nearly always: all write sets have entries
        lefts = (_fewest_left(ensemble, write_quorum, lost) for ensemble in ledger.ensembles)
        return min(lefts, default=write_quorum)
    lefts = (
        sum(
            ensemble[index] not in lost
            for index in write_set(start, ensemble_size=len(ensemble), write_quorum=write_quorum)
        )
        for ensemble, (first, count) in zip(ledger.ensembles, ledger.write_sets, strict=True)
        for start in range(first, first + count)
    )
    return min(lefts, default=write_quorum)


def _fewest_left(
    ensemble: Sequence[BookieId], write_quorum: int, lost: Collection[BookieId]
) -> int:
    """Return how many bookies are left of the worst write set of the ensemble."""
    is_left = [bookie not in lost for bookie in ensemble]
    ensemble_size, left_count = len(is_left), sum(is_left)
    if write_quorum == ensemble_size:
        return left_count
    if left_count >= ensemble_size - 1:  # the usual case: one is lost, and some write set has it
        return write_quorum - (ensemble_size - left_count)
    return min(
        sum(
            is_left[index]
            for index in write_set(start, ensemble_size=ensemble_size, write_quorum=write_quorum)
        )
        for start in range(ensemble_size)
    )


def lost_bytes(ledger: MappedLedger, lost: Collection[BookieId]) -> float:
    """Return about how large the lost copies are, assuming equal entries and equally long
    segments."""
    bookies = [bookie for ensemble in ledger.ensembles for bookie in ensemble]
    share = sum(bookie in lost for bookie in bookies) / len(bookies)
    return ledger.length * ledger.write_quorum * share


# --- Bookies whose copies are missing -------------------------------------------------------------

LossId = tuple[BookieId, int, float]
"""Identifies one loss. It consists of the bookie, the czxid of its new cookie (0: the bookie is
lost), and the monotonic time since which it is absent (0.0: the bookie was reformatted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieLosses:
    """Bookies whose copies are missing: all copies of lost bookies, and the copies of older ledgers
    on reformatted bookies."""

    lost_since_s: Mapping[BookieId, float] = field(default_factory=dict)
    """Since when each lost bookie is absent, in monotonic seconds."""
    reformatted: Mapping[BookieId, ReformattedBookie] = field(default_factory=dict)

    @property
    def bookies(self) -> frozenset[BookieId]:
        return frozenset((*self.lost_since_s, *self.reformatted))

    @property
    def ids(self) -> frozenset[LossId]:
        """The ids of all losses. If a bookie is lost or reformatted again, that is another loss."""
        lost = ((bookie, 0, since_s) for bookie, since_s in self.lost_since_s.items())
        new_cookies = ((bookie, each.czxid, 0.0) for bookie, each in self.reformatted.items())
        return frozenset((*lost, *new_cookies))

    def underreplicated(self, ledger: MappedLedger) -> UnderreplicatedLedger | None:
        """Return what these losses mean for one ledger; None if none of its copies is missing."""
        if not self.reformatted:
            return underreplicated(ledger, self.lost_since_s.keys())
        lost, new = self.lost_since_s, self.reformatted
        missing = [
            b for b in ledger.bookies if b in lost or (b in new and new[b].is_newer_than(ledger))
        ]
        return underreplicated(ledger, missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReformattedBookie:
    """A bookie with a new cookie. ``czxid``: of that cookie. ``was_known``: True if the bookie was
    known with an older cookie before."""

    czxid: int
    was_known: bool

    def is_newer_than(self, ledger: MappedLedger) -> bool:
        """True if the bookie may have lost its copies of the ledger.

        For a bookie that was known before, compare with the creation of the ledger: a later write
        of the metadata proves nothing, because it may have changed another ensemble. A bookie that
        is new to us was probably added by such a later write, so compare with the last write.
        """
        return self.czxid > (ledger.czxid if self.was_known else ledger.mzxid)


def reformatted_bookies(
    cookies: Mapping[BookieId, Stat],
    identities: Mapping[BookieId, int],
    *,
    first_seen: Mapping[BookieId, int] | None = None,
    trusted: Mapping[BookieId, int] = MappingProxyType({}),
) -> dict[BookieId, ReformattedBookie]:
    """Return the bookies whose cookies are newer than the last inspection of their ledgers.

    ``identities``: the czxids of the cookies at that inspection. ``first_seen``: the czxids that
    were seen first, also while nothing was inspected. ``trusted``: the czxids of cookies that an
    operator declared to be old (``IdentitiesOrder``).

    A bookie that returns with a new cookie may have lost everything, because its disk was replaced.
    So its return deletes no mark, and its ledgers without a mark are marked (rule S6). Bookies
    whose cookies cannot be read, because ACLs deny access, are left out.
    """
    former = {**(first_seen or {}), **identities}
    return {
        bookie: ReformattedBookie(
            czxid=stat.czxid,
            was_known=former.get(bookie, stat.czxid) != stat.czxid,
        )
        for bookie, stat in cookies.items()
        if stat.czxid not in (identities.get(bookie), trusted.get(bookie), HIDDEN_CZXID)
    }


def find_underreplicated(
    ledger_map: LedgerMap, losses: BookieLosses, *, first: Collection[BookieId] = ()
) -> Iterator[list[tuple[MappedLedger, UnderreplicatedLedger]]]:
    """Yield the ledgers that miss copies, and what they miss, each time of ``SLICE`` inspected
    ledgers. ``first``: the bookies whose ledgers are inspected first."""
    of_first = ledger_map.naming_any(first)
    ledger_ids = chain(of_first, ledger_map.naming_any(losses.bookies) - of_first)
    while some := list(islice(ledger_ids, SLICE)):
        ledgers = filter(None, map(ledger_map.get, some))
        yield [(each, f) for each in ledgers if (f := losses.underreplicated(each)) is not None]


# --- The order of marking -------------------------------------------------------------------------


class MarkQueue:
    """A priority queue of ledgers to mark: ``take`` returns the most urgent one added so
    far."""

    def __init__(self, absent_since_s: Mapping[BookieId, float]) -> None:
        """``absent_since_s``: as for ``fewest_copies_first``."""
        self._absent_since_s = absent_since_s
        self._heap: list[tuple[tuple[int, float, int], int, UnderreplicatedLedger]] = []
        self._first_taken: dict[int, list[int]] = {}
        """By copies left, the first ``URGENT_MAX`` ledger ids that were taken."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, ledger: UnderreplicatedLedger) -> None:
        urgency = _urgency(ledger, self._absent_since_s)
        heapq.heappush(self._heap, (urgency, ledger.ledger_id, ledger))

    def take(self) -> UnderreplicatedLedger:
        ledger = heapq.heappop(self._heap)[2]
        first = self._first_taken.setdefault(ledger.copies_left, [])
        if len(first) < URGENT_MAX:
            first.append(ledger.ledger_id)
        return ledger

    @property
    def urgent(self) -> list[int]:
        """Return the ledgers taken so far that all workers should repair before any other: those
        with at most one copy left, and those with fewer copies left than others have. At most
        ``URGENT_MAX``."""
        most_left = max(self._first_taken, default=0)
        chosen = [left for left in sorted(self._first_taken) if left <= 1 or left < most_left]
        return [ledger_id for left in chosen for ledger_id in self._first_taken[left]][:URGENT_MAX]


def fewest_copies_first(
    found: Collection[UnderreplicatedLedger], absent_since_s: Mapping[BookieId, float]
) -> list[UnderreplicatedLedger]:
    """Return the ledgers in the order in which they are marked.

    ``absent_since_s``: since when each bookie is absent. A bookie that is not in it is registered,
    and was perhaps reformatted.
    """
    return sorted(found, key=lambda ledger: _urgency(ledger, absent_since_s))


def _urgency(
    ledger: UnderreplicatedLedger, absent_since_s: Mapping[BookieId, float]
) -> tuple[int, float, int]:
    oldest_s = min(absent_since_s.get(bookie, math.inf) for bookie in ledger.lost)
    return ledger.copies_left, oldest_s, -ledger.length
