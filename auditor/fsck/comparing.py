"""Compares copies with correct digests, and finds those that differ from the others. Pure.

LAC and digest may differ: a recovery, and Java's repair, write the LAC that they know by then.
Payload and length may not differ.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ledgers.fingerprints import NO_FINGERPRINT, Fingerprints
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId
from ledgers.striping import write_set
from replication.planning.entry_runs import EntryRuns


def differing(
    fragment: Fragment,
    first_entry_id: int,
    last_entry_id: int,
    found: Mapping[BookieId, Fingerprints],
) -> dict[BookieId, EntryRuns]:
    """Return by bookie the entries from the first to the last, inclusive, that differ from most
    copies.

    If no value is the most frequent one, nobody knows which is right, and all copies are named.
    Entries whose ids differ by E have their copies on the same bookies, so whole columns are
    compared at once.
    """
    if len(found) < 2:
        return {}
    size, quorum = fragment.ensemble_size, fragment.write_quorum
    step = 1 if size == quorum else size
    odd: dict[BookieId, list[int]] = defaultdict(list)
    for start in range(first_entry_id, min(first_entry_id + step, last_entry_id + 1)):
        indexes = write_set(start, ensemble_size=size, write_quorum=quorum)
        # A bookie may be in the ensemble twice.
        bookies = dict.fromkeys(map(fragment.ensemble.__getitem__, indexes))
        members = [bookie for bookie in bookies if bookie in found]
        columns = [_column(found[bookie], start, last_entry_id, step) for bookie in members]
        if all(column == columns[0] for column in columns):
            continue
        for position, values in enumerate(zip(*columns, strict=True)):
            for place in _odd_places(values):
                odd[members[place]].append(start + position * step)
    return {bookie: EntryRuns(sorted(entry_ids)) for bookie, entry_ids in odd.items()}


def _column(found: Fingerprints, start: int, last: int, step: int) -> Sequence[int]:
    """Return the fingerprints of every ``step``-th entry."""
    return found.values[start - found.first_entry_id : last - found.first_entry_id + 1 : step]


def _odd_places(values: Sequence[int]) -> Sequence[int]:
    """Return the positions of the values that differ from the most frequent one; of all, if two are
    equally frequent."""
    there = Counter(value for value in values if value != NO_FINGERPRINT)
    if len(there) < 2:
        return ()
    (common, count), (_, next_count) = there.most_common(2)
    right = common if count > next_count else NO_FINGERPRINT
    return [place for place, value in enumerate(values) if value not in (right, NO_FINGERPRINT)]
