"""The ledger's metadata after its copies were made: a pure function of both.

Where entries of a closed ledger have no good copy anywhere, the segment is split around them: they
keep the bookies that once had them, in a small segment of their own, and all the rest gets its new
ensemble. What is lost so stands at an end of a segment, where every later check looks, whoever's it
is; and when a bookie comes back that has it, it is copied like anything else.

Which bookie index stores an entry depends on the entry's id alone, not on where its segment begins:
a split moves no entry. A target is named only for entries that it has acknowledged (rule S1).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ledgers.fragments import Fragment
from ledgers.metadata import BookieId, LedgerMetadata, Segment
from replication.planning.entry_runs import NO_ENTRIES, EntryRuns

LOST_PLACES_MAX = 10
"""Runs of lost entries that a ledger is split around. More than these are no single entries any
more, and a ledger of a thousand segments helps nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Bookie index ``index`` of ``fragment`` is ``target``'s, but for the entries that are lost.

    ``target`` may be the bookie that stands there already: only what is lost then tells.
    """

    fragment: Fragment
    index: int
    target: BookieId
    lost: EntryRuns = NO_ENTRIES


def rewritten(metadata: LedgerMetadata, changes: Iterable[Change]) -> LedgerMetadata:
    """All changed ensembles at once. Changes of one fragment name different indexes."""
    by_segment: dict[int, list[Change]] = defaultdict(list)
    for change in changes:
        by_segment[change.fragment.first_entry_id].append(change)
    segments = tuple(
        part
        for segment in metadata.segments
        for part in _parts(segment, by_segment.get(segment.first_entry_id, ()))
    )
    return replace(metadata, segments=segments)


def joined(metadata: LedgerMetadata) -> LedgerMetadata:
    """Return the same metadata with neighbouring segments of equal ensembles as one.

    Which bookie index stores an entry depends on the entry's id alone, so every copy stays where it
    is. For closed ledgers of which no entry is lost: segments that were split around lost entries
    have equal ensembles, too, and are to stay apart (see the module). Segments with unknown fields
    stay as they are.
    """
    assert metadata.is_closed, metadata
    segments: list[Segment] = []
    for segment in metadata.segments:
        last = segments[-1] if segments else None
        if (
            last is None
            or last != replace(segment, first_entry_id=last.first_entry_id)
            or segment.unknown_fields
        ):
            segments.append(segment)
    return replace(metadata, segments=tuple(segments))


def lost_places(changes: Iterable[Change]) -> list[range]:
    """The runs of entries that the changes leave lost, ascending, neighbouring ones joined."""
    bounds = sorted((run.start, run.stop) for change in changes for run in change.lost.runs)
    places: list[range] = []
    for start, stop in bounds:
        if places and start <= places[-1].stop:
            places[-1] = range(places[-1].start, max(places[-1].stop, stop))
        else:
            places.append(range(start, stop))
    return places


def _parts(segment: Segment, changes: Sequence[Change]) -> list[Segment]:
    """The segment, cut around what is lost of it."""
    if not changes:
        return [segment]
    places = lost_places(changes)
    if not places:
        return [_with_changes(segment, changes)]
    last_entry_id = changes[0].fragment.last_entry_id
    assert last_entry_id is not None, changes[0]
    parts: list[Segment] = []
    start = segment.first_entry_id
    for place in places:
        if start < place.start:
            parts.append(_with_changes(_from(segment, start), changes))
        kept = [change for change in changes if not change.lost.between(place[0], place[-1])]
        parts.append(_with_changes(_from(segment, place.start), kept))
        start = place.stop
    if start <= last_entry_id:
        parts.append(_with_changes(_from(segment, start), changes))
    return parts


def _from(segment: Segment, first_entry_id: int) -> Segment:
    return replace(segment, first_entry_id=first_entry_id)


def _with_changes(segment: Segment, changes: Iterable[Change]) -> Segment:
    return segment.with_bookies({change.index: change.target for change in changes})
