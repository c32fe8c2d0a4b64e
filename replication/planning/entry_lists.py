"""Bookies asked for the list of entries that they have: one request instead of many reads.

A list proves nothing of what the entries hold, and not every bookie answers: what it says is
missing is read (``check``), and so are the ends of the rest. One of 4.18.0 with little index memory
was seen to hang for such a request, DbLedgerStorage never answers it: a bookie that stayed silent
rests.
"""

import asyncio
from collections.abc import Collection, Sequence

from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import BookmenderError, NoSuchEntryError
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId

SILENT_REST_S = 3_600.0
"""For so long a bookie that did not answer is not asked for a list again."""


class EntryLists:
    """One for a worker, so that each silent bookie costs its silence once."""

    def __init__(self, bookies: Bookies, clock: Clock) -> None:
        self._bookies = bookies
        self._clock = clock
        self._resting_until_s: dict[BookieId, float] = {}

    async def lacking(
        self, fragments: Sequence[Fragment], asked: Collection[BookieId]
    ) -> frozenset[BookieId]:
        """Those of the bookies asked whose list lacks entries that they should have."""
        whole = await self.whole(fragments, asked)
        return frozenset(bookie for bookie, is_whole in whole.items() if not is_whole)

    async def whole(
        self, fragments: Sequence[Fragment], asked: Collection[BookieId]
    ) -> dict[BookieId, bool]:
        """Whether each list holds all that its bookie should have; of those bookies asked that gave
        one."""
        now_s = self._clock.now_s()
        members = sorted({bookie for f in fragments for bookie in f.ensemble} & set(asked))
        ready = [b for b in members if self._resting_until_s.get(b, now_s) <= now_s]
        lacks = await asyncio.gather(*(self._lacks(fragments, bookie) for bookie in ready))
        told = zip(ready, lacks, strict=True)
        return {b: not is_lacking for b, is_lacking in told if is_lacking is not None}

    async def _lacks(self, fragments: Sequence[Fragment], bookie: BookieId) -> bool | None:
        """None: it gave no list."""
        try:
            listed = await self._bookies.list_entries(bookie, fragments[0].ledger_id)
        except NoSuchEntryError:
            return lacks(fragments, bookie, ())
        except BookmenderError:
            self._resting_until_s[bookie] = self._clock.now_s() + SILENT_REST_S
            return None
        return lacks(fragments, bookie, listed)


def lacks(fragments: Sequence[Fragment], bookie: BookieId, listed: Sequence[range]) -> bool:
    """Whether an entry that the bookie should have stands in none of the runs, which ascend."""
    gaps = _gaps(listed)
    return any(
        fragment.entries_of(index).between(first, last)
        for fragment in fragments
        for index, member in enumerate(fragment.ensemble)
        if member == bookie
        for first, last in gaps
    )


def _gaps(listed: Sequence[range]) -> list[tuple[int, int]]:
    """First and last id, both inclusive, of what lies between the runs, before and after them."""
    starts = [0, *(run.stop for run in listed)]
    stops = [*(run.start for run in listed), _BEYOND_ALL]
    return [(start, stop - 1) for start, stop in zip(starts, stops, strict=True) if start < stop]


_BEYOND_ALL = 1 << 62
