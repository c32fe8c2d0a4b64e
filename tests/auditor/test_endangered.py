import pytest

from auditor.endangered import Endangered, endangered, most_endangered_first, most_urgent
from ledgers.metadata import BookieId, LedgerMetadata, LedgerState, Segment

BOOKIES = tuple(BookieId(f"b{number}:3181") for number in range(1, 7))


def metadata(*ensembles: tuple[int, ...], write_quorum: int = 2, length: int = 0) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=len(ensembles[0]),
        write_quorum=write_quorum,
        ack_quorum=1,
        state=LedgerState.CLOSED,
        last_entry_id=10 * len(ensembles) - 1,
        length=length,
        segments=tuple(
            Segment(first_entry_id=10 * k, ensemble=tuple(BOOKIES[i - 1] for i in ensemble))
            for k, ensemble in enumerate(ensembles)
        ),
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
    found = endangered(7, metadata(*ensembles, write_quorum=write_quorum), lost(*gone))

    assert found is not None
    assert found.copies_left == copies_left


def test_a_ledger_that_names_no_lost_bookie_is_not_endangered() -> None:
    assert endangered(7, metadata((1, 2, 3)), lost(4)) is None


def test_the_mark_names_every_lost_bookie_of_every_segment_once() -> None:
    found = endangered(7, metadata((1, 2, 3), (1, 4, 5)), lost(4, 1, 6))

    assert found is not None
    assert found.lost == tuple(lost(1, 4))


def test_fewest_copies_first_then_the_oldest_loss_then_most_bytes() -> None:
    since_s = dict(zip(lost(1, 2), (100.0, 50.0), strict=True))
    one_copy = endangered(1, metadata((1, 3), write_quorum=2), since_s)
    old_loss = endangered(2, metadata((2, 3, 4), write_quorum=3), since_s)
    big = endangered(3, metadata((1, 3, 4), write_quorum=3, length=1000), since_s)
    small = endangered(4, metadata((1, 3, 4), write_quorum=3, length=10), since_s)
    found = [x for x in (small, big, old_loss, one_copy) if x is not None]

    assert [x.ledger_id for x in most_endangered_first(found, since_s)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("copies_left", "urgent"),
    [
        pytest.param([], [], id="nothing is endangered"),
        pytest.param([2, 2, 2], [], id="all alike, and none on its last copy"),
        pytest.param([1, 1], [0, 1], id="all on their last copy"),
        pytest.param([0, 1, 2, 2], [0, 1], id="the last copy, or none"),
        pytest.param([2, 3, 3], [0], id="fewer than the rest"),
    ],
)
def test_what_is_urgent(copies_left: list[int], urgent: list[int]) -> None:
    ordered = [
        Endangered(ledger_id=i, lost=(BOOKIES[0],), copies_left=left, length=0)
        for i, left in enumerate(copies_left)
    ]

    assert most_urgent(ordered) == urgent
