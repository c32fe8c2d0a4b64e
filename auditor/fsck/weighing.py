"""Estimates from metadata how much must be read of each ledger. Sizes the parts of a run, and
measures its progress.

No bookie is asked. The unit is one small copy. A large copy weighs as many units as small ones are
read in the same time.
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
"""Weight of a ledger of which only metadata is read, or whose metadata cannot be read."""
COPY_BYTES = 4_096
"""Stored bytes that take as long to read as any small copy does."""
READS_AT_ONCE = 500

OnWeighed = Callable[[int], None]
"""Receives the number of ledgers weighed so far."""


def is_weighed(level: Level) -> bool:
    """True if ledgers are weighed at this level. At the others they are much alike, and reading
    their metadata would be half of the work."""
    return level in (Level.SAMPLE, Level.FULL)


def weight_of(metadata: LedgerMetadata, options: FsckOptions) -> int:
    """Return the number of units to read. An open ledger counts without its last segment, whose end
    is unknown."""
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
    """Return the weight of each ledger, in the given order. Opens a session of its own.

    A deleted or unreadable ledger has the least weight. Raises UnavailableError, SettingsError.
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
