"""Which ledgers a loss touches, and which of them are to be marked first: values, no I/O.

Most endangered first: fewest good copies left of any entry, then the oldest loss, then most bytes.

Which ledgers have entries whose every copy is on bookies that are away, for whatever reason:
nobody reads these.

A decision about one ledger, from what the index keeps of it (``has_unavailable_entry``), and who counts them
all, keeps the ids of a few, and sees which of the bookies would help. A ledger has such an entry
only if it names as many of these bookies as make a write set: those alone are looked at, a block of
the index at a time.

What Java's workers would see of a ledger's damage, and so in which queue it is marked. Pure.

Java's ReplicationWorker asks its LedgerChecker, which reads of each bookie's part of a fragment the
first and the last entry (``auditorLedgerVerificationPercentage`` is 0 unless set), takes any answer
but the entry for a loss, and checks no digest. Whatever else is wrong it does not see: it finds the
ledger whole and unmarks it within milliseconds. Where it does see it, it copies that whole part
anew. So in the shared queue stands only what it sees, part by part, and the rest in our own, whose
workers go by the finding.
"""

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType

from auditor.absence import UnavailableLedgers
from auditor.ledger_map import MappedLedger
from auditor.ledger_map_updater import LedgerMapUpdater
from ledgers.clock import Clock
from ledgers.model import BookieId, Fragment, StripedEntries
from ledgers.registration import HIDDEN_CZXID
from ledgers.store import Stat
from ledgers.tasks import wait_woken
from replication.entry_runs import NO_ENTRIES, EntryRuns
from replication.marks import URGENT_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderreplicatedLedger:
    """A ledger that names lost bookies. ``lost`` ascends; ``copies_left`` of its worst entry."""

    ledger_id: int
    lost: tuple[BookieId, ...]
    copies_left: int
    length: int
    """Payload bytes; 0 while the ledger is not closed."""


def underreplicated(
    ledger: MappedLedger, lost: Collection[BookieId]
) -> UnderreplicatedLedger | None:
    """What the loss means for one ledger; None when no segment names a lost bookie."""
    named = ledger.bookies.intersection(lost)
    if not named:
        return None
    return UnderreplicatedLedger(
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
class ReformattedBookie:
    """A bookie was set up: its cookie's ``czxid``, and whether it was known under another one
    before."""

    czxid: int
    was_known: bool

    def is_after(self, ledger: MappedLedger) -> bool:
        """Whether the bookie, if the ledger names it, may have lost its copies.

        A later write of the metadata proves nothing of one that was known: a writer may have
        changed another ensemble since. One that is new to us is more likely to have come in by such
        a write.
        """
        return self.czxid > (ledger.czxid if self.was_known else ledger.mzxid)


def reformatted_bookies(
    cookies: Mapping[BookieId, Stat],
    identities: Mapping[BookieId, int],
    *,
    first_seen: Mapping[BookieId, int] | None = None,
    trusted: Mapping[BookieId, int] = MappingProxyType({}),
) -> dict[BookieId, ReformattedBookie]:
    """Bookies that were set up since their ledgers were looked at. ``identities``: the cookies'
    czxids then; ``first_seen``: those of any time before, also while nobody was to look.
    ``trusted``: cookies' czxids that an operator's order calls old (``IdentitiesOrder``).

    One that comes back under its old id may have lost everything (its disk was replaced): its
    return withdraws no mark, and where there is none, calls for one (rule S6). Of one whose cookie
    ACLs shut away nobody can tell.
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


LossCause = tuple[BookieId, int, float]
"""A bookie, and its new cookie's czxid (0: it is away) or since when it is away, monotonic
seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Bookies whose copies are missing, in whole or, where one was set up anew, of older
    ledgers."""

    lost_since_s: Mapping[BookieId, float] = field(default_factory=dict)
    """Monotonic seconds."""
    reformatted: Mapping[BookieId, ReformattedBookie] = field(default_factory=dict)

    @property
    def bookies(self) -> frozenset[BookieId]:
        return frozenset((*self.lost_since_s, *self.reformatted))

    @property
    def causes(self) -> frozenset[LossCause]:
        """One for each loss: who goes again, or is wiped again, is lost anew."""
        lost = ((bookie, 0, since_s) for bookie, since_s in self.lost_since_s.items())
        return frozenset((*lost, *((b, birth.czxid, 0.0) for b, birth in self.reformatted.items())))

    def danger(self, ledger: MappedLedger) -> UnderreplicatedLedger | None:
        """What they mean for one ledger; None when it misses none of its copies."""
        if not self.reformatted:
            return underreplicated(ledger, self.lost_since_s.keys())
        missing = [bookie for bookie in ledger.bookies if self._is_missing(bookie, ledger)]
        return underreplicated(ledger, missing)

    def _is_missing(self, bookie: BookieId, ledger: MappedLedger) -> bool:
        if bookie in self.lost_since_s:
            return True
        birth = self.reformatted.get(bookie)
        return birth is not None and birth.is_after(ledger)


# --- In order ------------------------------------------------------------------------------------------


def fewest_copies_first(
    found: Collection[UnderreplicatedLedger], absent_since_s: Mapping[BookieId, float]
) -> list[UnderreplicatedLedger]:
    """In the order in which they are to be marked.

    ``absent_since_s`` holds every bookie that is away; one that is not came back, perhaps empty.
    """
    return sorted(found, key=lambda ledger: _urgency(ledger, absent_since_s))


class MarkQueue:
    """The most endangered of what was added so far comes first; a heap, as more is added
    meanwhile."""

    def __init__(self, absent_since_s: Mapping[BookieId, float]) -> None:
        self._absent_since_s = absent_since_s
        self._heap: list[tuple[tuple[int, float, int], int, UnderreplicatedLedger]] = []
        self._first: dict[int, list[int]] = {}
        """By copies left, the first ``URGENT_MAX`` ids that were taken out."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, ledger: UnderreplicatedLedger) -> None:
        urgency = _urgency(ledger, self._absent_since_s)
        heapq.heappush(self._heap, (urgency, ledger.ledger_id, ledger))

    def take(self) -> UnderreplicatedLedger:
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
    ledger: UnderreplicatedLedger, absent_since_s: Mapping[BookieId, float]
) -> tuple[int, float, int]:
    oldest_s = min(absent_since_s.get(bookie, math.inf) for bookie in ledger.lost)
    return ledger.copies_left, oldest_s, -ledger.length


