"""Chooses the entries to read for an inspection, and judges the answers."""

import random
from collections.abc import Mapping

import pytest

from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from replication.copy_reader import (
    ReadFailures,
    Verdict,
    inspect_copies,
    judge,
    plan_reads,
    transfer_slices,
)
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import DIGEST, Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, fragment

ALL = frozenset({B1, B2, B3, B4})


def refused(answers: Mapping[BookieId, Mapping[int, Answer]]) -> dict[BookieId, ReadFailures]:
    found = {bookie: ReadFailures() for bookie in answers}
    for bookie, refusals in answers.items():
        found[bookie].add(refusals)
    return found


@pytest.mark.compat(
    "TestLedgerChecker.testVerifyLedgerFragmentSkipsUnavailableBookie", verdict="same"
)
def test_the_ends_of_each_bookie_index_are_read() -> None:
    asked = plan_reads([fragment()], available={B1, B3}, suspects=())

    # E 3, W 2: index 0 stores 0 2 3 5 6 8 9, index 2 stores 1 2 4 5 7 8
    assert {bookie: list(map(list, runs)) for bookie, runs in asked.items()} == {
        B1: [[0, 9]],
        B3: [[1, 8]],
    }


def test_a_suspect_bookie_is_asked_for_every_entry() -> None:
    asked = plan_reads([fragment()], available=ALL, suspects={B3})

    assert list(asked[B3][0]) == [1, 2, 4, 5, 7, 8]
    assert list(asked[B1][0]) == [0, 9]


@pytest.mark.parametrize("suspects", [(), (B1,)], ids=["ends", "all"])
@pytest.mark.parametrize("ensemble", [(B1, B1, B2), (B1, B2, B1)])
def test_a_bookie_twice_in_an_ensemble_is_asked_once_per_entry(
    ensemble: tuple[BookieId, ...], suspects: tuple[BookieId, ...]
) -> None:
    fragments = [fragment(ensemble), fragment((B3, B1, B4), first=10, last=19)]

    asked = plan_reads(fragments, available=ALL, suspects=suspects)

    for runs in asked.values():
        entry_ids = [entry_id for run in runs for entry_id in run]
        assert entry_ids == sorted(set(entry_ids))
    assert {0, 9} <= {entry_id for run in asked[B1] for entry_id in run}


def test_a_bookie_of_two_fragments_is_asked_for_the_ends_of_both() -> None:
    fragments = [fragment(last=9), fragment((B1, B4, B3), first=10, last=19)]

    asked = plan_reads(fragments, available={B1}, suspects=())

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
            id="an incomplete answer proves nothing of the rest",
        ),
        pytest.param({}, Verdict.UNKNOWN, id="never asked"),
        pytest.param({B1: {10: Answer.ABSENT}}, Verdict.GOOD, id="an entry of another fragment"),
    ],
)
def test_the_verdict_follows_from_the_answers(
    refusals: Mapping[BookieId, Mapping[int, Answer]], verdict: Verdict
) -> None:
    findings = judge([fragment()], refused({B2: {}, B3: {}, **refusals}), available=ALL)

    assert [f.verdict for f in findings] == [verdict, Verdict.GOOD, Verdict.GOOD]


def test_the_missing_entries_are_named() -> None:
    answers = {B1: {0: Answer.ABSENT, 2: Answer.MISMATCH, 9: Answer.ABSENT}, B2: {}, B3: {}}

    finding = judge([fragment()], refused(answers), available=ALL)[0]

    assert list(finding.absent) == [0, 9]
    assert list(finding.mismatched) == [2]


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testSplitIntoSubFragmentsWithDifferentFragmentBoundaries",
    verdict="other",
)
def test_slices_stay_within_a_transfer_and_lose_nothing() -> None:
    count = 2 * TRANSFER_ENTRIES_MAX + 10

    slices = list(transfer_slices([range(5), range(100, 100 + count)]))

    assert [len(part) for part in slices] == [TRANSFER_ENTRIES_MAX, TRANSFER_ENTRIES_MAX, 15]
    assert [i for part in slices for i in part] == [*range(5), *range(100, 100 + count)]


# --- More than the ends ---------------------------------------------------------------------------


def asked_of_b1(last: int, share: float, *, seed: int = 1) -> list[int]:
    asked = plan_reads(
        [fragment(last=last)], available={B1}, suspects=(), share=share, rng=random.Random(seed)
    )
    return [entry_id for run in asked[B1] for entry_id in run]


@pytest.mark.parametrize(
    ("share", "least", "most"),
    [
        pytest.param(0, 2, 2, id="the ends alone"),
        pytest.param(0.1, 2 + 67, 2 + 67, id="a tenth besides"),
        pytest.param(0.999, 660, 667, id="nearly all"),
        pytest.param(1, 667, 667, id="all"),
    ],
)
def test_the_configured_share_is_read_besides_the_ends(share: float, least: int, most: int) -> None:
    stored = list(fragment(last=999).entries_of(0))

    asked = asked_of_b1(999, share)

    assert least <= len(asked) <= most
    assert asked == sorted(set(asked))
    assert set(asked) <= set(stored)
    assert {stored[0], stored[-1]} <= set(asked)


def test_every_entry_is_drawn_sooner_or_later() -> None:
    seen = {entry_id for seed in range(400) for entry_id in asked_of_b1(99, 0.1, seed=seed)}

    assert seen == set(fragment(last=99).entries_of(0))


def test_half_of_ten_million_entries_are_read_without_a_list() -> None:
    asked = plan_reads(
        [fragment(last=14_999_999)], available={B1}, suspects=(), share=0.5, rng=random.Random(1)
    )

    assert sum(map(len, asked[B1])) == 5_000_002
    assert all(not isinstance(run, list) or len(run) == 1 for run in asked[B1])


async def test_a_bookie_that_stopped_answering_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replication.copy_reader.TRANSFER_ENTRIES_MAX", 9)
    monkeypatch.setattr("replication.copy_reader.UNANSWERED_MAX", 3)
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), last=99)
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnavailableError))

    findings = await inspect_copies(
        [fragment(last=99)],
        bookies=cluster.bookies,
        digest=DIGEST,
        available=ALL,
        suspects=(B1, B2),
        entry_bytes=100,
    )

    assert [f.verdict for f in findings] == [Verdict.GOOD, Verdict.UNKNOWN, Verdict.GOOD]
    assert len(cluster.bookies.asked(B2)) == 3
    assert len(cluster.bookies.asked(B1)) == 67
