"""Ledger ids in large numbers: listed once per run, and sent to executors in few bytes.

Estimates from metadata how much must be read of each ledger. Sizes the parts of a run, and
measures its progress.

No bookie is asked. The unit is one small copy. A large copy weighs as many units as small ones are
read in the same time.
"""

import asyncio
import sys
import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

from auditor.fsck.executor import read_session
from auditor.fsck.levels import DEFAULT_TIMEOUTS, FsckOptions, Level, SessionTimeouts
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.model import LedgerMetadata

OnListed = Callable[[int], None]
"""Receives the number of ledgers listed so far."""


async def list_ledger_ids(
    metadata_service_uri: str,
    *,
    timeouts: SessionTimeouts = DEFAULT_TIMEOUTS,
    on_listed: OnListed = lambda count: None,
) -> "array[int]":
    """Return the ids of all ledgers of the cluster, ascending, in eight bytes each. Opens a session
    of its own.

    Raises UnavailableError if the listing is incomplete (rule S8); SettingsError.
    """
    ledger_ids = array("q")
    async with read_session(metadata_service_uri, timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)
        async for listed in manager.ledger_ids():
            ledger_ids.extend(listed)
            on_listed(len(ledger_ids))
    return array("q", sorted(ledger_ids))  # directories are in order, except those of long ids


def cut(ledger_ids: Sequence[int], *, count: int) -> list[Sequence[int]]:
    """Return up to ``count`` parts of the ascending ids. No part is empty, and sizes differ by one
    at most.

    Directories of ZooKeeper's tree would not do as parts: one may hold 10,000 ledgers, and the next
    one a single ledger.
    """
    assert count >= 1, count
    size = len(ledger_ids)
    count = min(count, size)
    bounds = [size * number // count for number in range(count + 1)] if count else []
    return [ledger_ids[start:stop] for start, stop in pairwise(bounds)]


def pack(ledger_ids: Sequence[int]) -> bytes:
    """Return ascending ids as compressed differences. A dense range takes some bytes, however long
    it is."""
    steps = array("Q")
    before = 0
    for ledger_id in ledger_ids:
        assert ledger_id >= before, (before, ledger_id)
        steps.append(ledger_id - before)
        before = ledger_id
    return zlib.compress(_in_little_endian(steps).tobytes(), level=1)


def unpack(packed: bytes) -> "array[int]":
    """Return the ids that ``pack`` was given."""
    steps = array("Q", zlib.decompress(packed))
    ledger_ids = array("q")
    ledger_id = 0
    for step in _in_little_endian(steps):
        ledger_id += step
        ledger_ids.append(ledger_id)
    return ledger_ids


def _in_little_endian(steps: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        steps.byteswap()
    return steps


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
