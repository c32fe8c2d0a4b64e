"""Building the index, and keeping it true: one walk over all metadata, then what the watch tells.

A ledger that was created, changed or deleted is read again; after a reconnection, which may have swallowed
events, all of them are. One unreadable ledger stops nothing.
"""

import asyncio
from collections.abc import Collection

from auditor.index.ledger_index import LedgerIndex
from ledgers.clock import Clock
from ledgers.manager import LedgerManager
from ledgers.store import MetadataStore


class IndexKeeper:
    """``index`` is what it keeps. ``run`` ends by cancellation or with the session."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        manager: LedgerManager,
        clock: Clock,
        rescan_interval_s: float,
    ) -> None:
        self._store = store
        self._manager = manager
        self._clock = clock
        self._rescan_interval_s = rescan_interval_s
        self.index = LedgerIndex()
        self.completed_count = 0
        """Scans that were completed: 0 means that the index is still being built."""
        self.change_count = 0
        """Grows with every change of the index, and every completed scan."""
        self._touched: set[int] = set()
        self._changed = asyncio.Condition()

    @property
    def is_complete(self) -> bool:
        """Whether every ledger is known, as far as anything was told: no scan is under way or due."""
        raise NotImplementedError

    async def run(self) -> None:
        """Raises SessionLostError when that is over."""
        raise NotImplementedError

    def rescan(self) -> None:
        """All metadata is to be read again. Returns at once; ``completed_count`` tells."""
        raise NotImplementedError

    async def wait_change(self, seen: int) -> None:
        """Return when ``change_count`` is beyond ``seen``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.change_count > seen)

    def take_touched(self) -> Collection[int]:
        """The ledgers put or removed since this was called last: the caller's to look at, once."""
        touched, self._touched = self._touched, set()
        return touched
