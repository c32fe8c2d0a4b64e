"""Ledger metadata as values, and the few changes that are possible.

``metadata_codec`` converts the values to znode bytes and back; ``manager`` reads and writes the
znodes. A change returns a new value. It may be written only over the znode version that it was made
from (rule S2).
"""

import enum
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NewType

BookieId = NewType("BookieId", str)
"""A bookie id as in ensembles and znode names: ``host:port``, or any opaque string."""

LAC_NONE = -1
"""Last add confirmed, or last entry id, of a ledger without entries."""


class LedgerState(enum.Enum):
    """State of a ledger. Numbers as in BookKeeper's LedgerMetadataFormat.State."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


class DigestType(enum.Enum):
    """Digest type of a ledger. Numbers as in LedgerMetadataFormat.DigestType; Java's API calls HMAC
    "MAC"."""

    CRC32 = 1
    HMAC = 2
    CRC32C = 3
    DUMMY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An ensemble and its first entry. The segment ends before the next segment, or at the end of
    the ledger.

    The position of a bookie in ``ensemble`` is its bookie index, which decides the entries that it
    stores. Never reorder an ensemble. ``unknown_fields``: serialised unknown protobuf fields,
    preserved unchanged.
    """

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
    """The metadata of one ledger.

    ``length`` (payload bytes) and ``last_entry_id`` are only meaningful when CLOSED; otherwise they
    are 0 and -1. ``ctime_ms``, ``password`` and ``digest_type`` are None if they are not stored,
    and remain so. ``segments`` ascend by first entry; the last one may start after
    ``last_entry_id``.
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
        assert 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size, self
        assert all(len(s.ensemble) == self.ensemble_size for s in self.segments), self

    @property
    def is_closed(self) -> bool:
        return self.state is LedgerState.CLOSED

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
        """Return the metadata with ``segment`` appended, or in place of the segment with the same
        first entry."""
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
