"""Ledgers as values: metadata, striping, fragments. No I/O.

``LedgerMetadata`` and ``Segment`` are the metadata. A change returns a new value, which may be
written only over the znode version that it was made from (rule S2). ``codec.metadata`` converts
them to znode bytes and back; ``manager`` reads and writes the znodes.

Striping, from ``write_set`` on: which bookie indexes store which entries, and which sets of answers
cover all acknowledged entries. BookKeeper distributes entries round robin
(RoundRobinDistributionSchedule): entry ``e`` is stored at the W bookie indexes from ``e mod E`` on.
From entry 2^31 on Java's membership test disagrees with its own writers, because it narrows the id
to 32 bits. This module follows the writers.

``Fragment``: the range of entries of a segment, and which bookie should store which of them. What
the bookies really store is found out elsewhere (``replication.copy_reader``).
"""

import enum
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import NewType, overload

from msgspec import Struct, structs

BookieId = NewType("BookieId", str)
"""A bookie id as in ensembles and znode names: ``host:port``, or any opaque string."""

FEED_MARKER = ("application", b"bookmender-feed")
"""Custom metadata of every ledger of the change feed. bookmender itself writes these ledgers, so
they show neither that a client is active nor that one is gone."""
LAC_NONE = -1
"""Last add confirmed, or last entry id, of a ledger without entries."""


class LedgerState(enum.Enum):
    """State of a ledger. Numbers as in BookKeeper's LedgerMetadataFormat.State."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


class DigestType(enum.Enum):
    """Digest type. Numbers as in LedgerMetadataFormat.DigestType; Java's API calls HMAC "MAC"."""

    CRC32 = 1
    HMAC = 2
    CRC32C = 3
    DUMMY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An ensemble and its first entry. The place of a bookie in ``ensemble`` is its bookie index,
    which decides the entries that it stores: never reorder it. ``unknown_fields``: serialised
    protobuf fields, preserved unchanged."""

    first_entry_id: int
    ensemble: tuple[BookieId, ...]
    unknown_fields: bytes = b""

    def __post_init__(self) -> None:
        assert self.first_entry_id >= 0, self

    def with_bookies(self, changes: Mapping[int, BookieId]) -> "Segment":
        """Return the segment with the bookies at these indexes replaced."""
        ensemble = tuple(changes.get(index, old) for index, old in enumerate(self.ensemble))
        return replace(self, ensemble=ensemble)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMetadata:
    """The metadata of one ledger. ``length`` (payload bytes) and ``last_entry_id`` are 0 and -1
    unless CLOSED. ``ctime_ms``, ``password``, ``digest_type``: None if not stored, and they remain
    so. ``segments`` ascend by first entry; the last one may start after ``last_entry_id``.

    ``ack_quorum`` may be 0 or negative: Java's client accepts that, and Pulsar did until the end of
    2022. Closed ledgers of this kind are repaired like others; nobody can recover open ones.
    """

    metadata_version: int = 3
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    state: LedgerState = LedgerState.OPEN
    length: int = 0
    last_entry_id: int = LAC_NONE
    digest_type: DigestType | None = DigestType.CRC32C
    password: bytes | None = field(default=b"", repr=False)
    ctime_ms: int | None = None
    c_token: int | None = None
    custom: tuple[tuple[str, bytes], ...] = ()
    segments: tuple[Segment, ...]
    has_ack_quorum: bool = True
    """False if the znode has no ackQuorumSize (then A = W). Writes preserve this."""
    unknown_fields: bytes = b""
    """Serialised unknown protobuf fields, preserved unchanged (rule S2)."""

    def __post_init__(self) -> None:
        assert max(1, self.ack_quorum) <= self.write_quorum <= self.ensemble_size, self
        for segment in self.segments:
            assert len(segment.ensemble) == self.ensemble_size, self

    @property
    def is_closed(self) -> bool:
        return self.state is LedgerState.CLOSED

    @property
    def is_of_feed(self) -> bool:
        return FEED_MARKER in self.custom

    @property
    def last_segment(self) -> Segment:
        return self.segments[-1]

    @property
    def bookies(self) -> frozenset[BookieId]:
        """All bookies named by any segment."""
        return frozenset().union(*(segment.ensemble for segment in self.segments))

    def segment_of(self, entry_id: int) -> Segment:
        """Return the segment of an entry (``entry_id`` >= 0)."""
        position = bisect_right(self.segments, entry_id, key=lambda s: s.first_entry_id)
        return self.segments[position - 1]

    def with_state(self, state: LedgerState) -> "LedgerMetadata":
        return replace(self, state=state)

    def with_segment(self, segment: Segment) -> "LedgerMetadata":
        """Return the metadata with this segment added, or replaced if its first entry is known."""
        if segment.first_entry_id > self.last_segment.first_entry_id:
            return replace(self, segments=(*self.segments, segment))
        found = [s.first_entry_id for s in self.segments]
        assert segment.first_entry_id in found, (segment, found)
        return replace(
            self,
            segments=tuple(
                segment if s.first_entry_id == segment.first_entry_id else s for s in self.segments
            ),
        )

    def closed(self, *, last_entry_id: int, length: int) -> "LedgerMetadata":
        return replace(self, state=LedgerState.CLOSED, last_entry_id=last_entry_id, length=length)


class LedgerOutline(Struct, frozen=True, kw_only=True):
    """Which bookies store which entries: a part of ``LedgerMetadata`` that is parsed faster."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    state: LedgerState
    length: int
    last_entry_id: int
    segments: tuple[Segment, ...]
    is_of_feed: bool = False

    @property
    def is_closed(self) -> bool:
        return self.state is LedgerState.CLOSED


