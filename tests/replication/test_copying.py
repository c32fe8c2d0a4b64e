"""Copying one bookie index of one fragment, on bookies in memory."""

import asyncio
import tracemalloc
from typing import cast

import pytest
from msgspec.structs import replace

from ledgers.bookies import Answer, Bookies, SourceHealth, Transfer, TransferResult
from ledgers.errors import BusyError, FencedError, ReadOnlyError, UnavailableError
from ledgers.model import BookieId
from replication.copying import LACKING_MAX, RESUME_PAUSE_S, CopyOutcome, copy_index
from replication.entry_runs import EntryRuns
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.replication.cluster import DIGEST, ENTRY_BYTES, entry_bytes
from tests.replication.copies import ALL, cluster_with_ledger, copy, job, whole_ledger
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, BOOKIES
from tests.replication.nodes import LEDGER
from tests.virtual_time import run


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldCopyFailedBookieFragmentsToTargetBookie",
    verdict="better",
)
async def test_rule_s12_exactly_the_entries_of_the_index_are_copied() -> None:
    """Byte for byte."""
    cluster = await cluster_with_ledger()

    outcome = await copy(cluster, job())

    # E 3, W 2: index 2 stores 1 2 4 5 7 8
    assert cluster.bookie(B4).entry_ids(LEDGER) == {1, 2, 4, 5, 7, 8}
    assert all(
        cluster.bookie(B4).read(LEDGER, e) == entry_bytes(LEDGER, e) for e in (1, 2, 4, 5, 7, 8)
    )
    assert outcome == CopyOutcome(entry_count=6, entry_bytes=6 * ENTRY_BYTES)
    assert outcome.is_complete


async def test_good_entries_are_read_once() -> None:
    cluster = await cluster_with_ledger(write_quorum=3)

    await copy(cluster, job(write_quorum=3))

    assert sorted([*cluster.bookies.asked(B1), *cluster.bookies.asked(B2)]) == list(range(10))


@pytest.mark.parametrize("answer", [Answer.ABSENT, Answer.MISMATCH, Answer.UNKNOWN])
async def test_an_entry_missing_at_one_replica_is_read_from_the_next(answer: Answer) -> None:
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
    assert all(cluster.has_good_copy(B4, LEDGER, entry_id) for entry_id in range(10))


@pytest.mark.compat("G12", verdict="better")
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


async def test_rule_s5_an_unanswered_entry_is_not_called_lost() -> None:
    cluster = await cluster_with_ledger(write_quorum=3)
    cluster.bookie(B1).lose(LEDGER, 4)
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnavailableError))

    outcome = await copy(cluster, job(write_quorum=3))

    assert outcome.unknown == (4,)
    assert outcome.without_copy == ()
    assert outcome.entry_count == 9


async def test_an_entry_of_no_reachable_bookie_has_no_copy() -> None:
    cluster = await cluster_with_ledger()

    outcome = await copy(cluster, job(available=ALL - {B1, B2, B3}))

    assert outcome.without_copy == (1, 2, 4, 5, 7, 8)
    assert cluster.bookies.transfers == []


async def test_rule_s15_former_members_are_asked_before_it_is_lost() -> None:
    cluster = await cluster_with_ledger()
    cluster.bookie(B1).wipe()
    cluster.bookie(B2).wipe()
    for entry_id in (1, 2, 4):
        cluster.put(LEDGER, entry_id, B5)
    cluster.put(LEDGER, 5, B6)

    outcome = await copy(cluster, job(former=(B5, B6)))

    assert outcome.without_copy == (7, 8)
    assert cluster.bookie(B4).entry_ids(LEDGER) == {1, 2, 4, 5}


async def test_rule_s15_a_damaged_bookie_gives_entries_no_other_has() -> None:
    """The bookie will be replaced."""
    cluster = await cluster_with_ledger()
    cluster.bookie(B2).corrupt(LEDGER, 4)
    cluster.bookie(B3).lose(LEDGER, 1)

    outcome = await copy(cluster, job(index=1, available=ALL))

    # E 3, W 2: index 1 stores 0 1 3 4 6 7 9; 4 is on B2 and B3, 1 too
    assert outcome.is_complete
    assert cluster.bookies.asked(B2) == [1]


