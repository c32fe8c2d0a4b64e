"""Recovery in cases that Java's tests of it go through, beyond those in ``test_recovery``."""

import asyncio
from dataclasses import replace

import pytest

from ledgers.errors import ConflictError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.memory.bookies import Fault, Op
from ledgers.metadata import LedgerState
from tests.ledgers.world import LEDGER_ID, A, B, C, World
from tests.virtual_time import run


@pytest.mark.compat("LedgerRecovery2Test.testCantRecoverAllDown", verdict="same")
def test_with_all_bookies_down_a_ledger_stays_open_for_the_next_who_tries() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)
        world.down = {A, B, C}

        with pytest.raises(UnavailableError):
            await world.recover()
        assert (await world.metadata()).state is LedgerState.IN_RECOVERY

        world.down = set()
        assert (await world.recover()).last_entry_id == 0

    run(scenario())


@pytest.mark.compat("LedgerRecovery2Test.testRecoveryTwoBookiesFailOnSameEntry", verdict="same")
def test_two_bookies_that_refuse_the_same_entry_are_both_replaced() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], ack_quorum=3)
        await world.put(0, A, B, C)
        for bookie in (A, B):
            world.bookies.inner.fail(bookie, Op.ADD, Fault(error=UnavailableError))

        closed = await world.recover()

        (segment,) = closed.segments
        assert closed.last_entry_id == 0
        assert segment.ensemble[2] == C
        assert not {A, B} & set(segment.ensemble)
        assert set(segment.ensemble) <= world.holders(0)

    run(scenario())


@pytest.mark.compat("ParallelLedgerRecoveryTest.testRecoveryOnEntryGap", verdict="same")
def test_a_ledger_ends_before_its_first_gap_whatever_lies_behind_it() -> None:
    """An entry behind a gap was never acknowledged: a writer acknowledges in order."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(10):
            await world.put(entry_id, A, B, C)
        await world.put(14, A, lac=8)

        closed = await world.recover()

        assert (closed.last_entry_id, closed.length) == (9, 100)
        assert await world.payloads() == [b"%010d" % entry_id for entry_id in range(10)]

    run(scenario())


@pytest.mark.compat("MetadataUpdateLoopTest.testHammer", verdict="same")
def test_of_a_hundred_changes_at_once_none_is_lost() -> None:
    async def scenario() -> None:
        world = World()
        world.tree.latency = lambda: world.clock.sleep(world.random.uniform(0, 0.1))
        await world.make_ledger([A, B, C])

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

        await asyncio.gather(*(change(world.new_manager(), number) for number in range(100)))

        keys = [key for key, _ in (await world.metadata()).custom]
        assert sorted(keys) == [f"change {number:03}" for number in range(100)]

    run(scenario())
