"""Which ledgers' metadata is as it was: asked of ZooKeeper without reading it."""

import asyncio
from collections.abc import Mapping

from auditor.fsck.levels import FsckOptions
from auditor.fsck.read_session import read_session
from ledgers.errors import UnauthorizedError
from ledgers.manager import LedgerManager

READS_AT_ONCE = 500

Written = tuple[int, int]
"""Which writing of a ledger's metadata: the znode's version, and ``mtime_ms``, as one that was deleted and made anew
counts from 0 again."""


async def unchanged(options: FsckOptions, known: Mapping[int, Written]) -> list[int]:
    """Those ledgers whose metadata is as it was when it was ``known``, ascending. In a session of its own.

    One that is gone is not among them, nor one that ACLs shut away. Raises UnavailableError, SettingsError.
    """
    async with read_session(options.metadata_service_uri, options.timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)

        async def written(ledger_id: int) -> Written | None:
            try:
                stat = await store.exists(manager.path(ledger_id))
            except UnauthorizedError:  # ZooKeeper 3.9.5; whoever looks at it tells of it
                return None
            return None if stat is None else (stat.version, stat.mtime_ms)

        ledger_ids, same = sorted(known), []
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            asked = ledger_ids[start : start + READS_AT_ONCE]
            for each, found in zip(asked, await asyncio.gather(*map(written, asked)), strict=True):
                if found == known[each]:
                    same.append(each)
        return same
