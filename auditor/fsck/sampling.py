"""Which entries a run looks at that does not look at all of them. Pure; the same entries of each
copy."""

from collections.abc import Iterator
from math import ceil, floor

_MIX = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


def sampled(first: int, last: int, *, share: float, seed: int) -> Iterator[int]:
    """About ``share`` of the ids from the first to the last, ascending: one of each ``1 / share``
    in a row.

    Which one of them, the seed decides, and the id: whoever else looks at the ledger reads the same
    entries. One drawn anew from each row, so that striping does not favour a bookie.
    """
    assert 0 < share <= 1, share
    previous = first - 1
    for row in range(floor(first * share), ceil((last + 1) * share)):
        entry_id = floor((row + _drawn(row, seed)) / share)
        if previous < entry_id <= last:
            previous = entry_id
            yield entry_id


def _drawn(row: int, seed: int) -> float:
    """0 to 1, evenly, without rhyme."""
    mixed = (row * _MIX + seed * 0xD1B5_4A32_D192_ED03 + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 31)) * _MIX) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
    return (mixed >> 11) / (1 << 53)
