"""Ledger ids in large numbers: listed once per run, and sent to executors in few bytes."""

import sys
import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

from auditor.fsck.levels import DEFAULT_TIMEOUTS, SessionTimeouts
from auditor.fsck.read_session import read_session
from ledgers.manager import LedgerManager

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
