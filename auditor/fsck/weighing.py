"""How much there is to be read of each ledger, by its metadata: what parts of a run are cut by, and
its progress told.

No bookie is asked. The unit is a small copy; a large one weighs as many as are read in its time.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence

from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.read_session import read_session
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.metadata import LedgerMetadata

LIGHTEST = 1
"""Of a ledger of which nothing is read but metadata, or nobody knows."""
COPY_BYTES = 4_096
"""Stored bytes that take about as long as a copy does, however small."""
READS_AT_ONCE = 500

OnWeighed = Callable[[int], None]
"""Told how many ledgers are weighed so far."""


def is_weighed(level: Level) -> bool:
    """At the others ledgers are much alike, and reading their metadata would be half of the
    work."""
    return level in (Level.SAMPLE, Level.FULL)


def weight_of(metadata: LedgerMetadata, options: FsckOptions) -> int:
    """Of an open ledger as far as the metadata tells: nobody knows yet how far it will be
    written."""
    share = options.sample_share if options.level is Level.SAMPLE else 1.0
    entries = metadata.last_segment.first_entry_id
    if metadata.is_closed:
        entries = metadata.last_entry_id + 1
    between = share * (entries + metadata.length / COPY_BYTES)
    ends = 2 * len(metadata.segments)
    return max(LIGHTEST, round(metadata.write_quorum * (ends + between)))


async def weigh(
    options: FsckOptions, ledger_ids: Sequence[int], on_weighed: OnWeighed = lambda count: None
) -> "array[int]":
    """The weight of each, in their order, in a session of its own.

    Raises UnavailableError, SettingsError. What is gone, or cannot be read, weighs least.
    """
    weights = array("q")
    async with read_session(options.metadata_service_uri, options.timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)

        async def weight(ledger_id: int) -> int:
            try:
                return weight_of((await manager.read(ledger_id)).metadata, options)
            except (NoSuchLedgerError, CorruptionError, UnauthorizedError):
                return LIGHTEST

        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            some = ledger_ids[start : start + READS_AT_ONCE]
            weights.extend(await asyncio.gather(*map(weight, some)))
            on_weighed(len(weights))
    return weights
