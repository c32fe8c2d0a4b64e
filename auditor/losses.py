"""The ledgers of lost bookies, out of the index and into the queue, the most endangered first.

Nothing waits until all of them are known: they are looked up a slice at a time, and what is most
endangered of those seen so far is marked meanwhile. So the first mark comes at once, however many
there are, and the order is right but for the first few. What was marked is remembered as long as
its bookies are missing: a ledger that changes while workers repair it is looked at, and not written
again.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from prometheus_client import Counter

from auditor.endangered import DangerQueue, Endangered, Missing
from auditor.index.ledger_index import LedgerIndex
from auditor.marking import Marker
from ledgers.metadata import BookieId

MARKS = Counter(
    "bookmender_marks_total",
    "Marks made or extended by this node as leader, by cause: lost, reborn (set up anew), drained.",
    ["cause"],
)

SLICE = 500
"""Ledgers looked up in one go: some milliseconds."""
TOUCHED_AT_ONCE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """What came of it. ``is_whole``: whether all were looked at. ``urgent``: as ``DangerQueue`` has
    it."""

    endangered_count: int
    mark_count: int
    urgent: Sequence[int]
    is_whole: bool


class KnownMarks:
    """Per ledger, the replicas that its mark names for certain."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[BookieId, ...]] = {}
        self._shared: dict[tuple[BookieId, ...], tuple[BookieId, ...]] = {}
        """After one loss all marks name the same: one tuple for a million of them."""

    def add(self, ledgers: Iterable[Endangered]) -> None:
        for ledger in ledgers:
            self._named[ledger.ledger_id] = self._shared.setdefault(ledger.lost, ledger.lost)

    def __len__(self) -> int:
        return len(self._named)

    def ledger_ids(self) -> Sequence[int]:
        return list(self._named)

    def discard(self, ledger_id: int) -> None:
        self._named.pop(ledger_id, None)

    def keep_only(self, bookies: Collection[BookieId]) -> None:
        """Forget marks that name others as well."""
        shared = {named: named for named in self._shared if set(named) <= set(bookies)}
        if len(shared) == len(self._shared):  # nearly always
            return
        self._shared = shared
        self._named = {
            ledger_id: named for ledger_id, named in self._named.items() if named in self._shared
        }

    def name_all_of(self, ledger: Endangered) -> bool:
        """Whether its mark stands, and names all that it misses."""
        named = self._named.get(ledger.ledger_id, ())
        return all(bookie in named for bookie in ledger.lost)


class LossMarks:
    """Marks ledgers for missing bookies, and remembers which are marked for which, to write no mark
    twice."""

    def __init__(self, index: LedgerIndex, marker: Marker) -> None:
        self._index = index
        self._marker = marker
        self._known = KnownMarks()
        self._missing = Missing()
        """What the known marks were made for."""
        self._restored: frozenset[int] = frozenset()
        """Ledgers whose marks were gone, and were made again."""

    async def mark_naming(
        self,
        missing: Missing,
        *,
        first: Collection[BookieId],
        is_over: Callable[[], bool],
        again: Collection[BookieId] = (),
    ) -> Marked:
        """Mark all ledgers that miss copies, but for those whose marks stand.

        ``first``: of the missing bookies, those to begin with. ``is_over``: asked now and then,
        whether to leave it at that; the rest is for another call. ``again``: those that were back
        since they were lost the last time, whose marks of then are renewed.
        """
        ledger_ids = self._naming([*first, *(b for b in missing.bookies if b not in first)])
        stream = _DangerStream(self._index, missing, ledger_ids, self._known, is_over, again)
        await self._marker.mark_stream(stream)
        return stream.result()

    async def mark_touched(self, ledger_ids: Collection[int], missing: Missing) -> int:
        """Of ledgers that were created or changed: those that miss copies, and whose mark nobody
        knows of.

        What a worker has in hand as it was before is marked all the same (rule S6).
        """
        looked_at = (self._look(ledger_id, missing) for ledger_id in ledger_ids)
        found = [each for each in looked_at if each is not None]
        count = 0
        for start in range(0, len(found), TOUCHED_AT_ONCE):
            part = found[start : start + TOUCHED_AT_ONCE]
            changed = await asyncio.gather(
                *(self._marker.mark(each.ledger_id, each.lost, is_renewed=True) for each in part)
            )
            self._known.add(part)
            new = [each for each, is_new in zip(part, changed, strict=True) if is_new]
            _count(new, missing)
            count += len(new)
        return count

    def see(self, missing: Missing) -> None:
        """Nothing is known any more of marks for bookies that are not missing now, or are anew:
        they may be worked off."""
        if news := {bookie for bookie, *_ in missing.causes - self._missing.causes}:
            self._restored = frozenset()
        self._known.keep_only(missing.bookies - news)
        self._missing = missing

    def forget(self) -> None:
        """Look at every mark again."""
        self._known = KnownMarks()
        self._restored = frozenset()

    @property
    def are_any_known(self) -> bool:
        """Whether marks for lost bookies are taken to stand."""
        return bool(self._missing.lost_since_s) and len(self._known) > 0

    async def lacking_among(self, listed: Sequence[int]) -> frozenset[int]:
        """Ledgers of lost bookies whose marks are taken to stand, but are not among these, which
        ascend; but for those that were made again once already for the same losses."""
        found = set()
        for number, ledger_id in enumerate(self._known.ledger_ids()):
            if number % SLICE == 0:
                await asyncio.sleep(0)
            place = bisect_left(listed, ledger_id)
            is_listed = place < len(listed) and listed[place] == ledger_id
            if not is_listed and ledger_id not in self._restored and self._is_lost(ledger_id):
                found.add(ledger_id)
        return frozenset(found)

    def forget_for_once(self, ledger_ids: Collection[int]) -> None:
        """Their marks are gone: the next call marks them again."""
        for ledger_id in ledger_ids:
            self._known.discard(ledger_id)
        self._restored = self._restored.union(ledger_ids)

    def _is_lost(self, ledger_id: int) -> bool:
        """Whether it names a lost bookie: of one that was set up anew that says nothing once it was
        given back all."""
        ledger = self._index.get(ledger_id)
        return ledger is not None and not ledger.bookies.isdisjoint(self._missing.lost_since_s)

    def _look(self, ledger_id: int, missing: Missing) -> Endangered | None:
        """None for a ledger that misses nothing, or whose mark stands."""
        ledger = self._index.get(ledger_id)
        found = None if ledger is None else missing.danger(ledger)
        if found is None:
            self._known.discard(ledger_id)
            return None
        return None if self._known.name_all_of(found) else found

    def _naming(self, bookies: Sequence[BookieId]) -> Iterator[int]:
        """Each ledger once."""
        if len(bookies) == 1:
            yield from self._index.naming(bookies[0])
            return
        seen: set[int] = set()
        for bookie in bookies:
            for ledger_id in self._index.naming(bookie):
                if ledger_id not in seen:
                    seen.add(ledger_id)
                    yield ledger_id


