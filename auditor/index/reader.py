"""Reading ledgers' metadata into the index, many at a time.

One that is gone leaves the index; one that cannot be read is in it as unreadable. One part at a
time: that a ledger is gone is never undone by a read that was made before.
"""

import asyncio
from collections.abc import Sequence

from auditor.index.ledger_index import LedgerIndex
from ledgers.errors import CorruptionError, NoNodeError, UnauthorizedError
from ledgers.formats.metadata_codec import parse_metadata
from ledgers.manager import LedgerManager
from ledgers.store import MetadataStore, Stat

READS_AT_ONCE = 500
"""In one part; it blocks the loop for some milliseconds when it has come."""


class IndexReader:
    """Feeds ``index``. One loop's."""

    def __init__(self, store: MetadataStore, manager: LedgerManager, index: LedgerIndex) -> None:
        self._store, self._manager, self._index = store, manager, index
        self._reading = asyncio.Lock()

    async def read(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those of them that the index did not know, or knew otherwise. Raises UnavailableError."""
        assert len(ledger_ids) <= READS_AT_ONCE, len(ledger_ids)
        async with self._reading:
            found = await asyncio.gather(*map(self._find, ledger_ids))
            return [
                ledger_id
                for ledger_id, result in zip(ledger_ids, found, strict=True)
                if self._apply(ledger_id, result)
            ]

    async def _find(self, ledger_id: int) -> tuple[bytes, Stat | None] | None:
        """Bytes and stat; no bytes, or neither, where ACLs forbid it; None when it is gone."""
        path = self._manager.path(ledger_id)
        try:
            return await self._store.get(path)
        except NoNodeError:
            return None
        except UnauthorizedError:
            pass
        try:
            stat = await self._store.exists(path)
        except UnauthorizedError:  # newer servers (3.9.5); of what is gone they say that it is
            return b"", None
        return None if stat is None else (b"", stat)

    def _apply(self, ledger_id: int, found: tuple[bytes, Stat | None] | None) -> bool:
        if found is None:
            return self._index.remove(ledger_id)
        data, stat = found
        if stat is None:
            return self._index.put_unreadable(ledger_id, None)
        if self._index.is_known(
            ledger_id, mzxid=stat.mzxid
        ):  # nearly always, when all are read again
            return False
        try:
            return self._index.put(ledger_id, parse_metadata(data), stat)
        except CorruptionError:
            return self._index.put_unreadable(ledger_id, stat)