PAUSE_S = 5.0
"""Between two counts of the same bookies, where ledgers have changed."""
PAUSE_SHARE = 20.0
"""And so many times as long as the last one took, at least."""
IDS_KEPT_MAX = 20
"""For people, who look at some of very many."""


def has_unavailable_entry(ledger: MappedLedger, away: Collection[BookieId]) -> bool:
    """Whether all copies of some entry are on these bookies.

    What of a ledger that is not closed may still be written counts as if it were there.
    """
    size = len(ledger.ensembles[0]) if ledger.ensembles else 0
    used = ledger.write_sets or repeat((0, size))
    return any(
        _is_all_away(ensemble, start, ledger.write_quorum, away)
        for ensemble, (first, count) in zip(ledger.ensembles, used, strict=False)
        for start in range(first, first + count)
    )


def _is_all_away(
    ensemble: tuple[BookieId, ...], start: int, write_quorum: int, away: Collection[BookieId]
) -> bool:
    """Of the write set that begins at this bookie index, which counts on past the last one."""
    size = len(ensemble)
    return all(ensemble[(start + offset) % size] in away for offset in range(write_quorum))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Count:
    """``change``: of the index, when it was begun; ``is_whole``: whether that was complete then."""

    away: frozenset[BookieId]
    found: UnavailableLedgers
    change: int
    is_whole: bool


