"""Copies with good digests held against each other: which are not what the others are. Pure.

LAC and digest may differ (a recovery, and Java's repair, write what they know by then); payload and
length may not.
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
    """Of the entries from the first to the last, those of each bookie that are not what most are.

    Where no value has most of them, nobody knows which is right: all are named. Entries E apart
    have their copies on the same bookies, so that whole columns are compared at a time.
    """
    if len(found) < 2:
        return {}
    size, quorum = fragment.ensemble_size, fragment.write_quorum
    step = 1 if size == quorum else size
    odd: dict[BookieId, list[int]] = defaultdict(list)
    for start in range(first_entry_id, min(first_entry_id + step, last_entry_id + 1)):
        indexes = write_set(start, ensemble_size=size, write_quorum=quorum)
        # One may stand there twice.
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
    """Those of every ``step``-th entry."""
    return found.values[start - found.first_entry_id : last - found.first_entry_id + 1 : step]


def _odd_places(values: Sequence[int]) -> Sequence[int]:
    there = Counter(value for value in values if value != NO_FINGERPRINT)
    if len(there) < 2:
        return ()
    (common, count), (_, next_count) = there.most_common(2)
    right = common if count > next_count else NO_FINGERPRINT
    return [place for place, value in enumerate(values) if value not in (right, NO_FINGERPRINT)]
