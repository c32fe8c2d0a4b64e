"""Copying one bookie index of one fragment, on bookies in memory."""

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from ledgers.bookies import Answer, Bookies, Standing, Transfer, TransferResult
from ledgers.errors import BusyError, FencedError, ReadOnlyError, UnavailableError
from ledgers.memory.bookies import NO_FAULT, Fault, Op
from ledgers.metadata import BookieId
from replication.copying.copy_index import (
    LACKING_MAX,
    RESUME_PAUSE_S,
    CopyJob,
    CopyOutcome,
    copy_index,
)
from replication.copying.sources import STRETCH_ENTRIES, Progress, assign
from tests.replication.cluster import (
    DIGEST,
    ENTRY_BYTES,
    Cluster,
    entry_bytes,
    in_virtual_time,
)
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7, BOOKIES, fragment
from tests.replication.nodes import LEDGER
from tests.virtual_time import run

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


def nothing_known(bookie: BookieId) -> Standing:
    return Standing()


def whole_ledger(
    ensemble: tuple[BookieId, ...] = BOOKIES[:3],
    *,
    entry_count: int,
    write_quorum: int = 3,
    index: int = 0,
    ledger_id: int = LEDGER,
) -> CopyJob:
    """All that one index stores, from the others of its ensemble to B7."""
    whole = replace(
        fragment(ensemble, last=entry_count - 1, write_quorum=write_quorum), ledger_id=ledger_id
    )
    return CopyJob(
        fragment=whole,
        index=index,
        target=B7,
        entry_ids=whole.entries_of(index),
        available=ALL - {ensemble[index]},
    )