class UnavailableLedgerCounter:
    """Counts for the bookies that it is told of, by what the index knows so far. One loop's."""

    def __init__(
        self, updater: LedgerMapUpdater, clock: Clock, *, on_count: Callable[[], None]
    ) -> None:
        """``on_count``: called when what was found is new."""
        self._updater, self._clock = updater, clock
        self._on_count = on_count
        self.away: frozenset[BookieId] = frozenset()
        self._was_seen = asyncio.Event()
        self._last: _Count | None = None
        self._took_s = 0.0

    def see(self, away: frozenset[BookieId]) -> None:
        """Called too whenever the index may have been completed."""
        if away != self.away or not self._may_stand(self._last):
            self.away = away
            self._was_seen.set()

    def of(self, away: Collection[BookieId]) -> UnavailableLedgers | None:
        """None where these were not counted yet for just these, or only before the index was
        complete."""
        last = self._last
        return last.found if last and last.away == away and self._may_stand(last) else None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.run_once()
            pause_s = max(PAUSE_S, PAUSE_SHARE * self._took_s) if self.away else math.inf
            await wait_woken(self._was_seen, timeout_s=pause_s)

    async def run_once(self) -> None:
        """Count, if something has changed."""
        self._was_seen.clear()
        away, updater, began_s = self.away, self._updater, self._clock.now_s()
        change, is_whole = updater.change_count, updater.is_complete
        last = self._last
        if self.of(away) is not None and last is not None and last.change == change:
            return
        found = await self._count(away)
        if found is None:
            return
        self._took_s = self._clock.now_s() - began_s
        self._last = _Count(away=away, found=found, change=change, is_whole=is_whole)
        if last is None or (last.away, last.found, last.is_whole) != (away, found, is_whole):
            self._on_count()

    def _may_stand(self, last: _Count | None) -> bool:
        return last is not None and (last.is_whole or not self._updater.is_complete)

    async def _count(self, away: frozenset[BookieId]) -> UnavailableLedgers | None:
        """None when others are away meanwhile: it begins anew with those."""
        index, tally, first = self._updater.ledger_map, _Tally(away), 0
        least = index.write_quorum_least
        while True:
            ledger_ids, then = index.naming_several(away, count_least=least, first=first)
            for ledger_id in ledger_ids:
                ledger = index.get(ledger_id)
                if ledger is not None and has_unavailable_entry(ledger, away):
                    tally.add(ledger)
            if then is None:
                return tally.result()
            first = then
            await asyncio.sleep(0)
            if self.away != away:
                return None


class _Tally:
    """What was found so far, with these bookies away; ledgers come by id."""

    def __init__(self, away: frozenset[BookieId]) -> None:
        self._away = away
        self._count = 0
        self._first: list[int] = []
        self._enough_for: Counter[BookieId] = Counter()

    def add(self, ledger: MappedLedger) -> None:
        self._count += 1
        if len(self._first) < IDS_KEPT_MAX:
            self._first.append(ledger.ledger_id)
        away = ledger.bookies & self._away
        for bookie in away:  # 0 for one that is not enough: it is wanted all the same
            self._enough_for[bookie] += not has_unavailable_entry(ledger, away - {bookie})

    def result(self) -> UnavailableLedgers:
        return UnavailableLedgers(
            count=self._count, first=tuple(self._first), enough_for=dict(self._enough_for)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Of one bookie's copies of one ledger. ``bad``: entries of which it gives no good copy, at
    least the first and the last such of each fragment; ``refused``: those of them that it does not
    give at all."""

    bad: EntryRuns
    refused: EntryRuns = field(default_factory=lambda: NO_ENTRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Bookies with damage that Java's workers see, and with damage that they do not; one may be in
    both."""

    seen: frozenset[BookieId] = frozenset()
    unseen: frozenset[BookieId] = frozenset()

    @property
    def bookies(self) -> frozenset[BookieId]:
        return self.seen | self.unseen

    @property
    def needs_own_mark(self) -> bool:
        """Also where nobody is at fault, as with copies that are merely in the wrong place."""
        return bool(self.unseen) or not self.seen


def java_visibility(
    fragments: Iterable[Fragment],
    damage: Mapping[BookieId, Damage],
    *,
    registered: Collection[BookieId],
) -> Sight:
    """``fragments``: of the ledger; one that ends nobody knows where has no end that Java could
    look at.

    Damage outside the fragments counts as unseen: better a look too many than one too few.
    """
    seen: set[BookieId] = set()
    unseen: set[BookieId] = set()
    for fragment in fragments:
        for index, bookie in enumerate(fragment.ensemble):
            found = damage.get(bookie)
            if found is None or not (entries := _stored(fragment, index)):
                continue
            if not found.bad.between(entries[0], entries[-1]):
                continue
            is_seen = bookie not in registered or _is_seen(fragment, entries, found)
            (seen if is_seen else unseen).add(bookie)
    unseen.update(damage.keys() - seen)
    return Sight(seen=frozenset(seen), unseen=frozenset(unseen))


def _stored(fragment: Fragment, index: int) -> StripedEntries | range:
    if fragment.last_entry_id is None:
        return range(0)
    return fragment.entries_of(index)


def _is_seen(fragment: Fragment, entries: StripedEntries | range, found: Damage) -> bool:
    """The last entry of what is still written to is another by the time that Java looks."""
    return entries[0] in found.refused or (fragment.is_closed and entries[-1] in found.refused)
