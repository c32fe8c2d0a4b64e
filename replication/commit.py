"""What came of a plan: the metadata that may be written for it (rule S1), and what is in the way of
the rest.

The ledger's metadata after its copies were made: a pure function of both.

Where entries of a closed ledger have no good copy anywhere, the segment is split around them: they
keep the bookies that once had them, in a small segment of their own, and all the rest gets its new
ensemble. What is lost so stands at an end of a segment, where every later check looks, whoever's it
is; and when a bookie comes back that has it, it is copied like anything else.

Which bookie index stores an entry depends on the entry's id alone, not on where its segment begins:
a split moves no entry. A target is named only for entries that it has acknowledged (rule S1).

What speaks against metadata that is to be written as it is: bookies that it names without the
copies.

The words are an operator's, who is asked whether to write it all the same: one sentence a bookie,
and kind of doubt.

What will come of a plan, as far as the survey tells: the copies that will be made, and what is
in the way of the rest.

For ``bookmender plan``, and for copies that have no target, which nobody tries. The worker's own
``CopyResults`` decide; only what each copy comes to is foreseen: an entry that every bookie there
is known to lack, or of which no bookie is there, is without a copy. Bookies that hold other parts
of the ledger may have it all the same; a worker asks them, and nobody here.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import merge
from itertools import islice

from msgspec import Struct, structs

from ledgers.model import BookieId, Fragment, LedgerMetadata, Segment, write_set
from replication.copy_checks import IndexFinding, Verdict
from replication.copying import LACKING_MAX, CopyOutcome, split_ends, withheld_end
from replication.entry_runs import NO_ENTRIES, EntryRuns
from replication.inspection import Inspection, RecoveryRequired
from replication.plan import Plan, Repair
from replication.reasons import Blocked, Reason

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


_TOLD: Mapping[Verdict, str] = {
    Verdict.LOST: "{bookie} is not registered: the {count} entries from {first} to {last} would miss a copy",
    Verdict.AWAY: "{bookie} is under maintenance: nobody knows if it holds its {count} entries from {first} to {last}",
    Verdict.MISSING: "{bookie} lacks {bad} of the {count} entries from {first} to {last} that it would be named for",
    Verdict.UNKNOWN: "{bookie} did not say if it holds its {count} entries from {first} to {last}",
}
"""Draining bookies are asked as all others are; see ``Restorer``."""


def copy_doubts(
    surveyed: Inspection | RecoveryRequired | Blocked, closed_part: Inspection | None = None
) -> list[str]:
    """``closed_part``: of an ``RecoveryRequired``, what can be surveyed nonetheless."""
    match surveyed:
        case Blocked() as blocked:
            return [f"what its bookies hold cannot be told: {blocked.detail}"]
        case RecoveryRequired() as found:
            gone = [
                f"{bookie} of its open last fragment is not registered" for bookie in found.leaving
            ]
            lacking = [
                f"{bookie} lacks entries of its open last fragment" for bookie in found.lacking
            ]
            return [*gone, *lacking, *(_told(closed_part.findings) if closed_part else [])]
        case Inspection() as inspection:
            return _told(inspection.findings)


def _told(findings: Sequence[IndexFinding]) -> list[str]:
    doubted = defaultdict[tuple[str, Verdict], list[IndexFinding]](list)
    for finding in findings:
        if finding.verdict in _TOLD and finding.entries:
            doubted[finding.bookie, finding.verdict].append(finding)
    return [
        _TOLD[verdict].format(
            bookie=bookie,
            bad=sum(each.bad_count for each in found),
            count=sum(len(each.entries) for each in found),
            first=min(each.entries[0] for each in found),
            last=max(each.entries[-1] for each in found),
        )
        for (bookie, verdict), found in doubted.items()
    ]


class Lacking(Struct, frozen=True, kw_only=True):
    """Entries of a copy that cannot be had, ascending. ``is_cut``: these are not all."""

    without_copy: Sequence[int] = ()
    unknown: Sequence[int] = ()
    """Some bookie there has them, and could not read them."""
    is_cut: bool = False


class PlannedOutcome:
    """Of one survey."""

    def __init__(self, inspection: Inspection) -> None:
        self._survey = inspection
        self._available = inspection.view.available
        self._findings: dict[Fragment, dict[int, IndexFinding]] = defaultdict(dict)
        for finding in inspection.findings:
            self._findings[finding.fragment][finding.index] = finding

    def outcome(self, repair: Repair) -> CopyOutcome:
        """As ``copy_index`` would tell of it, if every bookie gives what is not known to be bad."""
        lacking = self.lacking(repair.fragment, repair.index, repair.entry_ids)
        withheld = _withheld(repair, lacking.without_copy)
        without_copy = tuple(e for e in lacking.without_copy if e not in withheld)
        left_count = len(without_copy) + len(lacking.unknown) + len(withheld)
        is_hopeless = left_count > LACKING_MAX  # then it is given up
        entry_count = 0 if is_hopeless else len(repair.entry_ids) - left_count
        return CopyOutcome(
            entry_count=entry_count,
            entry_bytes=entry_count * self._survey.entry_bytes,
            without_copy=without_copy,
            unknown=tuple(lacking.unknown),
            withheld=withheld,
        )

    def lacking(
        self, fragment: Fragment, index: int, entry_ids: Sequence[int], *, limit: int = LACKING_MAX
    ) -> Lacking:
        """Those of ``entry_ids``, which the bookie index stores, that no bookie there will give; of
        more than ``limit`` the first of them, and one."""
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
        """Entries that no bookie there has good, by write sets: E apart, they share one."""
        size, last = fragment.ensemble_size, fragment.last_entry_id
        assert last is not None, fragment  # none is copied whose end nobody knows (rule S4)
        for first in range(fragment.first_entry_id, fragment.first_entry_id + size):
            if index not in _write_set(fragment, first):
                continue
            sources = self._sources(fragment, first)
            if not sources:
                yield range(first, last + 1, size)
            elif all(finding.bad_count for finding in sources):
                yield _bad_everywhere(sources, first % size, size)

    def _sources(self, fragment: Fragment, entry_id: int) -> list[IndexFinding]:
        """What is known of the entry's bookies that are there."""
        findings = self._findings[fragment]
        indexes = _write_set(fragment, entry_id)
        return [findings[index] for index in indexes if fragment.ensemble[index] in self._available]


