"""What may be written after copies that were not all complete."""

from collections.abc import Sequence

import pytest

from ledgers.errors import FencedError
from ledgers.metadata import BookieId
from replication.copying.copy_job import CopyOutcome
from replication.copying.results import CopyResults
from replication.planning.check import Finding, Verdict
from replication.planning.entry_runs import EntryRuns
from replication.planning.plan import Plan, Repair
from replication.reasons import Reason
from tests.replication.ledger_values import B1, B2, B3, B4, B5, fragment, survey_of

ALL = [fragment().entries_of(index) for index in range(3)]
COPIED = CopyOutcome(entry_count=len(ALL[1]))


def repair(index: int, target: BookieId) -> Repair:
    return Repair(fragment=fragment(), index=index, target=target, entry_ids=ALL[index])


def finding(index: int, verdict: Verdict, *, mismatched: Sequence[int] = ()) -> Finding:
    return Finding(
        fragment=fragment(), index=index, verdict=verdict, mismatched=EntryRuns(mismatched)
    )


def results(
    steps: Sequence[tuple[Repair, CopyOutcome]],
    *,
    findings: Sequence[Finding] = (finding(0, Verdict.GOOD),),
    changed: Sequence[BookieId] = (),
) -> CopyResults:
    return CopyResults(
        survey=survey_of(findings),
        plan=Plan(repairs=tuple(step for step, _ in steps)),
        outcomes=[outcome for _, outcome in steps],
        is_unchanged=lambda bookie: bookie not in changed,
    )


def ensembles(found: CopyResults) -> list[tuple[BookieId, ...]]:
    return [segment.ensemble for segment in found.metadata.segments]


def test_what_was_copied_whole_is_named() -> None:
    found = results([(repair(1, B4), COPIED)])

    assert ensembles(found) == [(B1, B4, B3)]
    assert found.is_complete
    assert found.in_the_way == []


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
def test_rule_s1_what_may_not_be_whole_is_not_named_and_nothing_is_split(
    outcome: CopyOutcome,
) -> None:
    found = results([(repair(1, B4), outcome), (repair(2, B5), COPIED)])

    assert ensembles(found) == [(B1, B2, B5)]
    assert not found.is_complete


def test_rule_s3_a_target_that_is_another_one_by_now_is_not_named() -> None:
    lost = CopyOutcome(entry_count=6, without_copy=(7,))

    found = results([(repair(1, B4), COPIED), (repair(2, B5), lost)], changed=[B4, B5])

    assert found.metadata == found.survey.metadata
    assert not found.is_complete


def test_rule_s7_without_one_good_entry_of_the_ledger_nothing_is_split() -> None:
    nothing = CopyOutcome(without_copy=tuple(ALL[1]))
    bad = [finding(0, Verdict.MISSING, mismatched=ALL[0]), finding(1, Verdict.LOST)]

    found = results([(repair(1, B4), nothing)], findings=bad)

    assert not found.is_split
    assert results([(repair(1, B4), nothing)]).is_split, "else it would be"


def lacking(*findings: Finding) -> list[str]:
    """What is said where B2 was to be copied without entries 4 and 7, and B3 without 4 and 5."""
    found = results(
        [
            (repair(1, B4), CopyOutcome(entry_count=5, without_copy=(4, 7))),
            (repair(2, B5), CopyOutcome(entry_count=5, without_copy=(4, 5))),
        ],
        findings=findings,
    )
    assert {blocked.reason for blocked in found.in_the_way} == {Reason.NO_COPY}
    return [blocked.detail for blocked in found.in_the_way]


def test_what_is_lost_is_told_once_with_all_that_are_away_and_should_have_it() -> None:
    both = lacking(finding(0, Verdict.GOOD), finding(1, Verdict.LOST), finding(2, Verdict.AWAY))
    one = lacking(finding(0, Verdict.GOOD), finding(1, Verdict.LOST), finding(2, Verdict.MISSING))
    none = lacking(finding(0, Verdict.GOOD))

    assert both == [
        f"2 entries (4, 7) may have good copies on {B2} and {B3} only, which are away",
        f"entry 5 may have good copies on {B3} only, which is away",
        "9 copies of other entries are not made on their account",
    ]
    assert one[:2] == [
        f"2 entries (4, 7) may have good copies on {B2} only, which is away",
        "no good copy of entry 5 is found, and no bookie that should have one is away",
    ]
    assert "3 entries (4, 5, 7)" in none[0]
