from collections.abc import Mapping

import pytest

from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer
from ledgers.metadata import BookieId
from replication.check import Refused, Verdict, judge, questions, transfer_slices
from tests.replication.ledger_values import B1, B2, B3, B4, fragment

ALL = frozenset({B1, B2, B3, B4})


def refused(answers: Mapping[BookieId, Mapping[int, Answer]]) -> dict[BookieId, Refused]:
    found = {bookie: Refused() for bookie in answers}
    for bookie, refusals in answers.items():
        found[bookie].add(refusals)
    return found


@pytest.mark.compat(
    "TestLedgerChecker.testVerifyLedgerFragmentSkipsUnavailableBookie",
    verdict="same",
)
def test_the_ends_of_each_index_are_asked_of_bookies_that_are_there() -> None:
    asked = questions([fragment()], available={B1, B3}, distrusted=())

    # E 3, W 2: index 0 stores 0 2 3 5 6 8 9, index 2 stores 1 2 4 5 7 8
    assert {bookie: list(map(list, runs)) for bookie, runs in asked.items()} == {
        B1: [[0, 9]],
        B3: [[1, 8]],
    }


def test_one_entry_is_asked_for_once() -> None:
    asked = questions([fragment(first=4, last=4)], available=ALL, distrusted=())

    assert {bookie: list(map(list, runs)) for bookie, runs in asked.items()} == {
        B2: [[4]],
        B3: [[4]],
    }


def test_a_distrusted_bookie_is_asked_for_everything() -> None:
    asked = questions([fragment()], available=ALL, distrusted={B3})

    assert list(asked[B3][0]) == [1, 2, 4, 5, 7, 8]
    assert list(asked[B1][0]) == [0, 9]


def test_an_empty_fragment_asks_nobody() -> None:
    assert questions([fragment(first=10, last=9)], available=ALL, distrusted=()) == {}


def test_a_bookie_of_two_fragments_is_asked_for_the_ends_of_both() -> None:
    fragments = [fragment(last=9), fragment((B1, B4, B3), first=10, last=19)]

    asked = questions(fragments, available={B1}, distrusted=())

    assert [list(run) for run in asked[B1]] == [[0, 9], [11, 18]]


@pytest.mark.parametrize(
    ("refusals", "verdict"),
    [
        pytest.param({B1: {}}, Verdict.GOOD, id="it gave all it was asked for"),
        pytest.param({B1: {0: Answer.ABSENT}}, Verdict.MISSING, id="an explicit no"),
        pytest.param({B1: {9: Answer.MISMATCH}}, Verdict.MISSING, id="a digest that is wrong"),
        pytest.param({B1: {0: Answer.UNKNOWN}}, Verdict.UNKNOWN, id="no answer proves nothing"),
        pytest.param(
            {B1: {0: Answer.ABSENT, 9: Answer.UNKNOWN}},
            Verdict.UNKNOWN,
            id="half an answer proves nothing of the other half",
        ),
        pytest.param({}, Verdict.UNKNOWN, id="never asked"),
        pytest.param({B1: {10: Answer.ABSENT}}, Verdict.GOOD, id="an entry of another fragment"),
    ],
)
def test_what_the_answers_mean_for_an_index(
    refusals: Mapping[BookieId, Mapping[int, Answer]], verdict: Verdict
) -> None:
    findings = judge([fragment()], refused({B2: {}, B3: {}, **refusals}), available=ALL)

    assert [f.verdict for f in findings] == [verdict, Verdict.GOOD, Verdict.GOOD]


def test_a_bookie_that_is_not_there_has_lost_its_index_even_where_it_stores_nothing() -> None:
    empty = fragment(first=10, last=9)

    findings = judge([empty], {}, available={B1, B2})

    assert [f.verdict for f in findings] == [Verdict.GOOD, Verdict.GOOD, Verdict.LOST]
    assert not findings[2].entries


def test_the_missing_entries_are_named() -> None:
    answers = {B1: {0: Answer.ABSENT, 2: Answer.MISMATCH, 9: Answer.ABSENT}, B2: {}, B3: {}}

    finding = judge([fragment()], refused(answers), available=ALL)[0]

    assert list(finding.absent) == [0, 9]
    assert list(finding.mismatched) == [2]


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testSplitIntoSubFragmentsWithDifferentFragmentBoundaries",
    verdict="other",
)
def test_slices_hold_no_more_than_a_transfer_may_and_lose_nothing() -> None:
    count = 2 * TRANSFER_ENTRIES_MAX + 10

    slices = list(transfer_slices([range(5), range(100, 100 + count)]))

    assert [len(part) for part in slices] == [TRANSFER_ENTRIES_MAX, TRANSFER_ENTRIES_MAX, 15]
    assert [i for part in slices for i in part] == [*range(5), *range(100, 100 + count)]


def test_nothing_to_ask_is_no_slice() -> None:
    assert list(transfer_slices([])) == []
    assert list(transfer_slices([range(0)])) == []