class _DangerStream:
    """A source of marks: finds ledgers that miss copies, and gives out those not marked yet in
    order."""

    def __init__(
        self,
        index: LedgerIndex,
        missing: Missing,
        ledger_ids: Iterator[int],
        known: KnownMarks,
        is_over: Callable[[], bool],
        again: Collection[BookieId],
    ) -> None:
        self._index = index
        self._missing = missing
        self._ledger_ids = ledger_ids
        self._known = known
        self._is_over = is_over
        self._again = frozenset(again)
        self._queue = DangerQueue(missing.lost_since_s)
        self._is_all_found = False
        self._was_ended = False
        self._found_count = 0
        self._new_count = 0

    def result(self) -> Marked:
        return Marked(
            endangered_count=self._found_count,
            mark_count=self._new_count,
            urgent=self._queue.urgent,
            is_whole=not self._was_ended,
        )

    async def take(self, count_max: int) -> Sequence[Endangered]:
        while not (self._is_all_found and not self._queue):
            self._was_ended = self._was_ended or self._is_over()
            if self._was_ended:
                return ()
            self._find_some()
            if part := self._next_unmarked(count_max):
                return part
            await asyncio.sleep(0)
        return ()

    def is_renewed(self, ledger: Endangered) -> bool:
        return not self._again.isdisjoint(ledger.lost)

    def done(self, ledgers: Sequence[Endangered], *, new: Sequence[Endangered]) -> None:
        self._known.add(ledgers)
        self._new_count += len(new)
        _count(new, self._missing)

    def _find_some(self) -> None:
        """Far more than are marked meanwhile: so the order is soon that of all."""
        if self._is_all_found:
            return
        ledger_ids = list(islice(self._ledger_ids, SLICE))
        self._is_all_found = len(ledger_ids) < SLICE
        for ledger_id in ledger_ids:
            ledger = self._index.get(ledger_id)
            found = None if ledger is None else self._missing.danger(ledger)
            if found is not None:
                self._queue.add(found)
                self._found_count += 1

    def _next_unmarked(self, count_max: int) -> list[Endangered]:
        part: list[Endangered] = []
        while self._queue and len(part) < count_max:
            ledger = self._queue.take()
            if not self._known.name_all_of(ledger):
                part.append(ledger)
        return part


def _count(ledgers: Sequence[Endangered], missing: Missing) -> None:
    lost_count = sum(
        any(bookie in missing.lost_since_s for bookie in ledger.lost) for ledger in ledgers
    )
    MARKS.labels(cause="lost").inc(lost_count)
    MARKS.labels(cause="reborn").inc(len(ledgers) - lost_count)