async def test_former_members_are_not_asked_while_replicas_answer() -> None:
    cluster = await cluster_with_ledger()

    await copy(cluster, job(former=(B5, B6)))

    assert cluster.bookies.asked(B5) == cluster.bookies.asked(B6) == []


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testReplicateLFShouldReturnFalseIfTheReplicationFails",
    verdict="better",
    why="another target is tried first",
)
@pytest.mark.parametrize("error", [FencedError, ReadOnlyError, UnavailableError])
async def test_rule_s11_a_failing_target_ends_the_copy(error: type[Exception]) -> None:
    cluster = await cluster_with_ledger()
    cluster.bookies.fail(B4, Op.ADD, Fault(error=error))  # type: ignore[arg-type]

    outcome = await copy(cluster, job())

    assert isinstance(outcome.target_error, error)
    assert not outcome.is_complete
    assert outcome.entry_count == 0
    assert len(cluster.bookies.transfers) == 1


async def test_a_copy_without_entries_is_complete_at_once() -> None:
    cluster = await cluster_with_ledger()

    outcome = await copy(cluster, job(entry_ids=()))

    assert outcome == CopyOutcome()
    assert outcome.is_complete
    assert cluster.bookies.transfers == []


@pytest.mark.compat(
    "TestLedgerFragmentReplication.testSplitIntoSubFragmentsWithDifferentFragmentBoundaries",
    verdict="other",
    why="parts are as long as a transfer allows, have a window in bytes, and follow without a "
    "pause",
)
async def test_a_long_copy_is_made_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await cluster_with_ledger()
    monkeypatch.setattr("replication.copying.SLICE_ENTRIES", 2)
    for entry_id in (1, 7):  # in the first and in the last slice; only B2 has them too
        cluster.bookie(B2).lose(LEDGER, entry_id)

    outcome = await copy(cluster, job())

    assert [sum(map(len, t.reads.values())) for t, _ in cluster.bookies.transfers] == [2, 2, 2]
    assert outcome.without_copy == (1, 7)
    assert outcome.entry_count == 4


@pytest.mark.parametrize("entries_before", [0, 4], ids=["at once", "after much was acknowledged"])
async def test_after_a_late_break_a_target_is_sent_only_the_rest(
    monkeypatch: pytest.MonkeyPatch, entries_before: int
) -> None:
    cluster = await cluster_with_ledger()
    monkeypatch.setattr("replication.copying.RESUME_WORTH_ENTRIES", 4)
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


async def test_a_busy_target_is_waited_for_within_bounds() -> None:
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
    """Bookies that return and store any entry, and count the bytes that they receive."""

    def __init__(self, *, fails: bool = False) -> None:
        self.entry_count = 0
        self.memory_bytes = 0
        self._fails = fails

    def source_health(self, bookie: BookieId) -> SourceHealth:
        return SourceHealth()

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


@pytest.mark.parametrize("is_in_place", [False, True], ids=["to a new member", "in place"])
@pytest.mark.parametrize("write_quorum", [3, 2])
def test_the_memory_of_a_copy_does_not_grow_with_its_ledger(
    write_quorum: int, is_in_place: bool
) -> None:
    bookies = _Giving()
    what = whole_ledger(BOOKIES[:3], entry_count=300_000, write_quorum=write_quorum)
    if is_in_place:
        lacking = what.entry_ids if write_quorum == 2 else EntryRuns(what.entry_ids)
        what = replace(what, target=what.fragment.ensemble[what.index], entry_ids=lacking)
    tracemalloc.start()
    try:
        outcome = run(copy_index(what, bookies=cast(Bookies, bookies), digest=DIGEST))
    finally:
        tracemalloc.stop()

    assert outcome.entry_count == bookies.entry_count == len(what.entry_ids)
    assert bookies.memory_bytes < 1_000_000


async def test_a_copy_that_lacks_very_many_entries_is_given_up() -> None:
    bookies = _Giving(fails=True)
    what = whole_ledger(entry_count=10_000_000)

    outcome = await copy_index(what, bookies=cast(Bookies, bookies), digest=DIGEST)

    assert LACKING_MAX < len(outcome.unknown) < 2 * LACKING_MAX
    assert outcome.unknown == tuple(sorted(outcome.unknown))