def _write_set(fragment: Fragment, entry_id: int) -> tuple[int, ...]:
    return write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )


def _bad_everywhere(sources: Sequence[IndexFinding], residue: int, size: int) -> Iterator[int]:
    fewest = min(sources, key=lambda finding: finding.bad_count)
    for entry_id in merge(fewest.absent, fewest.mismatched, fewest.unreadable):
        if entry_id % size == residue and all(finding.is_bad(entry_id) for finding in sources):
            yield entry_id


def _withheld(repair: Repair, without_copy: Sequence[int]) -> tuple[int, ...]:
    """The end that a copy in place leaves out (``copy_index``)."""
    if not without_copy or not repair.is_in_place:
        return ()
    lost = EntryRuns(without_copy)
    inner, ends = split_ends(repair.fragment, repair.index, repair.entry_ids)
    return tuple(withheld_end(ends, lost=lost)) if any(e in lost for e in inner) else ()


def simulated(repair: Repair, outcome: CopyOutcome, *, is_split: bool) -> Repair:
    """The repair without what does not come of it. ``is_split``: what is kept back will come in the
    next round."""
    withheld = () if is_split else outcome.withheld
    left = EntryRuns(sorted({*outcome.without_copy, *outcome.unknown, *withheld}))
    if not left:
        return repair
    made = array("q", (entry_id for entry_id in repair.entry_ids if entry_id not in left))
    byte_count = len(made) * repair.byte_count // len(repair.entry_ids)
    return structs.replace(repair, entry_ids=made, byte_count=byte_count)


UNTARGETED_TOLD_MAX = 1_000
"""Entries without a copy that are counted of a copy that has no target: of a large ledger that
takes long, try by try."""


