"""What came of a plan: the metadata that may be written for it (rule S1), and what is in the way of
the rest."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from msgspec import Struct

from ledgers.fragments import Fragment
from ledgers.metadata import BookieId, LedgerMetadata
from replication.copying.copy_index import LACKING_MAX
from replication.copying.copy_job import CopyOutcome
from replication.copying.foresight import Foresight
from replication.planning.check import IndexFinding, Verdict
from replication.planning.entry_runs import EntryRuns
from replication.planning.plan import Plan, Repair
from replication.planning.rewrite import (
    LOST_PLACES_MAX,
    Change,
    joined,
    lost_places,
    rewritten,
)
from replication.planning.survey import Survey
from replication.reasons import Blocked, Reason

UNTARGETED_TOLD_MAX = 1_000
"""Entries without a copy that are counted of a copy that has no target: of a large ledger that
takes long, try by try."""


class CopyResults(
    Struct, frozen=True, kw_only=True, dict=True
):  # dict: the properties are computed once
    """``outcomes``: of each repair of the plan. ``is_unchanged``: whether a target is still the
    bookie that acknowledged its copies. ``has_bad_sources``: members were found to lack what a
    check does not ask for, so that they are to be read whole. ``are_foreseen``: nothing was copied,
    and nobody asked (``Foresight``). ``may_split``: whether a segment is split around entries that
    a bookie which is away may still have."""

    survey: Survey
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
        before, after = self.survey.metadata, self._rewritten
        # An earlier repair may have split a segment while bookies were away. No entry is lost now.
        may_join = before.is_closed and after != before and self.is_complete
        return joined(after) if may_join else after

    @cached_property
    def _rewritten(self) -> LedgerMetadata:
        return rewritten(self.survey.metadata, [*self._moves, *self._splits])

    @property
    def new_targets(self) -> frozenset[BookieId]:
        """Bookies that the metadata comes to name, in some fragment, on the strength of a copy."""
        return frozenset(change.target for change in (*self._moves, *self._splits))

    @property
    def is_split(self) -> bool:
        """Whether a segment is cut anew: what lies beside the lost entries can now be seen to."""
        return len(self._rewritten.segments) > len(self.survey.metadata.segments)

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
            for finding in self.survey.findings
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
        for finding in self.survey.findings:
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
            foresight = Foresight(self.survey)
            limit = LACKING_MAX if self.are_foreseen else UNTARGETED_TOLD_MAX
            for f in self.plan.untargeted:
                found = foresight.lacking(f.fragment, f.index, f.entries, limit=limit)
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
        others = self.survey.metadata.bookies - frozenset(fragment.ensemble)
        return not others.isdisjoint(self.survey.view.available)

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
        if not self.survey.metadata.is_closed or not self._is_key_proven:
            return []
        away = {
            finding.fragment.first_entry_id
            for finding in self.survey.findings
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
        return finding.verdict is Verdict.LOST and finding.bookie in self.survey.view.cookies

    @property
    def _is_key_proven(self) -> bool:
        return self.entry_count > 0 or self.survey.has_good_entry


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
        return len(outcome.kept_back)
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
