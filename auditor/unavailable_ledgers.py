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
        self._counted: tuple[frozenset[BookieId], UnavailableLedgers, bool] | None = None
        """The absent bookies, the result of the last count, and whether the ledger map was complete
        when the count began."""
        self._change_count = -1
        """``change_count`` of the ledger map when that count began."""

    def update(self, absent: frozenset[BookieId]) -> None:
        """Set the absent bookies. Call this also when the ledger map may have become complete."""
        if absent != self.absent or not self._is_valid():
            self.absent = absent
            self._was_updated.set()

    def found_for(self, absent: Collection[BookieId]) -> UnavailableLedgers | None:
        """Return the result for exactly these bookies; None if there is none yet, or if the ledger
        map became complete after the count."""
        if self._counted is None or self._counted[0] != absent or not self._is_valid():
            return None
        return self._counted[1]

    def _is_valid(self) -> bool:
        return self._counted is not None and (self._counted[2] or not self._updater.is_complete)

    async def run(self) -> None:
        """Count until cancelled."""
        try:
            while True:
                began_s = self._clock.now_s()
                await self.run_once()
                took_s = self._clock.now_s() - began_s
                pause_s = max(PAUSE_S, PAUSE_SHARE * took_s) if self.absent else math.inf
                await wait_woken(self._was_updated, timeout_s=pause_s)
        finally:
            UNAVAILABLE.set(0)

    async def run_once(self) -> None:
        """Count if something has changed. If other bookies are absent meanwhile, the count ends
        without a result, and starts over."""
        self._was_updated.clear()
        absent, updater, ledger_map = self.absent, self._updater, self._updater.ledger_map
        change_count, is_complete = updater.change_count, updater.is_complete
        if self.found_for(absent) is not None and change_count == self._change_count:
            return
        count, ids, restored_by = 0, list[int](), Counter[BookieId]()
        count_least, first = ledger_map.write_quorum_least, 0
        while True:
            ledger_ids, next_first = ledger_map.naming_several(
                absent, count_least=count_least, first=first
            )
            for ledger_id in ledger_ids:
                ledger = ledger_map.get(ledger_id)
                if ledger is None or not has_unavailable_entry(ledger, absent):
                    continue
                count += 1
                ids += [ledger_id] if len(ids) < IDS_KEPT_MAX else []
                named = ledger.bookies & absent
                for bookie in named:  # a bookie that does not suffice alone is listed with 0
                    restored_by[bookie] += not has_unavailable_entry(ledger, named - {bookie})
            if next_first is None:
                break
            first = next_first
            await asyncio.sleep(0)
            if self.absent != absent:
                return
        UNAVAILABLE.set(count)
        found = UnavailableLedgers(count=count, first=tuple(ids), restored_by=dict(restored_by))
        counted = absent, found, is_complete
        has_changed, self._counted = counted != self._counted, counted
        self._change_count = change_count
        if has_changed:
            self._on_count()


def has_unavailable_entry(ledger: MappedLedger, absent: Collection[BookieId]) -> bool:
    """True if all copies of some entry are on the absent bookies."""
    return copies_left(ledger, absent) == 0
