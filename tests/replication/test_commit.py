"""The metadata after copies: changed ensembles, and segments split around lost entries."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledgers.model import BookieId, LedgerMetadata, Segment, fragments, write_set
from replication.commit import Change, joined, lost_places, rewritten
from replication.entry_runs import EntryRuns
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7, closed_ledger

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
        fragment=fragments(7, metadata)[position],
        index=index,
        target=target,
        lost=EntryRuns(lost),
    )


def test_all_changed_ensembles_are_in_one_piece_of_metadata() -> None:
    ledger = closed_ledger((B1, B2, B3), (B1, B4, B3), starts=(0, 5))

    after = rewritten(ledger, [change(ledger, 1, B5), change(ledger, 0, B6, position=1)])

    assert segments(after) == [(0, (B1, B5, B3)), (5, (B6, B4, B3))]


def test_lost_entries_keep_their_bookies_in_their_own_segment() -> None:
    ledger = closed_ledger((B1, B2))

    after = rewritten(ledger, [change(ledger, 1, B3, lost=[4])])

    assert segments(after) == [(0, (B1, B3)), (4, (B1, B2)), (5, (B1, B3))]


def test_an_entry_lost_at_an_end_leaves_no_empty_segment() -> None:
    ledger = closed_ledger((B1, B2), (B1, B2), starts=(0, 5))

    after = rewritten(
        ledger,
        [change(ledger, 1, B3, lost=[0]), change(ledger, 1, B4, lost=[8, 9], position=1)],
    )

    assert segments(after) == [
        (0, (B1, B2)),
        (1, (B1, B3)),
        (5, (B1, B4)),
        (8, (B1, B2)),
    ]


def test_a_completely_lost_segment_stays_as_it_is() -> None:
    ledger = closed_ledger((B1, B2))

    assert rewritten(ledger, [change(ledger, 1, B3, lost=range(10))]) == ledger


def test_a_copy_that_lacks_no_entry_changes_in_all_segments() -> None:
    ledger = closed_ledger((B1, B2, B3))  # entry 4 is on indexes 1 and 2

    after = rewritten(
        ledger,
        [
            change(ledger, 0, B4),
            change(ledger, 1, B5, lost=[4]),
            change(ledger, 2, B6, lost=[4]),
        ],
    )

    assert segments(after) == [(0, (B4, B5, B6)), (4, (B4, B2, B3)), (5, (B4, B5, B6))]


def test_an_entry_lost_in_place_splits_the_segment_only() -> None:
    ledger = closed_ledger((B1, B2))

    after = rewritten(ledger, [change(ledger, 1, B2, lost=[4])])

    assert segments(after) == [(0, (B1, B2)), (4, (B1, B2)), (5, (B1, B2))]


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
