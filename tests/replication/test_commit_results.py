"""Metadata that may be written although some copies are incomplete."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from ledgers.errors import FencedError
from ledgers.model import BookieId
from ledgers.registration import BookieView, RegisteredBookie
from replication.cluster import ClusterView
from replication.commit import CopyResults
from replication.copy_reader import CopyFinding, Verdict
from replication.copying import CopyOutcome
from replication.entry_runs import NO_ENTRIES, EntryRuns
from replication.plan import Plan, Repair
from replication.reasons import Facts, Reason
from tests.replication.ledger_values import (
    B1,
    B2,
    B3,
    B4,
    B5,
    closed_ledger,
    fragment,
    inspection_of,
)

ALL = [fragment().entries_of(index) for index in range(3)]
COPIED = CopyOutcome(entry_count=len(ALL[1]))


def repair(index: int, target: BookieId) -> Repair:
    return Repair(fragment=fragment(), index=index, target=target, entry_ids=ALL[index])


def finding(index: int, verdict: Verdict, *, mismatched: Sequence[int] = ()) -> CopyFinding:
    return CopyFinding(
        fragment=fragment(), index=index, verdict=verdict, mismatched=EntryRuns(mismatched)
    )


def results(
    steps: Sequence[tuple[Repair, CopyOutcome]],
    *,
    findings: Sequence[CopyFinding] = (finding(0, Verdict.GOOD),),
    changed: Sequence[BookieId] = (),
) -> CopyResults:
    return CopyResults(
        inspection=inspection_of(findings),
        plan=Plan(repairs=tuple(step for step, _ in steps)),
        outcomes=[outcome for _, outcome in steps],
        is_unchanged=lambda bookie: bookie not in changed,
    )


def ensembles(found: CopyResults) -> list[tuple[BookieId, ...]]:
    return [segment.ensemble for segment in found.metadata.segments]


def test_a_complete_copy_is_named() -> None:
    found = results([(repair(1, B4), COPIED)])

    assert ensembles(found) == [(B1, B4, B3)]
    assert found.is_complete
    assert found.blocked == []


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(CopyOutcome(target_error=FencedError("no")), id="the target refused"),
        pytest.param(CopyOutcome(entry_count=6, unknown=(4,)), id="a replica did not answer"),
        pytest.param(
            CopyOutcome(entry_count=5, unknown=(4,), without_copy=(7,)), id="and another is lost"
        ),
        pytest.param(
            CopyOutcome(entry_count=2, without_copy=(7,)), id="some were not even tried to copy"
        ),
    ],
)
def test_rule_s1_an_incomplete_copy_is_not_named(
    outcome: CopyOutcome,
) -> None:
    """Nothing is split."""
    found = results([(repair(1, B4), outcome), (repair(2, B5), COPIED)])

    assert ensembles(found) == [(B1, B2, B5)]
    assert not found.is_complete


def test_rule_s3_a_target_registered_again_is_not_named() -> None:
    lost = CopyOutcome(entry_count=6, without_copy=(7,))

    found = results([(repair(1, B4), COPIED), (repair(2, B5), lost)], changed=[B4, B5])

    assert found.metadata == found.inspection.metadata
    assert not found.is_complete


def test_rule_s7_without_one_good_entry_nothing_is_split() -> None:
    nothing = CopyOutcome(without_copy=tuple(ALL[1]))
    bad = [finding(0, Verdict.MISSING, mismatched=ALL[0]), finding(1, Verdict.BOOKIE_ABSENT)]

    found = results([(repair(1, B4), nothing)], findings=bad)

    assert not found.is_split
    assert results([(repair(1, B4), nothing)]).is_split, "else it would be"


def lacking(*findings: CopyFinding) -> list[Facts]:
    """Return the facts if B2's copy lacks entries 4 and 7, and B3's 4 and 5."""
    found = results(
        [
            (repair(1, B4), CopyOutcome(entry_count=5, without_copy=(4, 7))),
            (repair(2, B5), CopyOutcome(entry_count=5, without_copy=(4, 5))),
        ],
        findings=findings,
    )
    assert {blocked.reason for blocked in found.blocked} == {Reason.NO_COPY}
    return [blocked.facts for blocked in found.blocked]


def test_lost_entries_are_reported_once_with_all_absent_bookies() -> None:
    both = lacking(
        finding(0, Verdict.GOOD),
        finding(1, Verdict.BOOKIE_ABSENT),
        finding(2, Verdict.IN_MAINTENANCE),
    )
    one = lacking(
        finding(0, Verdict.GOOD), finding(1, Verdict.BOOKIE_ABSENT), finding(2, Verdict.MISSING)
    )
    none = lacking(finding(0, Verdict.GOOD))

    assert both == [
        Facts(entry_ids=(4, 7), entry_count=2, decommissioned=(B2, B3)),
        Facts(entry_ids=(5,), entry_count=1, decommissioned=(B3,)),
        Facts(withheld_count=9),
    ]
    assert one[:2] == [
        Facts(entry_ids=(4, 7), entry_count=2, decommissioned=(B2,)),
        Facts(entry_ids=(5,), entry_count=1),
    ]
    assert none[0] == Facts(entry_ids=(4, 5, 7), entry_count=3)


def test_entries_without_copy_and_target_are_not_all_counted() -> None:
    whole = fragment((B2, B3), last=10**9)
    lost = [
        CopyFinding(fragment=whole, index=index, verdict=Verdict.BOOKIE_ABSENT) for index in (0, 1)
    ]
    inspection = inspection_of(lost, closed_ledger((B2, B3), last_entry_id=10**9))

    [blocked] = CopyResults(
        inspection=inspection,
        plan=Plan(untargeted=tuple(lost)),
        outcomes=[],
        is_unchanged=lambda bookie: True,
    ).blocked

    assert blocked.facts == Facts(
        entry_ids=(0, 1, 2, 3, 4),
        entry_count=1_000,
        has_more_entries=True,
        decommissioned=(B2, B3),
    )


@pytest.mark.parametrize("is_unreadable", [False, True])
def test_rule_s5_an_unreadable_entry_without_target_is_not_called_lost(
    is_unreadable: bool,
) -> None:
    """B4 has another fragment, so it may have the entry, too."""
    bad = EntryRuns([0, 4])
    found = CopyFinding(
        fragment=fragment((B1, B2)),
        index=0,
        verdict=Verdict.MISSING,
        absent=NO_ENTRIES if is_unreadable else bad,
        unreadable=bad if is_unreadable else NO_ENTRIES,
    )
    lost = CopyFinding(fragment=fragment((B1, B2)), index=1, verdict=Verdict.BOOKIE_ABSENT)
    writable = {
        b: RegisteredBookie(bookie_id=b, address=None, czxid=1, is_writable=True) for b in (B1, B4)
    }
    inspection = replace(
        inspection_of([found, lost], closed_ledger((B1, B2), (B1, B4), starts=(0, 10))),
        view=ClusterView(bookies=BookieView(writable=writable)),
    )

    blocked = CopyResults(
        inspection=inspection,
        plan=Plan(untargeted=(lost,)),
        outcomes=[],
        is_unchanged=lambda bookie: True,
    ).blocked

    told = [(each.facts.entry_ids, each.facts.are_others_unasked) for each in blocked]
    assert told == ([] if is_unreadable else [((0, 4), True)])


def test_entries_without_copy_are_not_reported_twice() -> None:
    """They have no target either."""
    whole = fragment(last=8)
    lost = [
        CopyFinding(fragment=whole, index=index, verdict=Verdict.BOOKIE_ABSENT) for index in (1, 2)
    ]
    step = Repair(fragment=whole, index=1, target=B4, entry_ids=whole.entries_of(1))

    found = CopyResults(
        inspection=inspection_of([finding(0, Verdict.GOOD), *lost]),
        plan=Plan(repairs=(step,), untargeted=(lost[1],)),
        outcomes=[CopyOutcome(entry_count=3, without_copy=(1, 4, 7))],
        is_unchanged=lambda bookie: True,
    )

    first, *others = (each.facts.entry_ids for each in found.blocked)
    assert first == (1, 4, 7)
    assert not any({1, 4, 7}.intersection(other) for other in others)
