"""Recovery in cases that Java's tests of it go through, beyond those in ``test_recovery``."""

import asyncio
from dataclasses import replace

import pytest

from ledgers.errors import ConflictError, NotEnoughBookiesError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.memory.bookies import Fault, Op
from ledgers.model import LedgerState
from tests.ledgers.world import LEDGER_ID, A, B, C, D, E, F, World
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
            world.bookies.fail(bookie, Op.ADD, Fault(error=UnavailableError))

        closed = await world.recover()

        (segment,) = closed.segments
        assert closed.last_entry_id == 0
        assert segment.ensemble[2] == C
        assert not {A, B} & set(segment.ensemble)
        assert set(segment.ensemble) <= world.holders(0)

    run(scenario())


async def with_a_bookie_that_refuses_copies() -> World:
    """Ten entries on A, B and C, W 2 and A 2. Of the others just D is writable, and takes none."""
    world = World()
    await world.make_ledger([A, B, C], write_quorum=2, ack_quorum=2)
    for entry_id in range(10):
        first = entry_id % 3
        await world.put(entry_id, *(A, B, C, A)[first : first + 2], lac=-1)
    world.unwritable = {E, F}
    world.bookies.fail(D, Op.ADD, Fault(error=UnavailableError))
    return world


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecoveryWithRollingRestart", verdict="same")
def test_recoveries_that_fail_while_one_bookie_after_the_other_is_away_spoil_nothing() -> None:
    async def scenario() -> None:
        world = await with_a_bookie_that_refuses_copies()
        before = await world.metadata()

        for away in (A, B):
            world.down = {away}
            with pytest.raises(NotEnoughBookiesError):
                await world.recover()
            assert (await world.metadata()).segments == before.segments

        world.down = set()
        closed = await world.recover()

        assert closed == before.closed(last_entry_id=9, length=100)
        assert await world.payloads() == [b"%010d" % entry_id for entry_id in range(10)]

    run(scenario())


@pytest.mark.compat("LedgerRecoveryTest.testBookieFailureDuringRecovery", verdict="same")
def test_a_recovery_that_found_no_good_replacement_leaves_the_next_one_all_it_needs() -> None:
    async def scenario() -> None:
        world = await with_a_bookie_that_refuses_copies()
        world.down = {A}
        with pytest.raises(NotEnoughBookiesError):
            await world.recover()

        world.unwritable = set()
        closed = await world.recover()

        assert closed.last_entry_id == 9
        assert not {A, D} & set(closed.last_segment.ensemble)
        assert await world.payloads() == [b"%010d" % entry_id for entry_id in range(10)]

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
