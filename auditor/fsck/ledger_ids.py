"""Ledger ids in numbers: listed once, fixed from then on, and sent about in few bytes."""

import sys
import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

from auditor.fsck.levels import DEFAULT_TIMEOUTS, SessionTimeouts
from auditor.fsck.read_session import read_session
from ledgers.manager import LedgerManager

OnListed = Callable[[int], None]
"""Told how many ledgers are listed so far."""


async def list_ledger_ids(
    metadata_service_uri: str,
    *,
    timeouts: SessionTimeouts = DEFAULT_TIMEOUTS,
    on_listed: OnListed = lambda count: None,
) -> "array[int]":
    """Every ledger of the cluster, ascending, in a session of its own: eight bytes each.

    Raises UnavailableError when the listing cannot be had whole (rule S8); SettingsError.
    """
    ledger_ids = array("q")
    async with read_session(metadata_service_uri, timeouts) as (store, uri):
        manager = await LedgerManager.open(store, uri)
        async for listed in manager.ledger_ids():
            ledger_ids.extend(listed)
            on_listed(len(ledger_ids))
    return array("q", sorted(ledger_ids))  # a walk's directories come in order, but for long ids


def cut(ledger_ids: Sequence[int], *, count: int) -> list[Sequence[int]]:
    """Up to ``count`` parts of ascending ids, none empty, that differ by one ledger at most.

    By number and not by directory of ZooKeeper's tree, of which one may hold 10,000 ledgers and the
    next one.
    """
    assert count >= 1, count
    size = len(ledger_ids)
    count = min(count, size)
    bounds = [size * number // count for number in range(count + 1)] if count else []
    return [ledger_ids[start:stop] for start, stop in pairwise(bounds)]


def pack(ledger_ids: Sequence[int]) -> bytes:
    """Ascending ids, as the steps between them: some bytes for a dense range, however long it
    is."""
    steps = array("Q")
    before = 0
    for ledger_id in ledger_ids:
        assert ledger_id >= before, (before, ledger_id)
        steps.append(ledger_id - before)
        before = ledger_id
    return zlib.compress(_in_little_endian(steps).tobytes(), level=1)


def unpack(packed: bytes) -> "array[int]":
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
