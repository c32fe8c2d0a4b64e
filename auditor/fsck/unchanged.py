"""Which ledgers' metadata is as it was: asked of ZooKeeper without reading it."""

from collections.abc import Mapping

from auditor.fsck.levels import FsckOptions
from auditor.fsck.read_session import read_session
from ledgers.errors import UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.operations.tasks import gather_in_parts

READS_AT_ONCE = 500

Written = tuple[int, int]
"""Which writing of a ledger's metadata: the znode's version, and ``mtime_ms``, as one that was
deleted and made anew counts from 0 again."""


async def unchanged(options: FsckOptions, known: Mapping[int, Written]) -> list[int]:
    """Those ledgers whose metadata is as it was when it was ``known``, ascending. In a session of
    its own.

    One that is gone is not among them, nor one that ACLs shut away. Raises UnavailableError,
    SettingsError.
    """
    async with read_session(options.metadata_service_uri, options.timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)

        async def written(ledger_id: int) -> Written | None:
            try:
                stat = await store.exists(manager.path(ledger_id))
            except UnauthorizedError:  # ZooKeeper 3.9.5; whoever looks at it tells of it
                return None
            return None if stat is None else (stat.version, stat.mtime_ms)

        ledger_ids = sorted(known)
        now = await gather_in_parts(written, ledger_ids, at_once=READS_AT_ONCE)
        return [i for i, found in zip(ledger_ids, now, strict=True) if found == known[i]]
