"""Which ledgers have entries whose every copy is on bookies that are away, for whatever reason:
nobody reads these.

A decision about one ledger, from what the index keeps of it (``has_copyless``), and who counts them
all, keeps the ids of a few, and sees which of the bookies would help. A ledger has such an entry
only if it names as many of these bookies as make a write set: those alone are looked at, a block of
the index at a time.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import repeat

from auditor.absence import Copyless
from auditor.index.keeper import IndexKeeper
from auditor.index.ledger_index import IndexedLedger
from ledgers.clock import Clock
from ledgers.metadata import BookieId
from ledgers.operations.tasks import wait_woken

PAUSE_S = 5.0
"""Between two counts of the same bookies, where ledgers have changed."""
PAUSE_SHARE = 20.0
"""And so many times as long as the last one took, at least."""
IDS_KEPT_MAX = 20
"""For people, who look at some of very many."""


def has_copyless(ledger: IndexedLedger, away: Collection[BookieId]) -> bool:
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
    found: Copyless
    change: int
    is_whole: bool


class CopylessCounter:
    """Counts for the bookies that it is told of, by what the index knows so far. One loop's."""

    def __init__(self, keeper: IndexKeeper, clock: Clock, *, on_count: Callable[[], None]) -> None:
        """``on_count``: called when what was found is new."""
        self._keeper, self._clock = keeper, clock
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

    def of(self, away: Collection[BookieId]) -> Copyless | None:
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
        away, keeper, began_s = self.away, self._keeper, self._clock.now_s()
        change, is_whole = keeper.change_count, keeper.is_complete
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
        return last is not None and (last.is_whole or not self._keeper.is_complete)

    async def _count(self, away: frozenset[BookieId]) -> Copyless | None:
        """None when others are away meanwhile: it begins anew with those."""
        index, tally, first = self._keeper.index, _Tally(away), 0
        least = index.write_quorum_least
        while True:
            ledger_ids, then = index.naming_several(away, count_least=least, first=first)
            for ledger_id in ledger_ids:
                ledger = index.get(ledger_id)
                if ledger is not None and has_copyless(ledger, away):
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

    def add(self, ledger: IndexedLedger) -> None:
        self._count += 1
        if len(self._first) < IDS_KEPT_MAX:
            self._first.append(ledger.ledger_id)
        away = ledger.bookies & self._away
        for bookie in away:  # 0 for one that is not enough: it is wanted all the same
            self._enough_for[bookie] += not has_copyless(ledger, away - {bookie})

    def result(self) -> Copyless:
        return Copyless(
            count=self._count, first=tuple(self._first), enough_for=dict(self._enough_for)
        )
