"""Latecomers: bookies that joined a ledger by an ensemble change and whose cookie is newer than the
ledger.

A latecomer either was set up before it joined, or was wiped after it joined.
"""

from collections.abc import Collection

from ledgers.metadata import BookieId, LedgerMetadata
from ledgers.striping import first_of


def latecomers(metadata: LedgerMetadata, young: Collection[BookieId]) -> frozenset[BookieId]:
    """Return those of the ``young`` bookies that joined by an ensemble change.

    A latecomer that still stores its ``first_entry_of`` the last segment was not wiped since it
    joined.
    """
    return frozenset(young).difference(metadata.segments[0].ensemble)


def first_entry_of(metadata: LedgerMetadata, bookie: BookieId) -> int:
    """Return the first entry of the last segment that this member should store."""
    last = metadata.last_segment
    return first_of(
        last.ensemble.index(bookie),
        last.first_entry_id,
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
    )
