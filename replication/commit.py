"""Decides what is written after the copies of a plan: the metadata (rule S1), and what blocks the
rest.

``CopyResults`` is a pure function of a plan and of the outcomes of its copies. ``PlannedOutcome``
predicts such outcomes for the dry run, and for copies without a target, which are never tried.
``copy_doubts`` says what speaks against metadata that an operator wants to restore.

If entries of a closed ledger have no good copy anywhere, their segment is split around them. They
keep the bookies that once had them, in a small segment of their own, and all other entries get
their new ensemble. So a lost entry is at an end of a segment, which every later check reads. When a
bookie returns that has the entry, it is copied like any other.

A split moves no entry: the bookie index of an entry depends on its id, not on where its segment
begins. A target is named only for entries that it has acknowledged (rule S1).
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import merge
from itertools import islice

from msgspec import Struct, structs

from ledgers.model import BookieId, Fragment, LedgerMetadata, Segment, write_set
from replication.cluster import ClusterView
from replication.copy_reader import CopyFinding, Verdict
from replication.copying import LACKING_MAX, CopyOutcome, split_ends, withheld_end
from replication.entry_runs import NO_ENTRIES, EntryRuns
from replication.inspection import Inspection, RecoveryRequired
from replication.plan import Plan, Repair
from replication.reasons import Blocked, Facts, Reason, absence_facts, named

LOST_PLACES_MAX = 10
"""Runs of lost entries around which a ledger is split at most. With more runs, the ledger would
have too many segments to be useful."""
ENTRIES_NAMED_MAX = 5
"""Entry ids in the facts of a blocked repair. The others are counted."""

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
    bounds = sorted((run.start, run.stop) for change in changes for run in change.lost.runs)
    places: list[range] = []
    for start, stop in bounds:
        if places and start <= places[-1].stop:
            places[-1] = range(places[-1].start, max(places[-1].stop, stop))
        else:
            places.append(range(start, stop))
    return places


def _parts(segment: Segment, changes: Sequence[Change]) -> list[Segment]:
    """Return the segment, split around its lost entries."""
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


# --- Restored metadata ----------------------------------------------------------------------------


class CopyDoubt(Struct, frozen=True, kw_only=True):
    """A bookie that restored metadata would name although its copies may be incomplete.

    ``bad_count``: how many of its ``entry_count`` entries it lacks or has damaged, if it is
    MISSING. The counts and ids are None in an open last fragment.
    """

    bookie: BookieId
    verdict: Verdict
    entry_count: int | None = None
    bad_count: int | None = None
    first_entry_id: int | None = None
    last_entry_id: int | None = None


_DOUBTFUL = (Verdict.BOOKIE_ABSENT, Verdict.IN_MAINTENANCE, Verdict.MISSING, Verdict.UNKNOWN)
"""Draining bookies are asked like all others; see ``Restorer``."""


def copy_doubts(
    found: Inspection | RecoveryRequired | Blocked, closed_part: Inspection | None = None
) -> list[CopyDoubt | Blocked]:
    """Return what speaks against metadata that was inspected before it is written.

    ``closed_part``: the closed fragments of a ``RecoveryRequired``.
    """
    match found:
        case Blocked() as blocked:
            return [blocked]
        case RecoveryRequired():
            leaving = [CopyDoubt(bookie=b, verdict=Verdict.BOOKIE_ABSENT) for b in found.leaving]
            lacking = [CopyDoubt(bookie=b, verdict=Verdict.MISSING) for b in found.lacking]
            return [*leaving, *lacking, *(_doubts(closed_part.findings) if closed_part else [])]
        case Inspection() as inspection:
            return [*_doubts(inspection.findings)]


def _doubts(findings: Sequence[CopyFinding]) -> list[CopyDoubt]:
    """Return one doubt for each bookie and verdict."""
    doubted = defaultdict[tuple[BookieId, Verdict], list[CopyFinding]](list)
    for finding in findings:
        if finding.verdict in _DOUBTFUL and finding.entries:
            doubted[finding.bookie, finding.verdict].append(finding)
    return [
        CopyDoubt(
            bookie=bookie,
            verdict=verdict,
            entry_count=sum(len(each.entries) for each in found),
            bad_count=sum(each.bad_count for each in found),
            first_entry_id=min(each.entries[0] for each in found),
            last_entry_id=max(each.entries[-1] for each in found),
        )
        for (bookie, verdict), found in doubted.items()
    ]


# --- Predicted outcomes ---------------------------------------------------------------------------


class Lacking(Struct, frozen=True, kw_only=True):
    """Entries that cannot be copied, ascending. ``is_cut``: there are more."""

    without_copy: Sequence[int] = ()
    unknown: Sequence[int] = ()
    """A registered bookie has them, and could not read them."""
    is_cut: bool = False


class PlannedOutcome:
    """Predicts the outcome of copies from an inspection.

    An entry counts as without a copy if every registered bookie of its write set is known to lack
    it. Bookies of other fragments may have it; a worker asks them, a prediction does not.
    """

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        self._available = inspection.view.available
        self._findings: dict[Fragment, dict[int, CopyFinding]] = defaultdict(dict)
        for finding in inspection.findings:
            self._findings[finding.fragment][finding.index] = finding

    def outcome(self, repair: Repair) -> CopyOutcome:
        """Return what ``copy_index`` would return if every bookie gives what is not known to be
        bad."""
        lacking = self.lacking(repair.fragment, repair.index, repair.entry_ids)
        withheld = _withheld(repair, lacking.without_copy)
        without_copy = tuple(e for e in lacking.without_copy if e not in withheld)
        left_count = len(without_copy) + len(lacking.unknown) + len(withheld)
        is_hopeless = left_count > LACKING_MAX  # then the copy is given up
        entry_count = 0 if is_hopeless else len(repair.entry_ids) - left_count
        return CopyOutcome(
            entry_count=entry_count,
            entry_bytes=entry_count * self._inspection.entry_bytes,
            without_copy=without_copy,
            unknown=tuple(lacking.unknown),
            withheld=withheld,
        )

    def lacking(
        self, fragment: Fragment, index: int, entry_ids: Sequence[int], *, limit: int = LACKING_MAX
    ) -> Lacking:
        """Return those of ``entry_ids``, which the bookie index stores, that no registered bookie
        will give. Of more than ``limit`` it returns ``limit`` + 1."""
        doubted = merge(*self._doubted(fragment, index))
        found = islice((e for e in doubted if e in entry_ids), limit + 1)
        without_copy, unknown = array("q"), array("q")
        for entry_id in found:
            are_any_unread = any(
                entry_id in finding.unreadable for finding in self._sources(fragment, entry_id)
            )
            (unknown if are_any_unread else without_copy).append(entry_id)
        is_cut = len(without_copy) + len(unknown) > limit
        return Lacking(without_copy=without_copy, unknown=unknown, is_cut=is_cut)

    def _doubted(self, fragment: Fragment, index: int) -> Iterator[Iterable[int]]:
        """Yield entries of which no registered bookie has a good copy, one series for each write
        set. Entries whose ids differ by the ensemble size share a write set."""
        size, last = fragment.ensemble_size, fragment.last_entry_id
        assert last is not None, fragment  # open fragments are not copied (rule S4)
        for first in range(fragment.first_entry_id, fragment.first_entry_id + size):
            if index not in _write_set(fragment, first):
                continue
            sources = self._sources(fragment, first)
            if not sources:
                yield range(first, last + 1, size)
            elif all(finding.bad_count for finding in sources):
                yield _bad_everywhere(sources, first % size, size)

    def _sources(self, fragment: Fragment, entry_id: int) -> list[CopyFinding]:
        """Return the findings on the registered bookies of the entry."""
        findings = self._findings[fragment]
        indexes = _write_set(fragment, entry_id)
        return [findings[index] for index in indexes if fragment.ensemble[index] in self._available]


def _write_set(fragment: Fragment, entry_id: int) -> tuple[int, ...]:
    return write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )


def _bad_everywhere(sources: Sequence[CopyFinding], residue: int, size: int) -> Iterator[int]:
    fewest = min(sources, key=lambda finding: finding.bad_count)
    for entry_id in merge(fewest.absent, fewest.mismatched, fewest.unreadable):
        if entry_id % size == residue and all(finding.is_bad(entry_id) for finding in sources):
            yield entry_id


def _withheld(repair: Repair, without_copy: Sequence[int]) -> tuple[int, ...]:
    """Return the end that a copy in place leaves out (``copy_index``)."""
    if not without_copy or not repair.is_in_place:
        return ()
    lost = EntryRuns(without_copy)
    inner, ends = split_ends(repair.fragment, repair.index, repair.entry_ids)
    return tuple(withheld_end(ends, lost=lost)) if any(e in lost for e in inner) else ()


def simulated(repair: Repair, outcome: CopyOutcome, *, is_split: bool) -> Repair:
    """Return the repair without the entries that would not be copied. ``is_split``: what is kept
    back will be copied in the next round."""
    withheld = () if is_split else outcome.withheld
    left = EntryRuns(sorted({*outcome.without_copy, *outcome.unknown, *withheld}))
    if not left:
        return repair
    made = array("q", (entry_id for entry_id in repair.entry_ids if entry_id not in left))
    byte_count = len(made) * repair.byte_count // len(repair.entry_ids)
    return structs.replace(repair, entry_ids=made, byte_count=byte_count)


UNTARGETED_TOLD_MAX = 1_000
"""Entries without a copy that are counted for a copy without a target. Counting more would take
long for a large ledger, at every attempt."""


# --- Results --------------------------------------------------------------------------------------


# dict: the properties are computed once.
class CopyResults(Struct, frozen=True, kw_only=True, dict=True):
    """The results of a plan's copies, and what follows from them.

    ``outcomes``: one for each repair of the plan. ``is_unchanged``: returns True if a target is
    still the registration that acknowledged its copies. ``has_bad_sources``: members lack entries
    that a check does not ask for, so they must be read completely. ``are_foreseen``: the outcomes
    are predictions (``PlannedOutcome``). ``may_return``: returns True if an absent bookie may soon
    return with the entries that it should have.
    """

    inspection: Inspection
    plan: Plan
    outcomes: Sequence[CopyOutcome]
    is_unchanged: Callable[[BookieId], bool]
    has_bad_sources: bool = False
    are_foreseen: bool = False
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
        """Return what blocks the rest. A failed target does not: the next round uses another."""
        unknown = {entry_id for _, outcome in self._pairs for entry_id in outcome.unknown}
        view = self.inspection.view
        return [
            *self.plan.blocked,
            *(_no_copy(lost, holders, view) for holders, lost in self._lost_by_holders().items()),
            *self._withheld(),
            *([_no_answer(unknown)] if unknown else []),
        ]

    @property
    def lasting(self) -> list[tuple[Repair, CopyOutcome]]:
        """The copies whose target the metadata names, or will name. Other copies were in vain."""
        named = {(change.fragment, change.index) for change in (*self._moves, *self._splits)}
        return [pair for pair in self._pairs if pair[0].is_in_place or pair[0].key in named]

    def _lost_by_holders(self) -> dict["_Holders", set[int]]:
        """Return the entries without a good copy, including those of copies without a target."""
        lacking = self._lacking()
        if not lacking:  # nearly always
            return {}
        away: dict[Fragment, list[CopyFinding]] = defaultdict(list)
        for finding in self.inspection.findings:
            if finding.verdict in (Verdict.BOOKIE_ABSENT, Verdict.IN_MAINTENANCE):
                away[finding.fragment].append(finding)
        lost: dict[_Holders, set[int]] = defaultdict(set)
        seen: set[int] = set()
        for each in lacking:
            are_others_unasked = each.is_foreseen and self._are_others_there(each.fragment)
            for entry_id in set(each.entry_ids) - seen:
                holders = _Holders(
                    away=tuple(f.bookie for f in away[each.fragment] if entry_id in f.entries),
                    are_others_unasked=are_others_unasked,
                    is_cut=each.is_cut,
                )
                lost[holders].add(entry_id)
            seen.update(each.entry_ids)
        return lost

    def _lacking(self) -> list["_Lacking"]:
        lacking = [
            _Lacking(
                fragment=repair.fragment,
                entry_ids=outcome.without_copy,
                is_foreseen=self.are_foreseen,
                is_cut=len(outcome.without_copy) > LACKING_MAX,
            )
            for repair, outcome in self._pairs
            if outcome.without_copy
        ]
        if self.plan.untargeted:  # rare
            planned_outcome = PlannedOutcome(self.inspection)
            limit = LACKING_MAX if self.are_foreseen else UNTARGETED_TOLD_MAX
            for f in self.plan.untargeted:
                found = planned_outcome.lacking(f.fragment, f.index, f.entries, limit=limit)
                lacking.append(
                    _Lacking(
                        fragment=f.fragment,
                        entry_ids=found.without_copy,
                        is_foreseen=True,
                        is_cut=found.is_cut,
                    )
                )
        return lacking

    def _are_others_there(self, fragment: Fragment) -> bool:
        """Return True if bookies of the ledger's other fragments are registered. A copy asks them
        last."""
        others = self.inspection.metadata.bookies - frozenset(fragment.ensemble)
        return not others.isdisjoint(self.inspection.view.available)

    def _withheld(self) -> list[Blocked]:
        """Return that other entries are not copied because of those without a copy, if so."""
        if self.is_split:  # the next round copies them
            return []
        count = sum(_withheld_count(repair, outcome) for repair, outcome in self._pairs)
        if not count:
            return []
        is_counted = all(len(outcome.without_copy) <= LACKING_MAX for outcome in self.outcomes)
        facts = Facts(withheld_count=count if is_counted else 0)
        return [Blocked(reason=Reason.NO_COPY, facts=facts)]

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
        if not self.inspection.metadata.is_closed or not self._is_key_proven:
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

    @property
    def _is_key_proven(self) -> bool:
        return self.entry_count > 0 or self.inspection.has_good_entry


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


class _Holders(Struct, frozen=True, kw_only=True):
    """The unregistered or unresponsive bookies that should have an entry, and what is not known
    about it."""

    away: tuple[BookieId, ...]
    are_others_unasked: bool
    is_cut: bool


class _Lacking(Struct, frozen=True, kw_only=True):
    """Entries of a fragment without a copy. ``is_foreseen``: no bookie was asked. ``is_cut``: there
    are more."""

    fragment: Fragment
    entry_ids: Sequence[int]
    is_foreseen: bool
    is_cut: bool


def _no_copy(lost: Collection[int], holders: _Holders, view: ClusterView) -> Blocked:
    """Return that the entries have no copy. Bookies in maintenance may be registered, but
    unresponsive."""
    facts = structs.replace(
        absence_facts(holders.away, view),
        in_maintenance=named(view.available.intersection(holders.away)),
        are_others_unasked=holders.are_others_unasked,
    )
    return Blocked(reason=Reason.NO_COPY, facts=_with_entries(facts, lost, is_cut=holders.is_cut))


def _no_answer(unknown: Collection[int]) -> Blocked:
    return Blocked(reason=Reason.NO_ANSWER, facts=_with_entries(Facts(), unknown))


def _with_entries(facts: Facts, entry_ids: Collection[int], *, is_cut: bool = False) -> Facts:
    """Add the first entries and their number. If ``is_cut``, the number is a lower bound."""
    count = min(len(entry_ids) - 1, LACKING_MAX) if is_cut else len(entry_ids)
    return structs.replace(
        facts,
        entry_ids=tuple(sorted(entry_ids)[:ENTRIES_NAMED_MAX]),
        entry_count=count,
        has_more_entries=is_cut,
    )
