"""A ledger's fragments: its segments, each with the entries that lie on it.

Pure: a fragment says what should be where, ``replication.planning.check`` finds out what is.
"""

from msgspec import Struct
from msgspec.structs import replace

from ledgers.metadata import LAC_NONE, BookieId, LedgerMetadata
from ledgers.striping import StripedEntries, entries_of


class Fragment(Struct, frozen=True, kw_only=True):
    """A run of entries of one ledger on one ensemble.

    Entry ids are 0-based and the range is inclusive at both ends; an empty fragment has
    ``last_entry_id == first_entry_id - 1``. The last fragment of a ledger that is not closed ends
    nobody knows where (None). ``1 <= write_quorum <= ensemble_size``.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int | None
    ensemble: tuple[BookieId, ...]
    write_quorum: int
    is_closed: bool
    """Nothing will ever be added or changed here, so that it may be copied (rule S4)."""

    def __post_init__(self) -> None:
        assert self.first_entry_id >= 0, self
        assert self.last_entry_id is None or self.last_entry_id >= self.first_entry_id - 1, self
        assert 1 <= self.write_quorum <= self.ensemble_size, self
        assert not self.is_closed or self.last_entry_id is not None, self

    @property
    def ensemble_size(self) -> int:
        return len(self.ensemble)

    def entries_of(self, index: int) -> StripedEntries:
        """What the bookie at ``index`` should store of it. The end must be known."""
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
    """One fragment for each segment, in their order.

    ``lac``: the highest entry id known to be acknowledged; it matters only while the ledger is not
    closed. All fragments but the last are closed then if everything before the last one is known
    to be acknowledged: an opener that saw few answers may know less. Which one is the last is a
    matter of position; Java compares ensembles instead (LedgerFragment), and takes an earlier
    fragment on the very bookies of the last one for open.
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
    """Likewise, as far as they are known: of one whose end nobody knows, what is acknowledged."""
    return tuple(
        replace(fragment, last_entry_id=max(lac, fragment.first_entry_id - 1))
        if fragment.last_entry_id is None
        else fragment
        for fragment in fragments(ledger_id, metadata, lac=lac)
    )


def _ends(metadata: LedgerMetadata) -> tuple[int | None, ...]:
    """The last entry id of each segment; None: unknown.

    A closed ledger ends at its last entry id, wherever its segments say that they begin: an ensemble
    change right before the end leaves an empty one.
    """
    starts = [segment.first_entry_id for segment in metadata.segments]
    ends = [start - 1 for start in starts[1:]]
    if not metadata.is_closed:
        return (*ends, None)
    last = metadata.last_entry_id
    return tuple(
        max(start - 1, min(end, last)) for start, end in zip(starts, [*ends, last], strict=True)
    )
