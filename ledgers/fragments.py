"""The fragments of a ledger: its segments with their ranges of entries. No I/O.

A fragment says which bookie should store which entries. ``replication.planning.check`` finds out
what is stored.
"""

from msgspec import Struct
from msgspec import structs

from ledgers.metadata import LAC_NONE, BookieId, LedgerMetadata
from ledgers.striping import StripedEntries, entries_of


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
    """Return the fragments, with the open end of the last one cut to the acknowledged entries
    (``lac``)."""
    return tuple(
        structs.replace(fragment, last_entry_id=max(lac, fragment.first_entry_id - 1))
        if fragment.last_entry_id is None
        else fragment
        for fragment in fragments(ledger_id, metadata, lac=lac)
    )


def _ends(metadata: LedgerMetadata) -> tuple[int | None, ...]:
    """Return the last entry id of each segment; None if it is unknown.

    In a closed ledger no segment extends beyond the last entry id. An ensemble change just before
    the end leaves an empty last segment.
    """
    starts = [segment.first_entry_id for segment in metadata.segments]
    ends = [start - 1 for start in starts[1:]]
    if not metadata.is_closed:
        return (*ends, None)
    last = metadata.last_entry_id
    return tuple(
        max(start - 1, min(end, last)) for start, end in zip(starts, [*ends, last], strict=True)
    )
