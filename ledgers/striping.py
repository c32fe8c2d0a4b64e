"""Striping: which bookie indexes store which entries, and which sets of answers cover all
acknowledged entries.

Arithmetic on entry ids, ensemble size E, write quorum W and ack quorum A. BookKeeper distributes
entries round robin (RoundRobinDistributionSchedule): entry ``e`` is stored at the W bookie indexes
from ``e mod E`` on. From entry 2^31 on Java's membership test disagrees with its own writers,
because it narrows the id to 32 bits. This module follows the writers.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import overload


def write_set(entry_id: int, *, ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
    """Return the bookie indexes that store the entry, in the order in which readers try them."""
    return _write_set(entry_id % ensemble_size, ensemble_size, write_quorum)


def first_of(index: int, entry_id: int, *, ensemble_size: int, write_quorum: int) -> int:
    """Return the first entry at or after ``entry_id`` that the bookie at ``index`` stores."""
    return next(
        candidate
        for candidate in range(entry_id, entry_id + ensemble_size)
        if stores(index, candidate, ensemble_size=ensemble_size, write_quorum=write_quorum)
    )


@lru_cache(maxsize=4096)
def _write_set(start: int, ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
    return tuple((start + offset) % ensemble_size for offset in range(write_quorum))


def stores(index: int, entry_id: int, *, ensemble_size: int, write_quorum: int) -> bool:
    """True if the bookie at ``index`` is in the entry's write set."""
    return (index - entry_id) % ensemble_size < write_quorum


@lru_cache(maxsize=4096)  # small ledgers are alike, and each needs several calls
def entries_of(
    index: int,
    *,
    first_entry_id: int,
    last_entry_id: int,
    ensemble_size: int,
    write_quorum: int,
) -> "StripedEntries":
    """Return the entries of a range, inclusive at both ends, that the bookie at ``index``
    stores."""
    assert 0 <= index < ensemble_size, (index, ensemble_size)
    assert first_entry_id >= 0, first_entry_id
    return StripedEntries(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        shift=(write_quorum - 1 - index) % ensemble_size,
    ).between(first_entry_id, last_entry_id)


def covers(
    known: AbstractSet[int], *, ensemble_size: int, write_quorum: int, ack_quorum: int
) -> bool:
    """True if every acknowledged entry is stored by at least one bookie in ``known``.

    ``known``: indexes that answered with an entry or with an explicit "no". Each of the E possible
    write sets must contain fewer than A other indexes (QuorumCoverageSet of
    RoundRobinDistributionSchedule).
    """
    return all(
        sum(
            index not in known
            for index in write_set(start, ensemble_size=ensemble_size, write_quorum=write_quorum)
        )
        < ack_quorum
        for start in range(ensemble_size)
    )


_ALL = 1 << 63
"""Larger than any number of entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StripedEntries(Sequence[int]):
    """The ascending entry ids that one bookie index stores, in constant memory.

    Shifted by ``shift``, the index stores the first W ids of every E ids. The rank of an entry is
    the number of stored ids below it, so length, membership, indexing and slicing take O(1).
    Iteration runs in C. ``start_rank`` is inclusive, ``stop_rank`` exclusive.
    """

    ensemble_size: int
    write_quorum: int
    shift: int
    start_rank: int = 0
    stop_rank: int = _ALL

    def __post_init__(self) -> None:
        assert 1 <= self.write_quorum <= self.ensemble_size, self
        assert 0 <= self.start_rank <= self.stop_rank, self

    @property
    def first(self) -> int | None:
        return self[0] if self else None

    @property
    def last(self) -> int | None:
        return self[-1] if self else None

    def between(self, first_entry_id: int, last_entry_id: int) -> "StripedEntries":
        """Return the ids from the first to the last entry id, both inclusive."""
        start = min(max(self._rank(first_entry_id), self.start_rank), self.stop_rank)
        stop = min(max(self._rank(last_entry_id + 1), start), self.stop_rank)
        return replace(self, start_rank=start, stop_rank=stop)

    def __len__(self) -> int:
        return self.stop_rank - self.start_rank

    def __contains__(self, entry_id: object) -> bool:
        return (
            isinstance(entry_id, int)
            and (entry_id + self.shift) % self.ensemble_size < self.write_quorum
            and self.start_rank <= self._rank(entry_id) < self.stop_rank
        )

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> "StripedEntries": ...
    def __getitem__(self, position: int | slice) -> "int | StripedEntries":
        if isinstance(position, slice):
            start, stop, step = position.indices(len(self))
            if step != 1:
                raise ValueError("a slice of striped entries has no step")
            start_rank = self.start_rank + start
            stop_rank = max(start_rank, self.start_rank + stop)
            return replace(self, start_rank=start_rank, stop_rank=stop_rank)
        rank = position + (self.start_rank if position >= 0 else self.stop_rank)
        if not self.start_rank <= rank < self.stop_rank:
            raise IndexError(position)
        return self._entry_id(rank)

    def __iter__(self) -> Iterator[int]:
        if self.write_quorum == self.ensemble_size:
            start = self.start_rank - self.shift
            return iter(range(start, start + len(self)))
        return self._merged()

    def _merged(self) -> Iterator[int]:
        """Iterate over whole periods as W interleaved ranges, and over the partial periods at both
        ends id by id."""
        head_stop = min(
            -(-self.start_rank // self.write_quorum) * self.write_quorum, self.stop_rank
        )
        tail_start = max(self.stop_rank // self.write_quorum * self.write_quorum, head_stop)
        starts, stop = self._entry_id(head_stop), self._entry_id(tail_start)
        return chain(
            map(self._entry_id, range(self.start_rank, head_stop)),
            chain.from_iterable(
                zip(
                    *(
                        range(starts + offset, stop + offset, self.ensemble_size)
                        for offset in range(self.write_quorum)
                    ),
                    strict=True,
                )
            ),
            map(self._entry_id, range(tail_start, self.stop_rank)),
        )

    def _rank(self, entry_id: int) -> int:
        """Return how many ids below ``entry_id`` the index stores. Includes ids below 0 that the
        shift adds."""
        periods, rest = divmod(entry_id + self.shift, self.ensemble_size)
        return periods * self.write_quorum + min(rest, self.write_quorum)

    def _entry_id(self, rank: int) -> int:
        periods, rest = divmod(rank, self.write_quorum)
        return periods * self.ensemble_size + rest - self.shift
