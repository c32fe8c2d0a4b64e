"""The values of observe mode: what would be marked, compared with existing marks."""

import pytest

from auditor.ledger_map import MappedLedger
from auditor.observer import BookieCondition, affected_bookies, compare
from auditor.underreplication import (
    BookieLosses,
    ReformattedBookie,
    UnderreplicatedLedger,
    lost_bytes,
)
from ledgers.model import BookieId, LedgerState
from tests.replication.ledger_values import B1, B2, B3, B4


def underreplicated(ledger_id: int, *lost: BookieId) -> UnderreplicatedLedger:
    return UnderreplicatedLedger(ledger_id=ledger_id, lost=lost, copies_left=1, length=100)


@pytest.mark.parametrize(
    ("marks", "agreed", "unmarked", "partly_marked", "surplus"),
    [
        pytest.param(
            {}, 0, (5, 2), (), (), id="nothing is marked: the ledger at most risk stays first"
        ),
        pytest.param({5: (B1,), 2: (B1, B2)}, 2, (), (), (), id="all as we would mark them"),
        pytest.param({5: (B1,), 2: (B1,)}, 1, (), (2,), (), id="a mark that lacks a lost replica"),
        pytest.param({5: (B1, B3), 2: (B2, B1)}, 2, (), (), (), id="a mark that names more"),
        pytest.param({5: (), 2: (B1, B2)}, 1, (), (5,), (), id="an unreadable mark"),
        pytest.param({9: (B3,), 8: (B3,)}, 0, (5, 2), (), (8, 9), id="marks of other ledgers"),
    ],
)
def test_marks_are_compared_by_ledger_and_by_bookies(
    marks: dict[int, tuple[BookieId, ...]],
    agreed: int,
    unmarked: tuple[int, ...],
    partly_marked: tuple[int, ...],
    surplus: tuple[int, ...],
) -> None:
    found = compare([underreplicated(5, B1), underreplicated(2, B1, B2)], marks)

    assert (found.agreed_count, found.unmarked) == (agreed, unmarked)
    assert (found.partly_marked, found.surplus) == (partly_marked, surplus)


@pytest.mark.parametrize(
    ("ensembles", "write_quorum", "lost", "weight"),
    [
        pytest.param([(B1, B2)], 2, {B1}, 1_000, id="a copy of all of it"),
        pytest.param([(B1, B2)], 2, {B1, B2}, 2_000, id="both copies"),
        pytest.param([(B1, B2, B3)], 1, {B1}, 333, id="a stripe"),
        pytest.param([(B1, B2), (B3, B2)], 2, {B1}, 500, id="in one of two segments"),
        pytest.param([(B1, B2)], 2, {B4}, 0, id="on none of its bookies"),
    ],
)
def test_lost_bytes_are_the_share_of_the_lost_copies(
    ensembles: list[tuple[BookieId, ...]], write_quorum: int, lost: set[BookieId], weight: int
) -> None:
    ledger = MappedLedger(
        ledger_id=1,
        state=LedgerState.CLOSED,
        write_quorum=write_quorum,
        ack_quorum=1,
        length=1_000,
        ensembles=tuple(ensembles),
        czxid=1,
        mzxid=1,
    )

    assert round(lost_bytes(ledger, lost)) == weight


def test_each_affected_bookie_is_listed_once_by_risk() -> None:
    reformatted = (B3, B4, BookieId("new:3181"))
    missing = BookieLosses(
        lost_since_s={B1: 0.0, B4: 0.0},
        reformatted={bookie: ReformattedBookie(czxid=9, was_known=True) for bookie in reformatted},
    )

    rows = affected_bookies(
        missing,
        {B2: 30.0},
        underreplicated=[underreplicated(1, B1, B3), underreplicated(2, B3)],
        naming={B2: 7},
    )

    assert [(row.bookie, row.state, row.left_s, row.ledgers) for row in rows] == [
        (B2, BookieCondition.ABSENT, 30.0, 7),
        (B3, BookieCondition.REFORMATTED, 0.0, 2),
        (B1, BookieCondition.LOST, 0.0, 1),
        (B4, BookieCondition.LOST, 0.0, 0),
    ], "a new bookie lacks nothing, and is not listed"
