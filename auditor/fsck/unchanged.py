"""Finds ledgers whose metadata is unchanged, without reading the metadata."""

from collections.abc import Mapping

from auditor.fsck.levels import FsckOptions
from auditor.fsck.read_session import read_session
from ledgers.errors import UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.operations.tasks import gather_in_parts

READS_AT_ONCE = 500

Written = tuple[int, int]
"""Identifies a write to a ledger's metadata: the znode's version and ``mtime_ms``. The version
alone does not: it starts at 0 again if a ledger is deleted and created again."""


async def unchanged(options: FsckOptions, known: Mapping[int, Written]) -> list[int]:
    """Return the ledgers whose metadata is as ``known``, ascending. Opens a session of its own.

    A deleted ledger is left out, and so is one whose ACL denies access. Raises UnavailableError,
    SettingsError.
    """
    async with read_session(options.metadata_service_uri, options.timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)

        async def written(ledger_id: int) -> Written | None:
            try:
                stat = await store.exists(manager.path(ledger_id))
            except UnauthorizedError:  # ZooKeeper 3.9.5; the check of the ledger reports it
                return None
            return None if stat is None else (stat.version, stat.mtime_ms)

        ledger_ids = sorted(known)
        now = await gather_in_parts(written, ledger_ids, at_once=READS_AT_ONCE)
        return [i for i, found in zip(ledger_ids, now, strict=True) if found == known[i]]
