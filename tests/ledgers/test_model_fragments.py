"""The fragments of a ledger, and the entries of each bookie index."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.model import (
    BookieId,
    Fragment,
    LedgerMetadata,
    LedgerState,
    Segment,
    fragments,
    write_set,
)

A, B, C, D = map(BookieId, ("a:1", "b:1", "c:1", "d:1"))
ABC, ABD = (A, B, C), (A, B, D)


def _ledger(
    *segments: tuple[int, tuple[BookieId, ...]], last_entry_id: int | None = None
) -> LedgerMetadata:
    """Return a ledger of segments by first entry id; it is closed if a last entry id is given."""
    metadata = LedgerMetadata(
        ensemble_size=3,
        write_quorum=2,
        ack_quorum=2,
        segments=tuple(Segment(first_entry_id=first, ensemble=e) for first, e in segments),
    )
    if last_entry_id is None:
        return metadata
    return metadata.closed(last_entry_id=last_entry_id, length=0)


def _bounds(found: tuple[Fragment, ...]) -> list[tuple[int, int | None]]:
    return [(fragment.first_entry_id, fragment.last_entry_id) for fragment in found]


@pytest.mark.parametrize(
    ("metadata", "bounds"),
    [
        pytest.param(_ledger((0, ABC), last_entry_id=9), [(0, 9)], id="one segment"),
        pytest.param(_ledger((0, ABC), last_entry_id=-1), [(0, -1)], id="an empty ledger"),
        pytest.param(
            _ledger((0, ABC), (5, ABD), (7, ABC), last_entry_id=7),
            [(0, 4), (5, 6), (7, 7)],
            id="each ends before the next",
        ),
        pytest.param(
            _ledger((0, ABC), (10, ABD), last_entry_id=9),
            [(0, 9), (10, 9)],
            id="an ensemble change right before the end",
        ),
        pytest.param(
            _ledger((0, ABC), (5, ABD), (10, ABC), last_entry_id=6),
            [(0, 4), (5, 6), (10, 9)],
            id="the ledger ends before its last segment but one does",
        ),
        pytest.param(
            _ledger((0, ABC), (5, ABD), last_entry_id=-1),
            [(0, -1), (5, 4)],
            id="closed as empty after an ensemble change",
        ),
    ],
)
def test_fragments_of_a_closed_ledger_end_where_it_ends(
    metadata: LedgerMetadata, bounds: list[tuple[int, int]]
) -> None:
    found = fragments(1, metadata)

    assert _bounds(found) == bounds
    assert all(fragment.is_closed for fragment in found)


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@pytest.mark.parametrize("lac", [-1, 0, 9, 1000])
def test_the_last_fragment_of_an_unclosed_ledger_has_no_end(lac: int, state: LedgerState) -> None:
    metadata = _ledger((0, ABC)).with_state(state)

    (fragment,) = fragments(1, metadata, lac=lac)

    assert fragment.last_entry_id is None
    assert not fragment.is_closed


@pytest.mark.compat(
    "G9",
    verdict="better",
    why="the position in the metadata decides which fragment is the last, not its bookies",
)
@pytest.mark.parametrize(
    ("lac", "is_closed"),
    [
        pytest.param(-1, False, id="nothing is known to be acknowledged"),
        pytest.param(5, False, id="short of the last fragment by more than one"),
        pytest.param(8, False, id="one short of the end of the last fragment but one"),
        pytest.param(9, True, id="all before the last fragment is acknowledged"),
        pytest.param(20, True, id="entries of the last fragment too"),
    ],
)
@pytest.mark.parametrize("last", [ABD, ABC], ids=["another ensemble", "the very same ensemble"])
def test_earlier_fragments_close_once_the_last_one_is_reached(
    last: tuple[BookieId, ...], lac: int, is_closed: bool
) -> None:
    metadata = _ledger((0, ABC), (5, ABD), (10, last))

    found = fragments(1, metadata, lac=lac)

    assert _bounds(found) == [(0, 4), (5, 9), (10, None)]
    assert [fragment.is_closed for fragment in found] == [is_closed, is_closed, False]


@pytest.mark.compat("TestLedgerFragmentReplication.testSplitLedgerFragmentState", verdict="same")
def test_a_fragment_knows_the_entries_of_each_bookie_index() -> None:
    (fragment,) = fragments(7, _ledger((0, ABC), last_entry_id=5))

    assert fragment.ledger_id == 7
    assert [list(fragment.entries_of(index)) for index in range(3)] == [
        [0, 2, 3, 5],
        [0, 1, 3, 4],
        [1, 2, 4, 5],
    ]


@given(starts=st.sets(st.integers(1, 30), max_size=4), last_entry_id=st.integers(-1, 40))
def test_each_entry_of_a_closed_ledger_is_in_one_write_set(
    starts: set[int], last_entry_id: int
) -> None:
    metadata = _ledger(
        *((start, ABC if start % 2 else ABD) for start in sorted({0, *starts})),
        last_entry_id=last_entry_id,
    )

    found = [
        (entry_id, fragment.ensemble[index])
        for fragment in fragments(1, metadata)
        for index in range(3)
        for entry_id in fragment.entries_of(index)
    ]

    expected = [
        (entry_id, metadata.segment_of(entry_id).ensemble[index])
        for entry_id in range(last_entry_id + 1)
        for index in write_set(entry_id, ensemble_size=3, write_quorum=2)
    ]
    assert sorted(found) == sorted(expected)
