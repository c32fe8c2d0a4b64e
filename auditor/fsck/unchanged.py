"""Which ledgers' metadata is as it was: asked of ZooKeeper without reading it."""

import asyncio
from collections.abc import Mapping

from auditor.fsck.levels import FsckOptions
from auditor.fsck.read_session import read_session
from ledgers.manager import LedgerManager

ASKED_AT_ONCE = 500


async def unchanged(options: FsckOptions, known: Mapping[int, int]) -> list[int]:
    """Those ledgers whose metadata is at the version that is ``known``, ascending. In a session of its own.

    One that is gone is not among them. Raises UnavailableError, SettingsError.
    """
    async with read_session(options.metadata_service_uri, options.timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)

        async def version(ledger_id: int) -> int | None:
            stat = await store.exists(manager.path(ledger_id))
            return None if stat is None else stat.version

        ledger_ids, same = sorted(known), []
        for start in range(0, len(ledger_ids), ASKED_AT_ONCE):
            asked = ledger_ids[start : start + ASKED_AT_ONCE]
            for each, found in zip(asked, await asyncio.gather(*map(version, asked)), strict=True):
                if found == known[each]:
                    same.append(each)
        return same
