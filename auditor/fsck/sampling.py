"""Chooses the entries that a sample reads: the same entries of each copy. Pure."""

from collections.abc import Iterator
from math import ceil, floor

_MIX = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


def sampled(first: int, last: int, *, share: float, seed: int) -> Iterator[int]:
    """Yield about ``share`` of the ids from the first to the last, ascending: one of each
    ``1 / share`` consecutive ids.

    The seed and the position decide which one, so that every reader of the ledger draws the same
    entries. Each group of ids has a draw of its own, so that striping does not favour a bookie.
    """
    assert 0 < share <= 1, share
    previous = first - 1
    for row in range(floor(first * share), ceil((last + 1) * share)):
        entry_id = floor((row + _drawn(row, seed)) / share)
        if previous < entry_id <= last:
            previous = entry_id
            yield entry_id


def _drawn(row: int, seed: int) -> float:
    """Return a pseudo-random number, evenly distributed from 0 (inclusive) to 1 (exclusive)."""
    mixed = (row * _MIX + seed * 0xD1B5_4A32_D192_ED03 + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 31)) * _MIX) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
    return (mixed >> 11) / (1 << 53)
