"""Decides what is written after the copies of a plan: the metadata (rule S1), and what blocks the
rest.

``CopyResults`` is a pure function of a plan and of the outcomes of its copies.

If entries of a closed ledger have no good copy anywhere, their segment is split around them. They
keep the bookies that once had them, in a small segment of their own, and all other entries get
their new ensemble. So a lost entry is at an end of a segment, which every later check reads. When a
bookie returns that has the entry, it is copied like any other.

A split moves no entry: the bookie index of an entry depends on its id, not on where its segment
begins. A target is named only for entries that it has acknowledged (rule S1).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import merge
from itertools import islice

from msgspec import Struct, structs

from ledgers.errors import LocalLimitError
from ledgers.model import BookieId, Fragment, LedgerMetadata, Segment, write_set
from replication.copy_reader import CopyFinding, Verdict
from replication.copying import LACKING_MAX, CopyOutcome
from replication.entry_runs import NO_ENTRIES, EntryRuns
from replication.inspection import Inspection
from replication.plan import Plan, Repair
from replication.reasons import Blocked, Facts, Reason, absence_facts, named

LOST_PLACES_MAX = 10
"""Runs of lost entries around which a ledger is split at most. With more runs, the ledger would
have too many segments to be useful."""
ENTRIES_NAMED_MAX = 5
"""Entry ids in the facts of a blocked repair. The others are counted."""
UNTARGETED_TOLD_MAX = 1_000
"""Entries without a copy that are counted for a copy without a target. Counting more would take
long for a large ledger, at every attempt."""

# --- Metadata -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """``target`` replaces the bookie at ``index`` of ``fragment``, except for the entries that are
    lost.

    If ``target`` is the bookie at that index already, only ``lost`` matters.
    """

    fragment: Fragment
    index: int
    target: BookieId
    lost: EntryRuns = NO_ENTRIES


def rewritten(metadata: LedgerMetadata, changes: Iterable[Change]) -> LedgerMetadata:
    """Return the metadata with all changes. Changes of one fragment name different indexes."""
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
    is. Call it only for closed ledgers without lost entries: segments that were split around lost
    entries may have equal ensembles, too, and must stay apart (see the module). Segments with
    unknown fields stay as they are.
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
    """Return the runs of lost entries, ascending, with neighbouring runs joined."""
    lost = EntryRuns()
    for change in changes:
        lost.extend(change.lost)
    return lost.runs


def _parts(segment: Segment, changes: Sequence[Change]) -> list[Segment]:
    """Return the segment, split around its lost entries."""
    if not changes:
        return [segment]

    def part(first_entry_id: int, made: Iterable[Change]) -> Segment:
        begun = replace(segment, first_entry_id=first_entry_id)
        return begun.with_bookies({change.index: change.target for change in made})

    last_entry_id = changes[0].fragment.last_entry_id
    assert last_entry_id is not None, changes[0]  # open fragments are not copied (rule S4)
    places = lost_places(changes)
    parts: list[Segment] = []
    start = segment.first_entry_id
    for place in places:
        if start < place.start:
            parts.append(part(start, changes))
        kept = [change for change in changes if not change.lost.between(place[0], place[-1])]
        parts.append(part(place.start, kept))
        start = place.stop
    if start <= last_entry_id or not places:  # without a place, the fragment may be empty
        parts.append(part(start, changes))
    return parts


# --- Results --------------------------------------------------------------------------------------


# dict: the properties are computed once.
class CopyResults(Struct, frozen=True, kw_only=True, dict=True):
    """The results of a plan's copies, and what follows from them.

    ``outcomes``: one for each repair of the plan. ``is_unchanged``: returns True if a target is
    still the registration that acknowledged its copies. ``has_bad_sources``: members lack entries
    that a check does not ask for, so they must be read completely. ``may_return``: returns True if
    an absent bookie may soon return with the entries that it should have.
    """

    inspection: Inspection
    plan: Plan
    outcomes: Sequence[CopyOutcome]
    is_unchanged: Callable[[BookieId], bool]
    has_bad_sources: bool = False
    may_return: Callable[[BookieId], bool] = lambda bookie: False

    @cached_property
    def metadata(self) -> LedgerMetadata:
        """The metadata to write: it names the target of every index that was copied completely, or
        except for lost entries (``_splits``)."""
        before, after = self.inspection.metadata, self._rewritten
        # An earlier repair may have split a segment while bookies were absent. No entry is lost
        # now.
        may_join = before.is_closed and after != before and self.is_complete
        return joined(after) if may_join else after

    @cached_property
    def _rewritten(self) -> LedgerMetadata:
        return rewritten(self.inspection.metadata, [*self._moves, *self._splits])

    @property
    def new_targets(self) -> frozenset[BookieId]:
        """The bookies that the metadata will name because they received a copy."""
        return frozenset(change.target for change in (*self._moves, *self._splits))

    @property
    def is_split(self) -> bool:
        """True if a segment is split, so the entries beside the lost ones can be copied in the next
        round."""
        return len(self._rewritten.segments) > len(self.inspection.metadata.segments)

    @property
    def is_complete(self) -> bool:
        """Everything was copied to other bookies, nothing was blocked, and nothing else is known to
        be missing.

        Copies in place do not count: they must be read back first.
        """
        is_done = not self.plan.blocked and len(self._moves) == len(self.outcomes)
        return is_done and not self.has_bad_sources

    @property
    def only_to_empty(self) -> frozenset[BookieId]:
        """The draining bookies, if moving their copies is all that is left; otherwise nothing."""
        moved = {(change.fragment, change.index) for change in self._moves}
        left = [
            finding
            for finding in self.inspection.findings
            if finding.verdict is not Verdict.GOOD
            and (finding.fragment, finding.index) not in moved
        ]
        if self.has_bad_sources or any(f.verdict is not Verdict.DRAINING for f in left):
            return frozenset()
        return frozenset(finding.bookie for finding in left)

    @property
    def entry_count(self) -> int:
        return sum(outcome.entry_count for outcome in self.outcomes)

    @cached_property
    def blocked(self) -> list[Blocked]:
        """Return what blocks the rest. A failed target does not: the next round uses another. A
        target that this process could not ask, for want of files or threads, does."""
        blocked = [*self.plan.blocked, *self._no_copy()]
        # After a split, the next round copies what is withheld.
        withheld = [0 if self.is_split else _withheld_count(*pair) for pair in self._pairs]
        if any(withheld):
            is_counted = all(len(each.without_copy) <= LACKING_MAX for each in self.outcomes)
            facts = Facts(withheld_count=sum(withheld) if is_counted else 0)
            blocked.append(Blocked(reason=Reason.NO_COPY, facts=facts))
        if unknown := {entry_id for outcome in self.outcomes for entry_id in outcome.unknown}:
            blocked.append(Blocked(reason=Reason.NO_ANSWER, facts=_with_entries(Facts(), unknown)))
        errors = [each.target_error for each in self.outcomes]
        if limits := {str(error) for error in errors if isinstance(error, LocalLimitError)}:
            facts = Facts(errors=tuple(sorted(limits)))
            blocked.append(Blocked(reason=Reason.NO_ANSWER, facts=facts))
        return blocked

    def _no_copy(self) -> Iterator[Blocked]:
        """Yield the entries without a good copy, each once, by the bookies that should have them
        and are absent or do not answer."""
        # Each with True if bookies of other fragments may have the entries, and True if there are
        # more entries.
        lacking: list[tuple[Fragment, Sequence[int], bool, bool]] = [
            (repair.fragment, o.without_copy, False, len(o.without_copy) > LACKING_MAX)
            for repair, o in self._pairs
            if o.without_copy
        ]
        view, members = self.inspection.view, self.inspection.metadata.bookies
        for finding in self.plan.untargeted:
            others = members.difference(finding.fragment.ensemble)
            without_copy, is_cut = _without_copy(finding, self.inspection)
            are_others_unasked = not others.isdisjoint(view.available)
            lacking.append((finding.fragment, without_copy, are_others_unasked, is_cut))
        if not lacking:  # nearly always
            return
        away: dict[Fragment, list[CopyFinding]] = defaultdict(list)
        for finding in self.inspection.findings:
            if finding.verdict in (Verdict.BOOKIE_ABSENT, Verdict.IN_MAINTENANCE):
                away[finding.fragment].append(finding)
        lost = defaultdict[tuple[tuple[BookieId, ...], bool, bool], set[int]](set)
        seen: set[int] = set()
        for fragment, entry_ids, are_others_unasked, is_cut in lacking:
            for entry_id in set(entry_ids) - seen:
                holders = tuple(f.bookie for f in away[fragment] if entry_id in f.entries)
                lost[holders, are_others_unasked, is_cut].add(entry_id)
            seen.update(entry_ids)
        for (holders, are_others_unasked, is_cut), ids in lost.items():
            facts = structs.replace(
                absence_facts(holders, view),
                # Bookies in maintenance may be registered, but unresponsive.
                in_maintenance=named(view.available.intersection(holders)),
                are_others_unasked=are_others_unasked,
            )
            yield Blocked(reason=Reason.NO_COPY, facts=_with_entries(facts, ids, is_cut=is_cut))

    @property
    def _pairs(self) -> list[tuple[Repair, CopyOutcome]]:
        return list(zip(self.plan.repairs, self.outcomes, strict=True))

    @cached_property
    def _moves(self) -> list[Change]:
        return [
            Change(fragment=repair.fragment, index=repair.index, target=repair.target)
            for repair, outcome in self._pairs
            if outcome.is_complete and not repair.is_in_place and self.is_unchanged(repair.target)
        ]

    @cached_property
    def _splits(self) -> list[Change]:
        """The copies that lack only entries without a good copy. The segment is split around those.

        No split happens:

        - in a ledger that is not closed;
        - while no good entry proves our key (rule S7);
        - if a bookie in maintenance may have the entries;
        - around more than ``LOST_PLACES_MAX`` runs;
        - if an absent bookie may have the entries and may return soon. Two bookies that restart
          together would leave ledgers with many segments.
        """
        if not any(outcome.without_copy for outcome in self.outcomes):  # nearly always
            return []
        is_key_proven = self.entry_count > 0 or self.inspection.has_good_entry
        if not self.inspection.metadata.is_closed or not is_key_proven:
            return []
        away = {
            finding.fragment.first_entry_id
            for finding in self.inspection.findings
            if finding.verdict is Verdict.IN_MAINTENANCE
            or (finding.verdict is Verdict.BOOKIE_ABSENT and self.may_return(finding.bookie))
        }
        splits = [
            Change(
                fragment=repair.fragment,
                index=repair.index,
                target=repair.target,
                lost=EntryRuns(sorted(outcome.without_copy)),
            )
            for repair, outcome in self._pairs
            if _lacks_only_lost(repair, outcome)
            and repair.fragment.first_entry_id not in away
            and self.is_unchanged(repair.target)
        ]
        return splits if len(lost_places(splits)) <= LOST_PLACES_MAX else []


def _lacks_only_lost(repair: Repair, outcome: CopyOutcome) -> bool:
    """Return True if the copy lacks only entries without a good copy. A copy in place may get the
    rest later."""
    if outcome.target_error is not None or outcome.unknown or not outcome.without_copy:
        return False
    had_count = outcome.entry_count + len(outcome.without_copy)
    return repair.is_in_place or had_count == len(repair.entry_ids)


def _withheld_count(repair: Repair, outcome: CopyOutcome) -> int:
    """Return how many entries are not copied only because other entries have no copy at all."""
    if not outcome.without_copy:
        return 0
    if repair.is_in_place:
        return len(outcome.withheld)
    return len(repair.entry_ids) - len(outcome.without_copy) - len(outcome.unknown)


def _without_copy(finding: CopyFinding, inspection: Inspection) -> tuple[list[int], bool]:
    """Return entries of a copy without a target that every registered bookie of their write set is
    known to lack, and True if there are more.

    No copy is tried without a target, so no bookie of another fragment was asked.
    """
    fragment, available = finding.fragment, inspection.view.available
    size, last = fragment.ensemble_size, fragment.last_entry_id
    assert last is not None, fragment  # open fragments are not copied (rule S4)
    judged = {f.index: f for f in inspection.findings if f.fragment == fragment}
    series: list[Iterable[int]] = []
    # Entries whose ids differ by the ensemble size have the same write set.
    for first in range(fragment.first_entry_id, fragment.first_entry_id + size):
        indexes = write_set(first, ensemble_size=size, write_quorum=fragment.write_quorum)
        if finding.index not in indexes:
            continue
        sources = [judged[index] for index in indexes if fragment.ensemble[index] in available]
        series.append(_bad_everywhere(sources, range(first, last + 1, size)))
    found = list(islice(merge(*series), UNTARGETED_TOLD_MAX + 1))
    return found, len(found) > UNTARGETED_TOLD_MAX


def _bad_everywhere(sources: Sequence[CopyFinding], entry_ids: range) -> Iterable[int]:
    """Return those of the entries that each of the sources is known to lack."""
    if not sources:
        return entry_ids
    fewest = min(sources, key=lambda finding: finding.bad_count)
    return (
        entry_id
        for entry_id in merge(fewest.absent, fewest.mismatched)
        if entry_id in entry_ids and all(entry_id in f for f in sources)
        # A bookie that could not read the entry may still have it.
        if not any(entry_id in f.unreadable for f in sources)
    )


def _with_entries(facts: Facts, entry_ids: Collection[int], *, is_cut: bool = False) -> Facts:
    """Add the first entries and their number. If ``is_cut``, the number is a lower bound."""
    count = min(len(entry_ids) - 1, LACKING_MAX) if is_cut else len(entry_ids)
    return structs.replace(
        facts,
        entry_ids=tuple(sorted(entry_ids)[:ENTRIES_NAMED_MAX]),
        entry_count=count,
        has_more_entries=is_cut,
    )