def asked(
    what: CopyJob, standing: Callable[[BookieId], Standing] = nothing_known
) -> dict[BookieId, list[int]]:
    reads = assign(what.entry_ids, Progress(), what, standing)
    return {bookie: list(entry_ids) for bookie, entry_ids in reads.entry_ids.items()}


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
def test_reading_is_spread_over_the_replicas(
    ensemble: tuple[BookieId, ...], write_quorum: int
) -> None:
    for index in range(len(ensemble)):
        what = whole_ledger(ensemble, entry_count=6_000, write_quorum=write_quorum, index=index)

        reads = asked(what)

        # No replica is asked more than if each entry were divided among those that hold it.
        shares: Counter[BookieId] = Counter()
        for entry_id in what.entry_ids:
            sources = [
                b
                for i, b in enumerate(ensemble)
                if i != index and entry_id in what.fragment.entries_of(i)
            ]
            shares.update(dict.fromkeys(sources, 120 // len(sources)))
        most = max(shares.values()) / 120
        assert sorted(e for ids in reads.values() for e in ids) == list(what.entry_ids)
        assert all(ids == sorted(ids) for ids in reads.values())
        assert max(map(len, reads.values())) <= most + STRETCH_ENTRIES
        for bookie, entry_ids in reads.items():
            assert set(entry_ids) <= set(what.fragment.entries_of(ensemble.index(bookie)))


def test_entries_in_a_row_come_from_one_source_so_that_batches_can_bring_them() -> None:
    reads = asked(whole_ledger(entry_count=4 * STRETCH_ENTRIES))

    assert {bookie: len(ids) for bookie, ids in reads.items()} == dict.fromkeys(
        BOOKIES[1:3], 2 * STRETCH_ENTRIES
    )
    assert all(
        ids[:STRETCH_ENTRIES] == list(range(ids[0], ids[0] + STRETCH_ENTRIES))
        for ids in reads.values()
    )


def test_small_ledgers_are_read_from_one_source_each_and_from_all_together() -> None:
    sources: Counter[BookieId] = Counter()
    for ledger_id in range(100):
        sources.update(asked(whole_ledger(entry_count=10, ledger_id=ledger_id)).keys())

    assert sources == dict.fromkeys(BOOKIES[1:3], 50)


@pytest.mark.parametrize(
    ("first", "second", "least", "most"),
    [
        pytest.param(Standing(is_ailing=True), Standing(), 0, 0, id="one failed lately"),
        pytest.param(
            Standing(is_ailing=True),
            Standing(waiting_bytes=10**9, reply_s=3.0),
            0,
            0,
            id="one failed, the other is slow and has much to do",
        ),
        pytest.param(Standing(reply_s=0.1), Standing(reply_s=0.01), 300, 600, id="one is slow"),
        pytest.param(
            Standing(waiting_bytes=10**6), Standing(), 1_000, 1_700, id="one has much to do"
        ),
        pytest.param(
            Standing(is_ailing=True), Standing(is_ailing=True), 1_900, 2_100, id="both failed"
        ),
        pytest.param(
            Standing(reply_s=0.0002), Standing(reply_s=0.0009), 1_900, 2_100, id="both are quick"
        ),
    ],
)
def test_sources_are_chosen_by_health_and_load(
    first: Standing, second: Standing, least: int, most: int
) -> None:
    standings = {B2: first, B3: second}

    reads = asked(whole_ledger(entry_count=4_000), standings.__getitem__)

    assert least <= len(reads.get(B2, [])) <= most


def test_a_sole_replica_is_given_its_time_and_of_several_the_first_is_not() -> None:
    alone = whole_ledger(BOOKIES[:2], entry_count=10, write_quorum=2)
    of_two = whole_ledger(entry_count=10)

    assert not assign(alone.entry_ids, Progress(), alone, nothing_known).have_alternatives
    assert assign(of_two.entry_ids, Progress(), of_two, nothing_known).have_alternatives


def test_who_was_silent_is_asked_once_more_when_nobody_else_is_left() -> None:
    what, progress = whole_ledger(entry_count=3), Progress()
    order = []
    entry_ids: list[int] = [0, 1, 2]
    for _ in range(3):
        reads = assign(entry_ids, progress, what, nothing_known)
        order += [(bookie, reads.have_alternatives) for bookie in reads.entry_ids]
        failures = {b: dict.fromkeys(ids, Answer.UNKNOWN) for b, ids in reads.entry_ids.items()}
        entry_ids = progress.note(failures)

    last = assign(entry_ids, progress, what, nothing_known)

    assert order == [(order[0][0], True), (order[1][0], False), (order[0][0], False)]
    assert order[0][0] != order[1][0]
    assert not last.entry_ids
    assert progress.unknown == [0, 1, 2]


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


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testSplitIntoSubFragmentsWithDifferentFragmentBoundaries",
    verdict="other",
    why="parts are as long as a transfer may be, with a window in bytes, and follow one another without a pause",
)
@in_virtual_time
async def test_a_long_copy_comes_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await cluster_with_ledger()
    monkeypatch.setattr("replication.copying.copy_index.SLICE_ENTRIES", 2)
    for entry_id in (1, 7):  # in the first and in the last slice; only B2 has them too
        cluster.bookie(B2).lose(LEDGER, entry_id)

    outcome = await copy(cluster, job())

    assert [sum(map(len, t.reads.values())) for t, _ in cluster.bookies.transfers] == [2, 2, 2]
    assert outcome.without_copy == (1, 7)
    assert outcome.entry_count == 4


@pytest.mark.parametrize("entries_before", [0, 4], ids=["at once", "after much was acknowledged"])
@in_virtual_time
async def test_a_target_whose_connection_breaks_late_is_sent_just_the_rest(
    monkeypatch: pytest.MonkeyPatch, entries_before: int
) -> None:
    cluster = await cluster_with_ledger()
    monkeypatch.setattr("replication.copying.copy_index.RESUME_WORTH_ENTRIES", 4)
    adds = 0

    def break_once(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        nonlocal adds
        adds += op is Op.ADD
        is_now = op is Op.ADD and adds == entries_before + 1
        return Fault(error=UnavailableError) if is_now else NO_FAULT

    cluster.bookies.faults = break_once

    outcome = await copy(cluster, job())

    if entries_before:
        assert outcome.is_complete
        assert adds == 6 + 1, "what was acknowledged is not sent again"
    else:
        assert isinstance(outcome.target_error, UnavailableError)


@in_virtual_time
async def test_a_busy_target_is_waited_for_and_not_for_ever() -> None:
    cluster = await cluster_with_ledger()
    cluster.bookies.fail(B4, Op.ADD, Fault(error=BusyError))
    waiting = asyncio.create_task(copy(cluster, job()))
    await asyncio.sleep(RESUME_PAUSE_S / 2)
    cluster.bookies.stop_failing(B4, Op.ADD)
    assert (await waiting).is_complete

    cluster.bookies.fail(B4, Op.ADD, Fault(error=BusyError))
    outcome = await copy(cluster, job())

    assert isinstance(outcome.target_error, BusyError)


class _Giving:
    """Bookies that give and take whatever they are asked for, and weigh what they are handed."""

    def __init__(self, *, fails: bool = False) -> None:
        self.entry_count = 0
        self.memory_bytes = 0
        self._fails = fails

    def standing(self, bookie: BookieId) -> Standing:
        return Standing()

    async def transfer(self, transfer: Transfer) -> TransferResult:
        count = sum(map(len, transfer.reads.values()))
        self.entry_count += count
        await asyncio.sleep(0)
        self.memory_bytes = max(self.memory_bytes, tracemalloc.get_traced_memory()[0])
        if self._fails:
            return TransferResult(
                failures={
                    b: dict.fromkeys(ids, Answer.UNKNOWN) for b, ids in transfer.reads.items()
                }
            )
        return TransferResult(entry_count=count)


@pytest.mark.parametrize("write_quorum", [3, 2])
def test_the_memory_of_a_copy_does_not_grow_with_its_ledger(write_quorum: int) -> None:
    bookies = _Giving()
    what = whole_ledger(BOOKIES[:3], entry_count=1_000_000, write_quorum=write_quorum)
    tracemalloc.start()
    try:
        outcome = run(copy_index(what, bookies=cast(Bookies, bookies), digest=DIGEST))
    finally:
        tracemalloc.stop()

    assert outcome.entry_count == bookies.entry_count == len(what.entry_ids)
    assert bookies.memory_bytes < 1_000_000


@in_virtual_time
async def test_a_copy_that_lacks_very_much_is_given_up() -> None:
    bookies = _Giving(fails=True)
    what = whole_ledger(entry_count=10_000_000)

    outcome = await copy_index(what, bookies=cast(Bookies, bookies), digest=DIGEST)

    assert LACKING_MAX < len(outcome.unknown) < 2 * LACKING_MAX
    assert outcome.unknown == tuple(sorted(outcome.unknown))
