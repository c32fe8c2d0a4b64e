"""Which write sets of a segment have entries: a short one does not use all of them."""

from ledgers.metadata import LedgerMetadata

WriteSets = tuple[tuple[int, int], ...]
"""Per segment, its first entry's id modulo the ensemble size, and how many entries it has, ensemble
size at most. Empty where each has so many, as nearly always: then every write set is used."""


def used_write_sets(metadata: LedgerMetadata) -> WriteSets:
    """Of the last segment of a ledger that is not closed nobody knows: it may have any number of
    entries."""
    size, is_closed = metadata.ensemble_size, metadata.is_closed
    firsts = [segment.first_entry_id for segment in metadata.segments]
    if not firsts:
        return ()
    end = metadata.last_entry_id + 1 if is_closed else firsts[-1] + size
    if len(firsts) == 1 and end - firsts[0] >= size:  # nearly always
        return ()
    used = tuple(
        (first % size, max(0, min(next_first - first, size)))
        for first, next_first in zip(firsts, [*firsts[1:], end], strict=True)
    )
    return () if all(count == size for _, count in used) else used
