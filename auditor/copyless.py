"""How many ledgers have entries whose every copy is on bookies that are away, for whatever reason: nobody reads these.

A decision about one ledger, from what the index keeps of it (``has_copyless``), and who counts them all. A
ledger has such an entry only if it names as many of these bookies as make a write set: those alone are
looked at, a block of the index at a time.
"""

import asyncio
import math
from collections.abc import Callable, Collection
from itertools import repeat

from auditor.index.keeper import IndexKeeper
from auditor.index.ledger_index import IndexedLedger
from ledgers.clock import Clock
from ledgers.metadata import BookieId
from ledgers.operations.tasks import wait_woken

PAUSE_S = 5.0
"""Between two counts of the same bookies, where ledgers have changed."""
PAUSE_SHARE = 20.0
"""And so many times as long as the last one took, at least."""


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


class CopylessCounter:
    """Of the bookies that it is told of, and of what the index knows so far. One loop's."""

    def __init__(self, keeper: IndexKeeper, clock: Clock, *, on_count: Callable[[], None]) -> None:
        """``on_count``: called when a number is new."""
        self._keeper, self._clock = keeper, clock
        self._on_count = on_count
        self.away: frozenset[BookieId] = frozenset()
        self._was_seen = asyncio.Event()
        self._counted: tuple[frozenset[BookieId], int] | None = None
        self._counted_change = -1
        """Of the index, when that was begun."""
        self._took_s = 0.0

    def see(self, away: frozenset[BookieId]) -> None:
        if away != self.away:
            self.away = away
            self._was_seen.set()

    def of(self, away: Collection[BookieId]) -> int | None:
        """None where they were not counted yet for just these."""
        if self._counted is None or self._counted[0] != away:
            return None
        return self._counted[1]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.run_once()
            pause_s = max(PAUSE_S, PAUSE_SHARE * self._took_s) if self.away else math.inf
            await wait_woken(self._was_seen, timeout_s=pause_s)

    async def run_once(self) -> None:
        """Count, if something has changed."""
        self._was_seen.clear()
        away, change, began_s = self.away, self._keeper.change_count, self._clock.now_s()
        if self.of(away) is not None and change == self._counted_change:
            return
        count = await self._count(away)
        if count is None:
            return
        self._took_s = self._clock.now_s() - began_s
        is_new = self._counted != (away, count)
        self._counted, self._counted_change = (away, count), change
        if is_new:
            self._on_count()

    async def _count(self, away: frozenset[BookieId]) -> int | None:
        """None when others are away meanwhile: it begins anew with those."""
        index, count, first = self._keeper.index, 0, 0
        least = index.write_quorum_least
        while True:
            ledger_ids, then = index.naming_several(away, count_least=least, first=first)
            for ledger_id in ledger_ids:
                ledger = index.get(ledger_id)
                count += ledger is not None and has_copyless(ledger, away)
            if then is None:
                return count
            first = then
            await asyncio.sleep(0)
            if self.away != away:
                return None
