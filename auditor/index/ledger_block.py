"""Some hundred ledgers with neighbouring ids, in arrays: a Python object each would weigh ten times
as much."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

WASTE_MIN = 1024
"""Unused words of a block below which it is not worth tidying up."""


class Row(NamedTuple):
    """One ledger. ``words``: numbers below 2^32 whose meaning is the index's."""

    czxid: int
    mzxid: int
    length: int
    words: Sequence[int]


class LedgerBlock:
    """Rows by ledger id. Column by column; the words of all rows lie in one array, in any order."""

    __slots__ = ("_czxids", "_lengths", "_mzxids", "_offsets", "_sizes", "_waste", "_words", "ids")

    def __init__(self) -> None:
        self.ids = array("q")
        """Ascending."""
        self._czxids, self._mzxids, self._lengths = array("q"), array("q"), array("q")
        self._offsets, self._sizes = array("I"), array("I")
        """Where in ``_words`` a row's begin, and how many they are."""
        self._words = array("I")
        self._waste = 0
        """Words that are no row's any more."""

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ledger_id: int) -> int | None:
        """Its position."""
        position = bisect_left(self.ids, ledger_id)
        is_found = position < len(self.ids) and self.ids[position] == ledger_id
        return position if is_found else None

    def mzxid(self, position: int) -> int:
        return self._mzxids[position]

    def row(self, position: int) -> Row:
        begin = self._offsets[position]
        return Row(
            self._czxids[position],
            self._mzxids[position],
            self._lengths[position],
            self._words[begin : begin + self._sizes[position]],
        )

    def insert(self, ledger_id: int, row: Row) -> None:
        """It must not be in yet."""
        position = bisect_left(self.ids, ledger_id)
        self.ids.insert(position, ledger_id)
        self._czxids.insert(position, row.czxid)
        self._mzxids.insert(position, row.mzxid)
        self._lengths.insert(position, row.length)
        self._offsets.insert(position, len(self._words))
        self._sizes.insert(position, len(row.words))
        self._words.extend(row.words)

    def replace(self, position: int, row: Row) -> None:
        self._czxids[position] = row.czxid
        self._mzxids[position] = row.mzxid
        self._lengths[position] = row.length
        size = self._sizes[position]
        if size == len(row.words):
            begin = self._offsets[position]
            self._words[begin : begin + size] = array("I", row.words)
        else:
            self._offsets[position] = len(self._words)
            self._sizes[position] = len(row.words)
            self._words.extend(row.words)
            self._add_waste(size)

    def delete(self, position: int) -> None:
        size = self._sizes[position]
        for column in self._columns:
            del column[position]
        self._add_waste(size)

    def split(self) -> "tuple[LedgerBlock, LedgerBlock]":
        middle = len(self) // 2
        return self._part(0, middle), self._part(middle, len(self))

    @property
    def _columns(self) -> "tuple[array[int], ...]":
        return (
            *(self.ids, self._czxids, self._mzxids),
            *(self._lengths, self._offsets, self._sizes),
        )

    def _part(self, first: int, stop: int) -> "LedgerBlock":
        part = LedgerBlock()
        part.ids = self.ids[first:stop]
        part._czxids, part._mzxids = self._czxids[first:stop], self._mzxids[first:stop]
        part._lengths, part._sizes = self._lengths[first:stop], self._sizes[first:stop]
        part._offsets, part._words = self._gathered(first, stop)
        return part

    def _add_waste(self, size: int) -> None:
        self._waste += size
        if self._waste > max(WASTE_MIN, len(self._words) // 2):
            self._offsets, self._words = self._gathered(0, len(self))
            self._waste = 0

    def _gathered(self, first: int, stop: int) -> "tuple[array[int], array[int]]":
        """Offsets and words of these rows alone, one after the other."""
        offsets, words = array("I"), array("I")
        for begin, size in zip(self._offsets[first:stop], self._sizes[first:stop], strict=True):
            offsets.append(len(words))
            words += self._words[begin : begin + size]
        return offsets, words[:]  # a copy is no larger than it must be
