"""Copying one bookie index of one fragment, on bookies in memory."""

from collections import Counter

import pytest

from ledgers.bookies import Answer
from ledgers.errors import FencedError, ReadOnlyError, UnavailableError
from ledgers.memory.bookies import Fault, Op
from ledgers.metadata import BookieId
from replication.copying import CopyJob, CopyOutcome, Progress, assign, copy_index
from tests.replication.cluster import (
    DIGEST,
    ENTRY_BYTES,
    Cluster,
    entry_bytes,
    in_virtual_time,
)
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7, BOOKIES, fragment
from tests.replication.nodes import LEDGER

ALL = frozenset(BOOKIES)


def job(
    *,
    index: int = 2,
    target: BookieId = B4,
    available: frozenset[BookieId] = ALL - {B3},
    former: tuple[BookieId, ...] = (),
    entry_ids: tuple[int, ...] | None = None,
    write_quorum: int = 2,
) -> CopyJob:
    """Entries 0 to 9 on B1, B2 and B3, of which B3 is to be replaced by B4 unless told otherwise."""
    whole = fragment(write_quorum=write_quorum)
    return CopyJob(
        fragment=whole,
        index=index,
        target=target,
        entry_ids=whole.entries_of(index) if entry_ids is None else entry_ids,
        available=available,
        former=former,
    )


async def copy(cluster: Cluster, what: CopyJob) -> CopyOutcome:
    return await copy_index(what, bookies=cluster.bookies, digest=DIGEST)


async def cluster_with_ledger(*, write_quorum: int = 2) -> Cluster:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=write_quorum)
    return cluster


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldCopyFailedBookieFragmentsToTargetBookie",
    verdict="better",
)
@in_virtual_time
async def test_rule_s12_just_the_entries_of_the_index_are_copied_and_byte_for_byte() -> None:
    cluster = await cluster_with_ledger()

    outcome = await copy(cluster, job())

    # E 3, W 2: index 2 stores 1 2 4 5 7 8
    assert cluster.bookie(B4).entry_ids(LEDGER) == {1, 2, 4, 5, 7, 8}
    assert all(
        cluster.bookie(B4).read(LEDGER, e) == entry_bytes(LEDGER, e) for e in (1, 2, 4, 5, 7, 8)
    )
    assert outcome == CopyOutcome(entry_count=6, entry_bytes=6 * ENTRY_BYTES)
    assert outcome.is_complete


@in_virtual_time
async def test_no_entry_is_read_more_than_once_while_its_replicas_are_good() -> None:
    cluster = await cluster_with_ledger(write_quorum=3)

    await copy(cluster, job(write_quorum=3))

    assert sorted([*cluster.bookies.asked(B1), *cluster.bookies.asked(B2)]) == list(range(10))


@pytest.mark.parametrize(
    ("ensemble", "write_quorum"),
    [
        pytest.param(BOOKIES[:3], 3, id="E 3, W 3"),
        pytest.param(BOOKIES[:3], 2, id="E 3, W 2"),
        pytest.param(BOOKIES[:5], 3, id="E 5, W 3"),
        pytest.param(BOOKIES[:4], 3, id="E 4, W 3"),
        pytest.param(BOOKIES[:2], 2, id="E 2, W 2"),
    ],
)
def test_reading_is_spread_evenly_over_the_replicas(
    ensemble: tuple[BookieId, ...], write_quorum: int
) -> None:
    whole = fragment(ensemble, last=599, write_quorum=write_quorum)
    for index in range(len(ensemble)):
        what = CopyJob(
            fragment=whole,
            index=index,
            target=B7,
            entry_ids=whole.entries_of(index),
            available=ALL - {ensemble[index]},
        )

        reads = assign(what.entry_ids, Progress(), what)

        shares: Counter[BookieId] = Counter()  # of each entry, its replicas should bear the same
        for entry_id in what.entry_ids:
            sources = [
                b for i, b in enumerate(ensemble) if i != index and entry_id in whole.entries_of(i)
            ]
            shares.update(dict.fromkeys(sources, 120 // len(sources)))
        assert {b: 120 * len(entry_ids) for b, entry_ids in reads.items()} == shares


@pytest.mark.parametrize("answer", [Answer.ABSENT, Answer.MISMATCH, Answer.UNKNOWN])
@in_virtual_time
async def test_what_one_replica_does_not_give_is_asked_of_the_next(answer: Answer) -> None:
    cluster = await cluster_with_ledger(write_quorum=3)
    match answer:
        case Answer.ABSENT:
            cluster.bookie(B1).wipe()
        case Answer.MISMATCH:
            for entry_id in range(10):
                cluster.bookie(B1).corrupt(LEDGER, entry_id)
        case Answer.UNKNOWN:
            cluster.bookies.fail(B1, Op.READ, Fault(error=UnavailableError))

    outcome = await copy(cluster, job(write_quorum=3))

    assert outcome.is_complete
    assert all(cluster.holds(B4, LEDGER, entry_id) for entry_id in range(10))


@pytest.mark.compat("G12", verdict="better")
@in_virtual_time
async def test_rule_s7_nothing_of_a_damaged_copy_is_written() -> None:
    cluster = await cluster_with_ledger()
    for bookie in (B1, B2):
        if 4 in cluster.bookie(bookie).entry_ids(LEDGER):
            cluster.bookie(bookie).corrupt(LEDGER, 4)

    outcome = await copy(cluster, job())

    assert outcome.without_copy == (4,)
    assert outcome.unknown == ()
    assert not outcome.is_complete
    assert cluster.bookie(B4).entry_ids(LEDGER) == {1, 2, 5, 7, 8}


@in_virtual_time
async def test_rule_s5_an_entry_that_was_not_refused_by_everybody_is_not_called_lost() -> None:
    cluster = await cluster_with_ledger(write_quorum=3)
    cluster.bookie(B1).lose(LEDGER, 4)
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnavailableError))

    outcome = await copy(cluster, job(write_quorum=3))

    assert outcome.unknown == (4,)
    assert outcome.without_copy == ()
    assert outcome.entry_count == 9


