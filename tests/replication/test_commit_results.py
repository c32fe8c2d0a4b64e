"""Metadata that may be written although some copies are incomplete."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from ledgers.errors import FencedError
from ledgers.model import BookieId
from ledgers.registration import BookieView, RegisteredBookie
from replication.cluster import ClusterView
from replication.commit import CopyResults, PlannedOutcome
from replication.copy_reader import CopyFinding, Verdict
from replication.copying import CopyOutcome
from replication.entry_runs import EntryRuns
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


def foreseen_without_b2_and_b3(last: int) -> CopyResults:
    """Return the predicted results if B2's copies go to B4, and B3's have no target."""
    whole = fragment(last=last)
    lost = [
        CopyFinding(fragment=whole, index=index, verdict=Verdict.BOOKIE_ABSENT) for index in (1, 2)
    ]
    good = CopyFinding(fragment=whole, index=0, verdict=Verdict.GOOD)
    writable = {B1: RegisteredBookie(bookie_id=B1, address=None, czxid=1, is_writable=True)}
    inspection = replace(
        inspection_of([good, *lost], closed_ledger((B1, B2, B3), last_entry_id=last)),
        view=ClusterView(bookies=BookieView(writable=writable)),
    )
    step = Repair(fragment=whole, index=1, target=B4, entry_ids=whole.entries_of(1))
    return CopyResults(
        inspection=inspection,
        plan=Plan(repairs=(step,), untargeted=(lost[1],)),
        outcomes=[PlannedOutcome(inspection).outcome(step)],
        is_unchanged=lambda bookie: True,
        are_foreseen=True,
    )


@pytest.mark.parametrize(
    ("last", "is_lasting", "told"),
    [
        pytest.param(8, True, [(3, False, None)], id="few"),
        pytest.param(
            59_999,
            False,
            [(20_000, False, None), (0, False, 20_000)],
            id="many",
        ),
        pytest.param(
            10**9,
            False,
            [(100_000, True, None), (0, False, 0)],
            id="very many, not counted to the end",
        ),
    ],
)
def test_a_copy_of_any_size_is_predicted(
    last: int, is_lasting: bool, told: Sequence[tuple[int, bool, int | None]]
) -> None:
    found = foreseen_without_b2_and_b3(last)

    assert bool(found.lasting) is is_lasting
    facts = [blocked.facts for blocked in found.blocked]
    assert [(f.entry_count, f.has_more_entries, f.withheld_count) for f in facts] == told


def test_a_very_long_run_of_lost_entries_is_not_cut_out() -> None:
    whole = fragment((B2, B3), last=10**6)
    lost = [
        CopyFinding(fragment=whole, index=index, verdict=Verdict.BOOKIE_ABSENT) for index in (0, 1)
    ]
    inspection = inspection_of(lost, closed_ledger((B2, B3), last_entry_id=10**6))
    step = Repair(fragment=whole, index=0, target=B4, entry_ids=whole.entries_of(0))

    found = CopyResults(
        inspection=inspection,
        plan=Plan(repairs=(step,)),
        outcomes=[PlannedOutcome(inspection).outcome(step)],
        is_unchanged=lambda bookie: True,
        are_foreseen=True,
    )

    assert not found.lasting
    assert not found.is_split


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