class CopyResults(
    Struct, frozen=True, kw_only=True, dict=True
):  # dict: the properties are computed once
    """``outcomes``: of each repair of the plan. ``is_unchanged``: whether a target is still the
    bookie that acknowledged its copies. ``has_bad_sources``: members were found to lack what a
    check does not ask for, so that they are to be read whole. ``are_foreseen``: nothing was copied,
    and nobody asked (``PlannedOutcome``). ``may_split``: whether a segment is split around entries that
    a bookie which is away may still have."""

    inspection: Inspection
    plan: Plan
    outcomes: Sequence[CopyOutcome]
    is_unchanged: Callable[[BookieId], bool]
    has_bad_sources: bool = False
    are_foreseen: bool = False
    may_split: bool = True

    @cached_property
    def metadata(self) -> LedgerMetadata:
        """With every index that was copied whole, or but for entries that nobody has
        (``_splits``)."""
        before, after = self.inspection.metadata, self._rewritten
        # An earlier repair may have split a segment while bookies were away. No entry is lost now.
        may_join = before.is_closed and after != before and self.is_complete
        return joined(after) if may_join else after

    @cached_property
    def _rewritten(self) -> LedgerMetadata:
        return rewritten(self.inspection.metadata, [*self._moves, *self._splits])

    @property
    def new_targets(self) -> frozenset[BookieId]:
        """Bookies that the metadata comes to name, in some fragment, on the strength of a copy."""
        return frozenset(change.target for change in (*self._moves, *self._splits))

    @property
    def is_split(self) -> bool:
        """Whether a segment is cut anew: what lies beside the lost entries can now be seen to."""
        return len(self._rewritten.segments) > len(self.inspection.metadata.segments)

    @property
    def is_complete(self) -> bool:
        """Whether all that was planned was done, away from where it was, nothing was in the way,
        and nothing else is known to be missing.

        What was written in place is first to be read back.
        """
        is_done = not self.plan.blocked and len(self._moves) == len(self.outcomes)
        return is_done and not self.has_bad_sources

    @property
    def only_to_empty(self) -> frozenset[BookieId]:
        """Bookies that drain, and which nobody asked what they have, where all that is left is to
        empty them: each copy on others is there, or was made. Empty where more is left."""
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
    def in_the_way(self) -> list[Blocked]:
        """Nothing where a target failed: another round takes another."""
        unknown = {entry_id for _, outcome in self._pairs for entry_id in outcome.unknown}
        return [
            *self.plan.blocked,
            *(_no_copy(lost, holders) for holders, lost in self._lost_by_holders().items()),
            *self._left(),
            *([_no_answer(unknown)] if unknown else []),
        ]

    @property
    def lasting(self) -> list[tuple[Repair, CopyOutcome]]:
        """Those whose target is to be named, or is already: what else was copied was copied in
        vain."""
        named = {(change.fragment, change.index) for change in (*self._moves, *self._splits)}
        return [pair for pair in self._pairs if pair[0].is_in_place or pair[0].key in named]

    def _lost_by_holders(self) -> dict["_Holders", set[int]]:
        """Entries without a good copy, also of copies that have no target."""
        lacking = self._lacking()
        if not lacking:  # nearly always
            return {}
        away: dict[Fragment, list[IndexFinding]] = defaultdict(list)
        for finding in self.inspection.findings:
            if finding.verdict in (Verdict.LOST, Verdict.AWAY):
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
        if self.plan.untargeted:  # seldom
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
        """Whether there are bookies of the ledger's other parts, which a copy asks at last."""
        others = self.inspection.metadata.bookies - frozenset(fragment.ensemble)
        return not others.isdisjoint(self.inspection.view.available)

    def _left(self) -> list[Blocked]:
        """What shares the fate of entries without a copy (``_left_count``), if anything."""
        if self.is_split:  # seen to in the next round
            return []
        count = sum(_left_count(repair, outcome) for repair, outcome in self._pairs)
        if not count:
            return []
        copies = (
            "1 copy of another entry is" if count == 1 else f"{count} copies of other entries are"
        )
        if any(len(outcome.without_copy) > LACKING_MAX for outcome in self.outcomes):
            copies = "copies of others, if there are any, are"  # nobody counted on
        return [Blocked(reason=Reason.NO_COPY, detail=f"{copies} not made on their account")]

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
        """Copies that lack nothing but entries of which there is no good copy.

        None of a ledger that is not closed, nor while no entry at all proves our key (rule S7), nor
        where a bookie that is away for maintenance may have them, nor around more than a few
        places. Unless ``may_split``, nor where a bookie that is not registered may have them and
        keeps its cookie: two bookies that restart together would leave ledgers cut into many
        segments.
        """
        if not any(outcome.without_copy for outcome in self.outcomes):  # nearly always
            return []
        if not self.inspection.metadata.is_closed or not self._is_key_proven:
            return []
        away = {
            finding.fragment.first_entry_id
            for finding in self.inspection.findings
            if finding.verdict is Verdict.AWAY or (not self.may_split and self._may_return(finding))
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

    def _may_return(self, finding: IndexFinding) -> bool:
        """Whether its bookie is not registered, and was not decommissioned."""
        return finding.verdict is Verdict.LOST and finding.bookie in self.inspection.view.cookies

    @property
    def _is_key_proven(self) -> bool:
        return self.entry_count > 0 or self.inspection.has_good_entry


def _lacks_only_lost(repair: Repair, outcome: CopyOutcome) -> bool:
    """Of a copy that was made elsewhere, all the rest must be there; in place it may come later."""
    if outcome.target_error is not None or outcome.unknown or not outcome.without_copy:
        return False
    had_count = outcome.entry_count + len(outcome.without_copy)
    return repair.is_in_place or had_count == len(repair.entry_ids)


def _left_count(repair: Repair, outcome: CopyOutcome) -> int:
    """How many entries do not get the copy that they miss, only because others have none at all."""
    if not outcome.without_copy:
        return 0
    if repair.is_in_place:
        return len(outcome.withheld)
    return len(repair.entry_ids) - len(outcome.without_copy) - len(outcome.unknown)


class _Holders(Struct, frozen=True, kw_only=True):
    """``away``: the bookies that should have an entry and are away; whether their copies are good
    nobody knows."""

    away: tuple[BookieId, ...]
    are_others_unasked: bool
    is_cut: bool


class _Lacking(Struct, frozen=True, kw_only=True):
    """What is without a copy of a fragment. ``is_foreseen``: nobody asked; ``is_cut``: these are
    not all."""

    fragment: Fragment
    entry_ids: Sequence[int]
    is_foreseen: bool
    is_cut: bool


def _no_copy(lost: Collection[int], holders: _Holders) -> Blocked:
    entries, away = _listed(sorted(lost), is_cut=holders.is_cut), holders.away
    if not away:
        detail = f"no good copy of {entries} is found, and no bookie that should have one is away"
    else:
        detail = (
            f"{entries} may have good copies on {' and '.join(away)} only, "
            f"which {'is' if len(away) == 1 else 'are'} away"
        )
    if holders.are_others_unasked:
        detail += " (bookies of the ledger's other parts were not asked)"
    return Blocked(reason=Reason.NO_COPY, detail=detail)


def _no_answer(unknown: Collection[int]) -> Blocked:
    return Blocked(
        reason=Reason.NO_ANSWER, detail=f"no replica answered for {_listed(sorted(unknown))}"
    )


def _listed(entry_ids: Sequence[int], *, is_cut: bool = False) -> str:
    shown = ", ".join(map(str, entry_ids[:5]))
    if len(entry_ids) == 1:
        return f"entry {shown}"
    least = min(len(entry_ids) - 1, LACKING_MAX)
    count = f"more than {least:,}" if is_cut else f"{len(entry_ids)}"
    return f"{count} entries ({shown}{', …' if len(entry_ids) > 5 else ''})"
