"""Reads from ZooKeeper alone: the ids of a run's ledgers, and the work for each.

The work is estimated from metadata; it sizes the parts of a run and measures its progress. Its unit
is one small copy: a large copy counts as many units as small copies are read in the same time.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence

from auditor.fsck.executor import read_session
from auditor.fsck.options import FsckOptions, Level
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.manager import LedgerManager, OnHidden
from ledgers.model import LedgerMetadata

READS_AT_ONCE = 500
LEDGER_WORK_MIN = 1
"""Work for a ledger of which only metadata is read, or whose metadata cannot be read."""
COPY_BYTES = 4_096
"""Stored bytes that take as long to read as any small copy does."""

OnCount = Callable[[int], None]
"""Receives the number of ledgers listed or estimated so far."""


async def list_ledger_ids(
    options: FsckOptions,
    *,
    on_listed: OnCount = lambda count: None,
    on_hidden: OnHidden | None = None,
) -> "array[int]":
    """Return the ids of all ledgers of the cluster, ascending, in eight bytes each. Opens a session
    of its own. Ledgers created before the call are among them.

    Raises UnavailableError if the listing is incomplete (rule S8); UnauthorizedError if an ACL
    hides a directory and ``on_hidden`` is None; SettingsError.
    """
    ledger_ids = array("q")
    address = options.metadata_service_uri
    async with read_session(address, options.security, options.timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)
        await manager.sync(0)  # the ZooKeeper server of this session may lag
        async for listed in manager.ledger_ids(on_hidden=on_hidden):
            ledger_ids.extend(listed)
            on_listed(len(ledger_ids))
    return array("q", sorted(ledger_ids))  # directories are in order, except those of long ids


def is_estimated(level: Level) -> bool:
    """True if the work is estimated at this level. At the others ledgers are much alike, and
    reading their metadata would be half of the work."""
    return level in (Level.SAMPLE, Level.FULL)


def work_of(metadata: LedgerMetadata, options: FsckOptions) -> int:
    """Return the number of units to read. An open ledger counts without its last segment, whose end
    is unknown."""
    share = options.sample_share if options.level is Level.SAMPLE else 1.0
    entries = metadata.last_segment.first_entry_id
    if metadata.is_closed:
        entries = metadata.last_entry_id + 1
    between = share * (entries + metadata.length / COPY_BYTES)
    ends = 2 * len(metadata.segments)
    return max(LEDGER_WORK_MIN, round(metadata.write_quorum * (ends + between)))


async def estimate_work(
    options: FsckOptions, ledger_ids: Sequence[int], on_estimated: OnCount = lambda count: None
) -> "array[int]":
    """Return the work for each ledger, in the given order. Opens a session of its own.

    A deleted or unreadable ledger counts ``LEDGER_WORK_MIN``. Raises UnavailableError,
    SettingsError.
    """
    work = array("q")
    address = options.metadata_service_uri
    async with read_session(address, options.security, options.timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)

        async def estimate(ledger_id: int) -> int:
            try:
                return work_of((await manager.read(ledger_id)).metadata, options)
            except (NoSuchLedgerError, CorruptionError, UnauthorizedError):
                return LEDGER_WORK_MIN

        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            some = ledger_ids[start : start + READS_AT_ONCE]
            work.extend(await asyncio.gather(*map(estimate, some)))
            on_estimated(len(work))
    return work
