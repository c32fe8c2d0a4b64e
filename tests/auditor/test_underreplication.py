"""Finds the ledgers that lack copies, and their order."""

import pytest

from auditor.backlog import has_unavailable_entry
from auditor.ledger_map import MappedLedger
from auditor.underreplication import (
    MarkQueue,
    UnderreplicatedLedger,
    fewest_copies_first,
    underreplicated,
)
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.store import Stat

BOOKIES = tuple(BookieId(f"b{number}:3181") for number in range(1, 7))


def ledger(
    *ensembles: tuple[int, ...], ledger_id: int = 7, write_quorum: int = 2, length: int = 0
) -> MappedLedger:
    return MappedLedger(
        ledger_id=ledger_id,
        state=LedgerState.CLOSED,
        write_quorum=write_quorum,
        ack_quorum=1,
        length=length,
        ensembles=tuple(tuple(BOOKIES[i - 1] for i in ensemble) for ensemble in ensembles),
        czxid=1,
        mzxid=1,
    )


def lost(*numbers: int) -> list[BookieId]:
    return [BOOKIES[number - 1] for number in numbers]


@pytest.mark.parametrize(
    ("ensembles", "write_quorum", "gone", "copies_left"),
    [
        pytest.param([(1, 2, 3)], 3, (1,), 2, id="one of three copies"),
        pytest.param([(1, 2, 3)], 2, (1,), 1, id="one of two copies"),
        pytest.param([(1, 2, 3, 4)], 2, (1, 3), 1, id="lost ones that share no entry"),
        pytest.param([(1, 2, 3, 4)], 2, (1, 2), 0, id="lost ones that share entries"),
        pytest.param([(1, 2, 3, 4)], 2, (1, 4), 0, id="the ensemble is a ring"),
        pytest.param([(1, 2, 3), (1, 4, 5)], 3, (2, 3), 1, id="the worst segment counts"),
        pytest.param([(1,)], 1, (1,), 0, id="the only copy"),
    ],
)
def test_the_copies_left_of_the_worst_entry(
    ensembles: list[tuple[int, ...]], write_quorum: int, gone: tuple[int, ...], copies_left: int
) -> None:
    found = underreplicated(ledger(*ensembles, write_quorum=write_quorum), lost(*gone))

    assert found is not None
    assert found.copies_left == copies_left


@pytest.mark.parametrize(
    ("last_entry_id", "gone", "copies_left"),
    [
        pytest.param(-1, (1, 2), 2, id="no entry"),
        pytest.param(0, (1, 2), 0, id="the only entry is on both"),
        pytest.param(0, (2, 3), 1, id="the only entry is on one of them"),
        pytest.param(0, (3, 4), 2, id="the only entry is on other bookies"),
        pytest.param(2, (3, 4), 0, id="the third entry is on both"),
    ],
)
def test_write_sets_without_entries_do_not_count(
    last_entry_id: int, gone: tuple[int, ...], copies_left: int
) -> None:
    """``status`` counts unavailable ledgers by the same write sets."""
    metadata = LedgerMetadata(
        ensemble_size=4,
        write_quorum=2,
        ack_quorum=2,
        state=LedgerState.CLOSED,
        last_entry_id=last_entry_id,
        length=10,
        segments=(Segment(first_entry_id=0, ensemble=BOOKIES[:4]),),
    )
    mapped = MappedLedger.of(7, metadata, Stat(version=0, czxid=1, mzxid=1))
    gone_bookies = lost(*gone)

    found = underreplicated(mapped, gone_bookies)

    assert found is not None
    assert found.copies_left == copies_left
    assert (copies_left == 0) is has_unavailable_entry(mapped, gone_bookies)


def test_a_ledger_that_names_no_lost_bookie_is_not_affected() -> None:
    assert underreplicated(ledger((1, 2, 3)), lost(4)) is None


def test_the_mark_names_every_lost_bookie_of_every_segment_once() -> None:
    found = underreplicated(ledger((1, 2, 3), (1, 4, 5)), lost(4, 1, 6))

    assert found is not None
    assert found.lost == tuple(lost(1, 4))


def test_fewest_copies_then_oldest_loss_then_most_bytes() -> None:
    since_s = dict(zip(lost(1, 2), (100.0, 50.0), strict=True))
    one_copy = underreplicated(ledger((1, 3), ledger_id=1, write_quorum=2), since_s)
    old_loss = underreplicated(ledger((2, 3, 4), ledger_id=2, write_quorum=3), since_s)
    big = underreplicated(ledger((1, 3, 4), ledger_id=3, write_quorum=3, length=1000), since_s)
    small = underreplicated(ledger((1, 3, 4), ledger_id=4, write_quorum=3, length=10), since_s)
    found = [x for x in (small, big, old_loss, one_copy) if x is not None]

    assert [x.ledger_id for x in fewest_copies_first(found, since_s)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("copies_left", "urgent"),
    [
        pytest.param([], [], id="no ledger is at risk"),
        pytest.param([2, 2, 2], [], id="all alike, and no ledger on its last copy"),
        pytest.param([1, 1], [0, 1], id="all on their last copy"),
        pytest.param([0, 1, 2, 2], [0, 1], id="the last copy, or no copy"),
        pytest.param([2, 3, 3], [0], id="fewer than the rest"),
    ],
)
def test_which_ledgers_are_urgent(copies_left: list[int], urgent: list[int]) -> None:
    queue = MarkQueue({})
    for ledger_id, left in enumerate(copies_left):
        queue.add(
            UnderreplicatedLedger(
                ledger_id=ledger_id, lost=(BOOKIES[0],), copies_left=left, length=0
            )
        )
    while queue:
        queue.take()

    assert queue.urgent == urgent


def test_a_later_ledger_at_higher_risk_is_marked_first() -> None:
    queue = MarkQueue({})
    for ledger_id, left in ((1, 2), (2, 1), (3, 2)):
        queue.add(
            UnderreplicatedLedger(
                ledger_id=ledger_id, lost=(BOOKIES[0],), copies_left=left, length=0
            )
        )

    first = queue.take().ledger_id
    queue.add(UnderreplicatedLedger(ledger_id=4, lost=(BOOKIES[0],), copies_left=0, length=0))

    assert [first, *(queue.take().ledger_id for _ in range(3))] == [2, 4, 1, 3]
