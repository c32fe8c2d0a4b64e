"""Recovery in cases that Java's tests cover, beyond those in ``test_recovery``."""

import asyncio
from dataclasses import replace

import pytest

from ledgers.errors import ConflictError, NotEnoughBookiesError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import LedgerState
from tests.ledgers.memory_cluster import LEDGER_ID, A, B, C, D, E, F, MemoryCluster
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import in_virtual_time


@pytest.mark.compat("LedgerRecovery2Test.testCantRecoverAllDown", verdict="same")
@in_virtual_time
async def test_a_ledger_stays_open_while_all_its_bookies_are_down() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    cluster.down = {A, B, C}

    with pytest.raises(UnavailableError):
        await cluster.recover()
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY

    cluster.down = set()
    assert (await cluster.recover()).last_entry_id == 0


@pytest.mark.compat("LedgerRecovery2Test.testRecoveryTwoBookiesFailOnSameEntry", verdict="same")
@in_virtual_time
async def test_two_bookies_that_refuse_an_entry_are_both_replaced() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], ack_quorum=3, entries=[0], on=[A, B, C])
    for bookie in (A, B):
        cluster.bookies.fail(bookie, Op.ADD, Fault(error=UnavailableError))

    closed = await cluster.recover()

    (segment,) = closed.segments
    assert closed.last_entry_id == 0
    assert segment.ensemble[2] == C
    assert not {A, B} & set(segment.ensemble)
    assert set(segment.ensemble) <= cluster.stored_on(0)


async def with_a_bookie_that_refuses_copies() -> MemoryCluster:
    """Return ten entries on A, B and C with W 2 and A 2. Only D is writable besides, and refuses
    all adds."""
    cluster = await MemoryCluster.with_ledger([A, B, C], write_quorum=2, ack_quorum=2)
    for entry_id in range(10):
        first = entry_id % 3
        await cluster.put(entry_id, *(A, B, C, A)[first : first + 2], lac=-1)
    cluster.unwritable = {E, F}
    cluster.bookies.fail(D, Op.ADD, Fault(error=UnavailableError))
    return cluster


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecoveryWithRollingRestart", verdict="same")
@in_virtual_time
async def test_failed_recoveries_with_one_bookie_down_lose_nothing() -> None:
    cluster = await with_a_bookie_that_refuses_copies()
    before = await cluster.metadata()

    for absent in (A, B):
        cluster.down = {absent}
        with pytest.raises(NotEnoughBookiesError):
            await cluster.recover()
        assert (await cluster.metadata()).segments == before.segments

    cluster.down = set()
    closed = await cluster.recover()

    assert closed == before.closed(last_entry_id=9, length=100)
    assert await cluster.payloads() == [b"%010d" % entry_id for entry_id in range(10)]


@pytest.mark.compat("LedgerRecoveryTest.testBookieFailureDuringRecovery", verdict="same")
@in_virtual_time
async def test_a_recovery_without_replacement_can_be_completed_later() -> None:
    cluster = await with_a_bookie_that_refuses_copies()
    cluster.down = {A}
    with pytest.raises(NotEnoughBookiesError):
        await cluster.recover()

    cluster.unwritable = set()
    closed = await cluster.recover()

    assert closed.last_entry_id == 9
    assert not {A, D} & set(closed.last_segment.ensemble)
    assert await cluster.payloads() == [b"%010d" % entry_id for entry_id in range(10)]


@pytest.mark.compat("ParallelLedgerRecoveryTest.testRecoveryOnEntryGap", verdict="same")
@in_virtual_time
async def test_a_ledger_ends_before_its_first_gap() -> None:
    """An entry behind a gap was never acknowledged: a writer acknowledges in order."""
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=range(10), on=[A, B, C])
    await cluster.put(14, A, lac=8)

    closed = await cluster.recover()

    assert (closed.last_entry_id, closed.length) == (9, 100)
    assert await cluster.payloads() == [b"%010d" % entry_id for entry_id in range(10)]


@pytest.mark.compat("MetadataUpdateLoopTest.testHammer", verdict="same")
@in_virtual_time
async def test_of_a_hundred_concurrent_changes_none_is_lost() -> None:
    cluster = MemoryCluster()
    cluster.tree.latency = lambda: cluster.clock.sleep(cluster.random.uniform(0, 0.1))
    await cluster.make_ledger([A, B, C])

    async def change(manager: LedgerManager, number: int) -> None:
        while True:
            read = await manager.read(LEDGER_ID)
            custom = (*read.metadata.custom, (f"change {number:03}", b""))
            changed = replace(read.metadata, custom=custom)
            try:
                await manager.write(LEDGER_ID, changed, read_as=read)
            except ConflictError:
                continue
            return

    await asyncio.gather(*(change(cluster.new_manager(), number) for number in range(100)))

    keys = [key for key, _ in (await cluster.metadata()).custom]
    assert sorted(keys) == [f"change {number:03}" for number in range(100)]
