"""Members of a last ensemble that came by a change of it, and are younger than the ledger: wiped since, or just new."""

from collections.abc import Collection

from ledgers.metadata import BookieId, LedgerMetadata
from ledgers.striping import first_of


def latecomers(metadata: LedgerMetadata, young: Collection[BookieId]) -> frozenset[BookieId]:
    """Of bookies that are younger than the ledger those that came by a change of the ensemble: they may never have
    been wiped, and were not as long as they have their ``first_entry_of`` it."""
    return frozenset(young).difference(metadata.segments[0].ensemble)


def first_entry_of(metadata: LedgerMetadata, bookie: BookieId) -> int:
    """The first entry of the last segment that this member of it stores, once there are so many."""
    last = metadata.last_segment
    return first_of(
        last.ensemble.index(bookie),
        last.first_entry_id,
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
    )
