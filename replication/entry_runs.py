"""``EntryRuns``: ascending entry ids, stored as runs of consecutive ids.

A bookie that was reformatted lacks every entry of a ledger, and there may be ten million of them.
Runs keep that small.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain
from typing import overload


class EntryRuns(Sequence[int]):
    """Ascending entry ids. Filled by ``append`` and ``extend``; afterwards only read."""

    __slots__ = ("_ranks", "_starts", "_stops")

    def __init__(self, entry_ids: Iterable[int] = ()) -> None:
        self._starts = array("q")
        self._stops = array("q")
        self._ranks = array("q", [0])
        """Number of ids before each run, and the total at the end."""
        for entry_id in entry_ids:
            self.append(entry_id)

    def append(self, entry_id: int) -> None:
        """Add an id that is greater than all before it."""
        if self._stops and self._stops[-1] == entry_id:
            self._stops[-1] += 1
            self._ranks[-1] += 1
            return
        assert not self._stops or self._stops[-1] < entry_id, (self, entry_id)
        self._append_run(entry_id, entry_id + 1)

    def extend(self, others: "EntryRuns") -> None:
        """Add ids that are all greater than those before."""
        for run in others.runs:
            self.append(run.start)
            self._stops[-1] = run.stop
            self._ranks[-1] += len(run) - 1

    def between(self, first: int, last: int) -> "EntryRuns":
        """Return the ids from ``first`` to ``last``, both inclusive."""
        begin = bisect_right(self._stops, first)
        end = bisect_right(self._starts, last)
        found = EntryRuns()
        for start, stop in zip(self._starts[begin:end], self._stops[begin:end], strict=True):
            found._append_run(max(start, first), min(stop, last + 1))
        return found

    @property
    def runs(self) -> list[range]:
        """The runs of consecutive ids."""
        return list(self.each_run())

    def each_run(self) -> Iterator[range]:
        """Yield the runs of consecutive ids. There may be millions."""
        return map(range, self._starts, self._stops)

    def __len__(self) -> int:
        return self._ranks[-1]

    def __contains__(self, entry_id: object) -> bool:
        if not isinstance(entry_id, int):
            return False
        position = bisect_right(self._starts, entry_id) - 1
        return position >= 0 and entry_id < self._stops[position]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(range, self._starts, self._stops))

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> "list[int]": ...
    def __getitem__(self, position: int | slice) -> "int | list[int]":
        """Return an id, or a list of ids for a slice. Slices are as short as one transfer."""
        if isinstance(position, slice):
            start, stop, step = position.indices(len(self))
            if step != 1:
                raise ValueError("a slice of entry runs has no step")
            return self._listed(start, stop)
        rank = position + len(self) if position < 0 else position
        if not 0 <= rank < len(self):
            raise IndexError(position)
        run = bisect_right(self._ranks, rank) - 1
        return self._starts[run] + rank - self._ranks[run]

    def _listed(self, start: int, stop: int) -> list[int]:
        """Return the ids of the ranks from ``start`` to ``stop``, exclusive."""
        listed: list[int] = []
        run = bisect_right(self._ranks, start) - 1
        while (left := stop - start - len(listed)) > 0:
            first = self._starts[run] + max(0, start - self._ranks[run])
            listed.extend(range(first, min(first + left, self._stops[run])))
            run += 1
        return listed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EntryRuns) and (self._starts, self._stops) == (
            other._starts,
            other._stops,
        )

    def __hash__(self) -> int:
        return hash((self._starts.tobytes(), self._stops.tobytes()))

    def __repr__(self) -> str:
        return f"EntryRuns({self.runs})"

    def _append_run(self, start: int, stop: int) -> None:
        self._starts.append(start)
        self._stops.append(stop)
        self._ranks.append(self._ranks[-1] + stop - start)


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
    """Return the ids of both, which must be disjoint."""
    return EntryRuns(merge(first, second)) if first and second else first or second


NO_ENTRIES = EntryRuns()
