"""``EntryRuns``: ascending entry ids, in few bytes for runs of consecutive ids.

A bookie that was reformatted lacks every entry of a ledger, and there may be ten million of them. A
bitmap keeps that small.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import overload

from pyroaring import BitMap64


class EntryRuns(Sequence[int]):
    """Ascending entry ids. Filled by ``append`` and ``extend``; afterwards only read."""

    __slots__ = ("_ids",)

    def __init__(self, entry_ids: Iterable[int] = ()) -> None:
        # BitMap64 refuses an array of signed numbers.
        self._ids = BitMap64(iter(entry_ids) if isinstance(entry_ids, array) else entry_ids)

    def append(self, entry_id: int) -> None:
        """Add an id."""
        self._ids.add(entry_id)

    def extend(self, others: "EntryRuns") -> None:
        """Add ids."""
        self._ids |= others._ids

    def between(self, first: int, last: int) -> "EntryRuns":
        """Return the ids from ``first`` to ``last``, both inclusive."""
        found = EntryRuns()
        if self and first <= last:
            found._ids = self._ids.copy()
            found._ids.remove_range(0, max(0, first))
            found._ids.remove_range(last + 1, max(last, self[-1]) + 1)
        return found

    @property
    def runs(self) -> list[range]:
        """The runs of consecutive ids."""
        return list(self.each_run())

    def each_run(self) -> Iterator[range]:
        """Yield the runs of consecutive ids. There may be millions."""
        ids = self._ids
        for first, last in zip(ids - ids.shift(1), ids - ids.shift(-1), strict=True):
            yield range(first, last + 1)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, entry_id: object) -> bool:
        return isinstance(entry_id, int) and entry_id >= 0 and entry_id in self._ids

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> "list[int]": ...
    def __getitem__(self, position: int | slice) -> "int | list[int]":
        """Return an id, or a list of ids for a slice. Slices are as short as one transfer."""
        if isinstance(position, slice):
            return list(self._ids[position])
        return self._ids[position]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EntryRuns) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash((len(self), self[0], self[-1])) if self else 0

    def __repr__(self) -> str:
        return f"EntryRuns({self.runs})"


def overlaps(parts: Iterable[EntryRuns]) -> Iterator[tuple[int, int]]:
    """Yield, ascending, each id at which a run begins or ends, and how many of the ``parts``
    contain the ids from there on. Works on runs, because a bookie may lack millions of entries."""
    depth = 0
    for entry_id, step in merge(*map(_edges, parts)):
        depth += step
        yield entry_id, depth


def _edges(entries: EntryRuns) -> Iterator[tuple[int, int]]:
    """Yield where runs begin (1) and end (-1). At the same id the end comes first, also after
    merging."""
    for run in entries.each_run():
        yield run.start, 1
        yield run.stop, -1


def merged(first: EntryRuns, second: EntryRuns) -> EntryRuns:
    """Return the ids of both."""
    found = EntryRuns()
    found.extend(first)
    found.extend(second)
    return found


NO_ENTRIES = EntryRuns()