@in_virtual_time
async def test_an_entry_that_no_bookie_can_be_asked_for_has_no_copy() -> None:
    cluster = await cluster_with_ledger()

    outcome = await copy(cluster, job(available=ALL - {B1, B2, B3}))

    assert outcome.without_copy == (1, 2, 4, 5, 7, 8)
    assert cluster.bookies.transfers == []


@in_virtual_time
async def test_rule_s15_former_members_are_asked_before_an_entry_is_called_lost() -> None:
    cluster = await cluster_with_ledger()
    cluster.bookie(B1).wipe()
    cluster.bookie(B2).wipe()
    for entry_id in (1, 2, 4):
        cluster.put(LEDGER, entry_id, B5)
    cluster.put(LEDGER, 5, B6)

    outcome = await copy(cluster, job(former=(B5, B6)))

    assert outcome.without_copy == (7, 8)
    assert cluster.bookie(B4).entry_ids(LEDGER) == {1, 2, 4, 5}


@in_virtual_time
async def test_rule_s15_a_damaged_bookie_that_is_replaced_is_asked_for_what_nobody_else_has() -> (
    None
):
    cluster = await cluster_with_ledger()
    cluster.bookie(B2).corrupt(LEDGER, 4)
    cluster.bookie(B3).lose(LEDGER, 1)

    outcome = await copy(cluster, job(index=1, available=ALL))

    # E 3, W 2: index 1 stores 0 1 3 4 6 7 9; 4 is on B2 and B3, 1 too
    assert outcome.is_complete
    assert cluster.bookies.asked(B2) == [1]


@in_virtual_time
async def test_former_members_are_left_alone_while_replicas_give_everything() -> None:
    cluster = await cluster_with_ledger()

    await copy(cluster, job(former=(B5, B6)))

    assert cluster.bookies.asked(B5) == cluster.bookies.asked(B6) == []


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldReturnFalseIfTheReplicationFails",
    verdict="better",
    why="another target is taken first",
)
@pytest.mark.parametrize("error", [FencedError, ReadOnlyError, UnavailableError])
@in_virtual_time
async def test_rule_s11_a_target_that_fails_ends_the_copy(error: type[Exception]) -> None:
    cluster = await cluster_with_ledger()
    cluster.bookies.fail(B4, Op.ADD, Fault(error=error))  # type: ignore[arg-type]

    outcome = await copy(cluster, job())

    assert isinstance(outcome.target_error, error)
    assert not outcome.is_complete
    assert outcome.entry_count == 0
    assert len(cluster.bookies.transfers) == 1


@in_virtual_time
async def test_a_copy_without_entries_is_complete_at_once() -> None:
    cluster = await cluster_with_ledger()

    outcome = await copy(cluster, job(entry_ids=()))

    assert outcome == CopyOutcome()
    assert outcome.is_complete
    assert cluster.bookies.transfers == []


@in_virtual_time
async def test_rule_s15_in_place_just_the_missing_entries_are_written() -> None:
    cluster = await cluster_with_ledger()
    cluster.bookie(B2).lose(LEDGER, 4)
    cluster.bookie(B2).lose(LEDGER, 9)

    outcome = await copy(cluster, job(index=1, target=B2, available=ALL, entry_ids=(4,)))

    assert outcome.entry_count == 1
    assert cluster.bookie(B2).entry_ids(LEDGER) == {0, 1, 3, 4, 6, 7}


@in_virtual_time
async def test_rule_s15_in_place_the_ends_come_last_and_only_when_all_else_is_there() -> None:
    cluster = await cluster_with_ledger()
    missing = (0, 4, 6, 9)
    for entry_id in missing:
        cluster.bookie(B2).lose(LEDGER, entry_id)
    in_place = job(index=1, target=B2, available=ALL, entry_ids=missing)
    cluster.bookie(B3).lose(LEDGER, 4)

    outcome = await copy(cluster, in_place)

    assert outcome.without_copy == (4,)
    assert cluster.bookie(B2).entry_ids(LEDGER) & {*missing} == {6}, "a check still sees a lack"

    cluster.put(LEDGER, 4, B3)
    outcome = await copy(cluster, in_place)

    assert outcome.is_complete
    assert {*missing} <= cluster.bookie(B2).entry_ids(LEDGER)
    assert [
        sorted(e for ids in t.reads.values() for e in ids)
        for t, _ in cluster.bookies.transfers[-2:]
    ] == [
        [4, 6],
        [0, 9],
    ]


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testSplitIntoSubFragmentsWithDifferentFragmentBoundaries",
    verdict="other",
    why="parts are as long as a transfer may be, with a window in bytes, and follow one another without a pause",
)
@in_virtual_time
async def test_entries_beyond_what_a_transfer_may_hold_come_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await cluster_with_ledger()
    monkeypatch.setattr("replication.check.TRANSFER_ENTRIES_MAX", 4)
    for entry_id in (1, 7):  # in the first and in the second transfer; only B2 has them too
        cluster.bookie(B2).lose(LEDGER, entry_id)

    outcome = await copy(cluster, job())

    assert [sum(map(len, t.reads.values())) for t, _ in cluster.bookies.transfers] == [4, 2]
    assert outcome.without_copy == (1, 7)
    assert outcome.entry_count == 4