def outline_of(metadata: LedgerMetadata) -> LedgerOutline:
    return LedgerOutline(
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
        state=metadata.state,
        length=metadata.length,
        last_entry_id=metadata.last_entry_id,
        segments=metadata.segments,
        is_of_feed=metadata.is_of_feed,
    )


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
    index: int, *, first_entry_id: int, last_entry_id: int, ensemble_size: int, write_quorum: int
) -> "StripedEntries":
    """Return the entries of an inclusive range that the bookie at ``index`` stores."""
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
    RoundRobinDistributionSchedule). With A below 1 it is never true, as in Java.
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
        """Iterate over whole periods as W interleaved ranges, over partial ones id by id."""
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
        """Return how many lower ids the index stores, with ids below 0 that the shift adds."""
        periods, rest = divmod(entry_id + self.shift, self.ensemble_size)
        return periods * self.write_quorum + min(rest, self.write_quorum)

    def _entry_id(self, rank: int) -> int:
        periods, rest = divmod(rank, self.write_quorum)
        return periods * self.ensemble_size + rest - self.shift


class Fragment(Struct, frozen=True, kw_only=True):
    """A range of entries of one ledger on one ensemble.

    Entry ids are 0-based and the range is inclusive at both ends. An empty fragment has
    ``last_entry_id == first_entry_id - 1``. In a ledger that is not closed, the end of the last
    fragment is unknown (None). ``1 <= write_quorum <= ensemble_size``.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int | None
    ensemble: tuple[BookieId, ...]
    write_quorum: int
    is_closed: bool
    """True if entries can no longer be added, so that the fragment may be copied (rule S4)."""

    def __post_init__(self) -> None:
        assert self.first_entry_id >= 0, self
        assert self.last_entry_id is None or self.last_entry_id >= self.first_entry_id - 1, self
        assert 1 <= self.write_quorum <= self.ensemble_size, self
        assert not self.is_closed or self.last_entry_id is not None, self

    @property
    def ensemble_size(self) -> int:
        return len(self.ensemble)

    def entries_of(self, index: int) -> StripedEntries:
        """Return the entries that the bookie at ``index`` should store. The end must be known."""
        assert self.last_entry_id is not None, self
        return entries_of(
            index,
            first_entry_id=self.first_entry_id,
            last_entry_id=self.last_entry_id,
            ensemble_size=self.ensemble_size,
            write_quorum=self.write_quorum,
        )


def fragments(
    ledger_id: int, metadata: LedgerMetadata, *, lac: int = LAC_NONE
) -> tuple[Fragment, ...]:
    """Return one fragment for each segment, in order.

    ``lac``: the highest entry id known to be acknowledged. It matters only while the ledger is not
    closed. Then all fragments before the last one are closed if the LAC has reached the end of the
    last but one. A client that received few answers may know a lower LAC.

    The last fragment is found by position. Java compares ensembles instead (LedgerFragment), so it
    treats an earlier fragment with the ensemble of the last one as open.
    """
    is_settled = metadata.is_closed or lac >= metadata.last_segment.first_entry_id - 1
    return tuple(
        Fragment(
            ledger_id=ledger_id,
            first_entry_id=segment.first_entry_id,
            last_entry_id=last_entry_id,
            ensemble=segment.ensemble,
            write_quorum=metadata.write_quorum,
            is_closed=is_settled and last_entry_id is not None,
        )
        for segment, last_entry_id in zip(metadata.segments, _ends(metadata), strict=True)
    )


def known_fragments(ledger_id: int, metadata: LedgerMetadata, *, lac: int) -> tuple[Fragment, ...]:
    """Return the fragments, with the open end of the last one cut to the ``lac``."""
    return tuple(
        structs.replace(fragment, last_entry_id=max(lac, fragment.first_entry_id - 1))
        if fragment.last_entry_id is None
        else fragment
        for fragment in fragments(ledger_id, metadata, lac=lac)
    )


def closed_fragments(ledger_id: int, metadata: LedgerMetadata) -> tuple[Fragment, ...]:
    """Return the fragments that never change again (rule S4). No bookie need be asked: a writer
    begins a fragment only after every earlier entry is acknowledged."""
    lac = metadata.last_segment.first_entry_id - 1
    return tuple(f for f in fragments(ledger_id, metadata, lac=lac) if f.is_closed)


def _ends(metadata: LedgerMetadata) -> tuple[int | None, ...]:
    """Return the last entry id of each segment; None if it is unknown. In a closed ledger none is
    beyond the ledger's: an ensemble change just before the end leaves an empty segment."""
    starts = [segment.first_entry_id for segment in metadata.segments]
    ends = [start - 1 for start in starts[1:]]
    if not metadata.is_closed:
        return (*ends, None)
    last = metadata.last_entry_id
    return tuple(
        max(start - 1, min(end, last)) for start, end in zip(starts, [*ends, last], strict=True)
    )
