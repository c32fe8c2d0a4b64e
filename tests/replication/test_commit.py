"""The metadata after copies: changed ensembles, and segments split around lost entries."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ledgers.errors import FencedError
from ledgers.model import BookieId, LedgerMetadata, Segment, fragments, write_set
from ledgers.registration import BookieView
from replication.cluster import ClusterView
from replication.commit import Change, CopyResults, joined, lost_places, rewritten
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
    B6,
    B7,
    closed_ledger,
    fragment,
    inspection_of,
    registered,
)

Segments = list[tuple[int, tuple[BookieId, ...]]]


def segments(metadata: LedgerMetadata) -> Segments:
    return [(segment.first_entry_id, segment.ensemble) for segment in metadata.segments]


def change(
    metadata: LedgerMetadata,
    index: int,
    target: BookieId,
    *,
    lost: Sequence[int] = (),
    position: int = 0,
) -> Change:
    """Return the change of the ledger's fragment at ``position``."""
    return Change(
        fragment=fragments(7, metadata)[position], index=index, target=target, lost=EntryRuns(lost)
    )


def test_an_entry_lost_at_an_end_leaves_no_empty_segment() -> None:
    ledger = closed_ledger((B1, B2), (B1, B2), starts=(0, 5))

    after = rewritten(
        ledger, [change(ledger, 1, B3, lost=[0]), change(ledger, 1, B4, lost=[8, 9], position=1)]
    )

    assert segments(after) == [(0, (B1, B2)), (1, (B1, B3)), (5, (B1, B4)), (8, (B1, B2))]


def test_a_completely_lost_segment_stays_as_it_is() -> None:
    ledger = closed_ledger((B1, B2))

    assert rewritten(ledger, [change(ledger, 1, B3, lost=range(10))]) == ledger


def test_a_copy_that_lacks_no_entry_changes_in_all_segments() -> None:
    ledger = closed_ledger((B1, B2, B3))  # entry 4 is on indexes 1 and 2

    after = rewritten(
        ledger,
        [change(ledger, 0, B4), change(ledger, 1, B5, lost=[4]), change(ledger, 2, B6, lost=[4])],
    )

    assert segments(after) == [(0, (B4, B5, B6)), (4, (B4, B2, B3)), (5, (B4, B5, B6))]


def test_rule_s2_unknown_fields_stay_with_every_segment() -> None:
    ledger = closed_ledger((B1, B2))
    ledger = replace(ledger, segments=(replace(ledger.segments[0], unknown_fields=b"\x20\x01"),))

    after = rewritten(ledger, [change(ledger, 1, B3, lost=[4])])

    assert {segment.unknown_fields for segment in after.segments} == {b"\x20\x01"}


def test_adjacent_or_overlapping_gaps_are_one() -> None:
    ledger = closed_ledger((B1, B2, B3))

    places = lost_places(
        [change(ledger, 0, B4, lost=[2, 3]), change(ledger, 1, B5, lost=[3, 4, 7])]
    )

    assert places == [range(2, 5), range(7, 8)]


@st.composite
def repairs_with_losses(draw: st.DrawFn) -> tuple[LedgerMetadata, list[Change]]:
    """Draw a closed ledger of one to three segments with moves and lost entries."""
    size = draw(st.integers(1, 4))
    write_quorum = draw(st.integers(1, size))
    starts = sorted({0, *draw(st.sets(st.integers(1, 24), max_size=2))})
    last = draw(st.integers(starts[-1], 30))
    ledger = closed_ledger(
        *((B1, B2, B3, B4)[:size] for _ in starts),
        write_quorum=write_quorum,
        last_entry_id=last,
        starts=tuple(starts),
    )
    lost = draw(st.sets(st.integers(0, last), max_size=6))
    changes = [
        Change(
            fragment=found,
            index=index,
            target=target,
            lost=EntryRuns(sorted(lost.intersection(found.entries_of(index)))),
        )
        for found in fragments(7, ledger)
        for index, target in enumerate((B5, B6, B7)[:size])
        if draw(st.booleans())
    ]
    return ledger, changes


@given(repairs_with_losses())
@settings(max_examples=400)
def test_rule_s1_a_split_names_only_targets_with_the_entry(
    case: tuple[LedgerMetadata, list[Change]],
) -> None:
    before, changes = case

    after = rewritten(before, changes)

    for entry_id in range(before.last_entry_id + 1):
        expected = list(before.segment_of(entry_id).ensemble)
        for each in changes:
            holds = entry_id in each.fragment.entries_of(each.index)
            if holds and entry_id not in each.lost:
                expected[each.index] = each.target
        found = after.segment_of(entry_id).ensemble
        stored_at = write_set(
            entry_id, ensemble_size=before.ensemble_size, write_quorum=before.write_quorum
        )
        assert [found[index] for index in stored_at] == [expected[index] for index in stored_at]


@given(repairs_with_losses())
@settings(max_examples=200)
def test_segments_ascend_are_not_empty_and_name_bookies_once(
    case: tuple[LedgerMetadata, list[Change]],
) -> None:
    """No segment names a bookie twice."""
    before, changes = case

    after = rewritten(before, changes)

    starts = [segment.first_entry_id for segment in after.segments]
    assert starts == sorted(set(starts))
    assert starts[-1] <= after.last_entry_id
    assert {s.first_entry_id for s in before.segments} <= set(starts)
    assert all(len(set(s.ensemble)) == len(s.ensemble) for s in after.segments)
    assert replace(after, segments=before.segments) == before


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        pytest.param([(0, (B1, B2)), (5, (B1, B2))], [0], id="equal neighbours"),
        pytest.param([(0, (B1, B2)), (5, (B2, B1))], [0, 5], id="another order is another place"),
        pytest.param(
            [(0, (B1, B2)), (3, (B1, B3)), (5, (B1, B2))], [0, 3, 5], id="equal, but not neighbours"
        ),
        pytest.param(
            [(0, (B1, B2)), (3, (B1, B2)), (5, (B1, B2)), (7, (B1, B3))],
            [0, 7],
            id="three in a row",
        ),
    ],
)
def test_neighbouring_segments_of_equal_ensembles_are_joined(
    segments: list[tuple[int, tuple[BookieId, ...]]], expected: list[int]
) -> None:
    ledger = replace(
        closed_ledger((B1, B2)),
        segments=tuple(Segment(first_entry_id=first, ensemble=e) for first, e in segments),
    )

    assert [segment.first_entry_id for segment in joined(ledger).segments] == expected


def test_a_segment_with_unknown_fields_is_not_joined() -> None:
    ledger = closed_ledger((B1, B2))
    strange = Segment(first_entry_id=5, ensemble=(B1, B2), unknown_fields=b"x")

    joint = joined(replace(ledger, segments=(*ledger.segments, strange)))

    assert len(joint.segments) == 2


# --- Metadata that may be written although some copies are incomplete -----------------------------

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
def test_rule_s1_an_incomplete_copy_is_not_named(outcome: CopyOutcome) -> None:
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
        entry_ids=(0, 1, 2, 3, 4), entry_count=1_000, has_more_entries=True, decommissioned=(B2, B3)
    )


@pytest.mark.parametrize("is_unreadable", [False, True])
def test_rule_s5_an_unreadable_entry_without_target_is_not_called_lost(is_unreadable: bool) -> None:
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
    inspection = structs.replace(
        inspection_of([found, lost], closed_ledger((B1, B2), (B1, B4), starts=(0, 10))),
        view=ClusterView(bookies=BookieView(writable=registered((B1, B4)))),
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
