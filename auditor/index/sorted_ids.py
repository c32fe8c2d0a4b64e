"""A set of ledger ids in order, at little more than eight bytes each."""

from array import array
from bisect import bisect_left, bisect_right

BLOCK_MAX = 2048
"""Ids in one block: adding one moves at most so many."""


class SortedIds:
    """Ids below 2^63, ascending. Blocks of them, none empty; ids come mostly at the end."""

    __slots__ = ("_blocks", "_firsts", "_size")

    def __init__(self) -> None:
        self._blocks: list[array[int]] = []
        self._firsts: list[int] = []
        """Of each block the first id, or a lower one that has gone."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, ledger_id: int) -> None:
        """It must not be in yet."""
        if not self._blocks:
            self._blocks.append(array("q"))
            self._firsts.append(ledger_id)
        number = max(0, bisect_right(self._firsts, ledger_id) - 1)
        block = self._blocks[number]
        block.insert(bisect_left(block, ledger_id), ledger_id)
        self._firsts[number] = block[0]
        self._size += 1
        if len(block) > BLOCK_MAX:
            self._split(number)

    def remove(self, ledger_id: int) -> None:
        """It must be in."""
        number = bisect_right(self._firsts, ledger_id) - 1
        block = self._blocks[number]
        del block[bisect_left(block, ledger_id)]
        self._size -= 1
        if not block:
            del self._blocks[number], self._firsts[number]

    def to_list(self) -> list[int]:
        ids: list[int] = []
        for block in self._blocks:
            ids += block.tolist()
        return ids

    def between(self, first: int, stop: int | None) -> list[int]:
        """Those from ``first`` to before ``stop``; None: to the end."""
        ids: list[int] = []
        for number in range(max(0, bisect_right(self._firsts, first) - 1), len(self._blocks)):
            block = self._blocks[number]
            if stop is not None and block[0] >= stop:
                break
            end = len(block) if stop is None else bisect_left(block, stop)
            ids += block[bisect_left(block, first) : end]
        return ids

    def _split(self, number: int) -> None:
        """Copies, as a slice is no larger than it must be."""
        block = self._blocks[number]
        middle = len(block) // 2
        self._blocks[number : number + 1] = [block[:middle], block[middle:]]
        self._firsts.insert(number + 1, block[middle])
