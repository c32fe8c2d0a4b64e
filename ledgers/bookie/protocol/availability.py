"""Which entries of a ledger a bookie stores: the payload of GET_LIST_OF_ENTRIES_OF_LEDGER.

A 64-byte header (version, number of groups, zeros), then groups of 24 bytes: first and last start
of a periodic sequence, the length of its runs, its period. BookKeeper's encoder (class
AvailabilityOfEntriesOfLedger) emits one group for each run, but its decoder takes folded groups
too, and so do we.
"""

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ledgers.errors import CorruptionError

RUN_COUNT_MAX = 1_000_000
"""A folded group of 24 bytes can claim 2^63 runs. A real list is a frame of one run a group at
most."""

_HEADER = struct.Struct(">ii56x")
_GROUP = struct.Struct(">qqii")


def decode_availability(payload: bytes) -> tuple[range, ...]:
    """Runs of consecutive entry ids, ascending, apart or adjacent. Raises CorruptionError."""
    if len(payload) < _HEADER.size:
        raise CorruptionError("list of entries is cut short", payload_bytes=len(payload))
    version, group_count = _HEADER.unpack_from(payload)
    if version != 0:
        raise CorruptionError("list of entries of an unknown version", version=version)
    if len(payload) != _HEADER.size + group_count * _GROUP.size:
        raise CorruptionError("list of entries of the wrong length", group_count=group_count)
    runs = tuple(_runs(_GROUP.iter_unpack(memoryview(payload)[_HEADER.size :])))
    if any(after.start < before.stop for before, after in pairwise(runs)):
        raise CorruptionError("list of entries is out of order")
    return runs


def _runs(groups: Iterable[tuple[int, int, int, int]]) -> Iterator[range]:
    run_count = 0
    for first_start, last_start, run_size, period in groups:
        # One run: both starts are equal and the period is 0. More: BookKeeper divides by it.
        is_sane = first_start >= 0 and run_size >= 1 and last_start >= first_start
        if not is_sane or (last_start > first_start and period < 1):
            raise CorruptionError("bad group in a list of entries", first_start=first_start)
        step = max(period, 1)
        run_count += (last_start - first_start) // step + 1
        if run_count > RUN_COUNT_MAX:
            raise CorruptionError("too many runs in a list of entries", run_count=run_count)
        for start in range(first_start, last_start + 1, step):
            yield range(start, start + run_size)
