"""Counts the unavailable ledgers: those with an entry whose every copy is on absent bookies.

No client can read such an entry until a bookie returns. The counter inspects only ledgers that name
at least a write quorum of the absent bookies, a block of the ledger map at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from prometheus_client import Gauge

from auditor.ledger_map import MappedLedger
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.underreplication import copies_left
from ledgers.clock import Clock
from ledgers.model import BookieId
from ledgers.tasks import wait_woken
from replication.records import Count

UNAVAILABLE = Gauge(
    "bookmender_unavailable_ledgers",
    "Ledgers with an entry whose every copy is on bookies that are not registered. 0 on all nodes "
    "except the leader.",
)

PAUSE_S = 5.0
"""Minimum pause between two counts for the same bookies, if ledgers have changed."""
PAUSE_SHARE = 20.0
"""The pause is also at least this many times as long as the last count took."""
IDS_KEPT_MAX = 20
"""Ledger ids that are kept for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnavailableLedgers:
    """The unavailable ledgers at one moment.

    ``first``: the lowest of their ids. ``restored_by``: by absent bookie that one of them names,
    how many of these ledgers become available again if this bookie alone returns.
    """

    count: Count
    first: tuple[Count, ...] = ()
    restored_by: Mapping[BookieId, Count] = field(default_factory=dict)


class UnavailableLedgerCounter:
    """Counts the unavailable ledgers among those that the ledger map knows so far."""

    def __init__(
        self, updater: LedgerMapUpdater, clock: Clock, *, on_count: Callable[[], None]
    ) -> None:
        """``on_count``: called when the result has changed."""
        self._updater, self._clock = updater, clock
        self._on_count = on_count
        self.absent: frozenset[BookieId] = frozenset()
        self._was_updated = asyncio.Event()
        self._last: _Count | None = None
        self._took_s = 0.0

    def update(self, absent: frozenset[BookieId]) -> None:
        """Set the absent bookies. Call this also when the ledger map may have become complete."""
        if absent != self.absent or not self._is_valid(self._last):
            self.absent = absent
            self._was_updated.set()

    def found_for(self, absent: Collection[BookieId]) -> UnavailableLedgers | None:
        """Return the result for exactly these bookies; None if there is none yet, or if the ledger
        map became complete after the count."""
        last = self._last
        return last.found if last and last.absent == absent and self._is_valid(last) else None

    async def run(self) -> None:
        """Count until cancelled."""
        try:
            while True:
                await self.run_once()
                pause_s = max(PAUSE_S, PAUSE_SHARE * self._took_s) if self.absent else math.inf
                await wait_woken(self._was_updated, timeout_s=pause_s)
        finally:
            UNAVAILABLE.set(0)

    async def run_once(self) -> None:
        """Count if something has changed."""
        self._was_updated.clear()
        absent, updater, began_s = self.absent, self._updater, self._clock.now_s()
        change, is_complete = updater.change_count, updater.is_complete
        last = self._last
        if self.found_for(absent) is not None and last is not None and last.change == change:
            return
        found = await self._count(absent)
        if found is None:
            return
        self._took_s = self._clock.now_s() - began_s
        UNAVAILABLE.set(found.count)
        self._last = _Count(absent=absent, found=found, change=change, is_complete=is_complete)
        before = last and (last.absent, last.found, last.is_complete)
        if before != (absent, found, is_complete):
            self._on_count()

    def _is_valid(self, last: _Count | None) -> bool:
        return last is not None and (last.is_complete or not self._updater.is_complete)

    async def _count(self, absent: frozenset[BookieId]) -> UnavailableLedgers | None:
        """Return None if other bookies are absent meanwhile; then the count starts over."""
        ledger_map, counted, first = self._updater.ledger_map, _CountSoFar(absent), 0
        count_least = ledger_map.write_quorum_least
        while True:
            ledger_ids, next_first = ledger_map.naming_several(
                absent, count_least=count_least, first=first
            )
            for ledger_id in ledger_ids:
                ledger = ledger_map.get(ledger_id)
                if ledger is not None and has_unavailable_entry(ledger, absent):
                    counted.add(ledger)
            if next_first is None:
                return counted.result()
            first = next_first
            await asyncio.sleep(0)
            if self.absent != absent:
                return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Count:
    """A finished count. ``change``: ``change_count`` of the ledger map when the count began.
    ``is_complete``: True if the ledger map was complete then."""

    absent: frozenset[BookieId]
    found: UnavailableLedgers
    change: int
    is_complete: bool


class _CountSoFar:
    """A count in progress. Ledgers are added in the order of their ids."""

    def __init__(self, absent: frozenset[BookieId]) -> None:
        self._absent = absent
        self._count = 0
        self._first: list[int] = []
        self._restored_by: Counter[BookieId] = Counter()

    def add(self, ledger: MappedLedger) -> None:
        self._count += 1
        if len(self._first) < IDS_KEPT_MAX:
            self._first.append(ledger.ledger_id)
        absent = ledger.bookies & self._absent
        for bookie in absent:  # a bookie that does not suffice alone is listed with 0
            self._restored_by[bookie] += not has_unavailable_entry(ledger, absent - {bookie})

    def result(self) -> UnavailableLedgers:
        return UnavailableLedgers(
            count=self._count, first=tuple(self._first), restored_by=dict(self._restored_by)
        )


def has_unavailable_entry(ledger: MappedLedger, absent: Collection[BookieId]) -> bool:
    """True if all copies of some entry are on the absent bookies."""
    return copies_left(ledger, absent) == 0
