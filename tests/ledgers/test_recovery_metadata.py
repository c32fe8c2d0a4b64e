"""The metadata under a recovery: guards, lost replies, and whoever else writes it meanwhile."""

from collections.abc import Sequence

import pytest

from ledgers.errors import ConflictError, LockLostError, NoSuchLedgerError
from ledgers.memory.store import Fault as StoreFault
from ledgers.memory.store import MemoryStore
from ledgers.model import LedgerState, Segment
from ledgers.store import Check, Operation
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.world import LEDGER_ID, A, B, C, D, E, World
from tests.virtual_time import run


def test_every_metadata_write_carries_the_guards() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        writes: list[Sequence[Operation]] = []

        def note(store: MemoryStore, operations: Sequence[Operation]) -> None:
            if operations:
                writes.append(operations)

        world.tree.faults = note
        guard = Check(path="/lock", version=1)
        await world.store.create("/lock")
        await world.store.set("/lock", b"ours", version=0)

        await world.recover(guards=[guard])

        mark, close = writes[2:]
        assert guard in mark
        assert guard in close

    run(scenario())


def test_a_guard_that_does_not_hold_stops_recovery_at_once() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])

        with pytest.raises(LockLostError):
            await world.recover(guards=[Check(path="/lock", version=1)])
        assert (await world.metadata()).state is LedgerState.OPEN

    run(scenario())


@pytest.mark.parametrize("fault", StoreFault)
@pytest.mark.parametrize("spoilt", [0, 1], ids=["mark", "close"])
def test_a_write_whose_reply_is_lost_is_looked_up(fault: StoreFault, spoilt: int) -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)
        writes = 0

        def lose(store: MemoryStore, operations: Sequence[Operation]) -> StoreFault | None:
            nonlocal writes
            writes += bool(operations)
            return fault if operations and writes == spoilt + 1 else None

        world.tree.faults = lose

        assert (await world.recover()).last_entry_id == 0
        assert (await world.metadata()).is_closed

    run(scenario())


@pytest.mark.compat(
    "LedgerRecovery2Test.testMetadataClosedDuringRecovery",
    "ParallelLedgerRecoveryTest.testRecoveryWhenClosingLedgerHandle",
    verdict="same",
)
@pytest.mark.parametrize(
    ("state", "last_entry_id"),
    [
        pytest.param(LedgerState.CLOSED, 0, id="another recovery found less, and was first"),
        pytest.param(LedgerState.IN_RECOVERY, 1, id="nobody closed it, only its version moved"),
    ],
)
def test_whoever_closes_first_is_right(state: LedgerState, last_entry_id: int) -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)
        await world.put(1, A, B)
        is_changed = False

        async def change(call: Call) -> None:
            nonlocal is_changed
            if call.operation == "add" and not is_changed:
                is_changed = True
                found = await world.manager.read(LEDGER_ID)
                changed = (
                    found.metadata.closed(last_entry_id=0, length=10)
                    if state is LedgerState.CLOSED
                    else found.metadata
                )
                await world.manager.write(LEDGER_ID, changed, read_as=found)

        world.bookies.before = change

        closed = await world.recover()

        assert closed.last_entry_id == last_entry_id
        assert closed == await world.metadata()

    run(scenario())


@pytest.mark.compat(
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery1",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery2",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery3",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery4",
    verdict="same",
)
def test_a_repair_of_an_earlier_segment_meanwhile_is_kept() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], [A, B, D], firsts=[0, 1])
        await world.put(0, A, B, C)
        await world.put(1, A)
        repaired = Segment(first_entry_id=0, ensemble=(A, B, E))
        is_repaired = False

        async def repair(call: Call) -> None:
            nonlocal is_repaired
            if call.operation == "add" and not is_repaired:
                is_repaired = True
                found = await world.manager.read(LEDGER_ID)
                await world.manager.write(
                    LEDGER_ID, found.metadata.with_segment(repaired), read_as=found
                )

        world.bookies.before = repair

        closed = await world.recover()

        assert closed.segments[0] == repaired
        assert closed.last_entry_id == 1

    run(scenario())


@pytest.mark.compat(
    "LedgerRecovery2Test.testNewEnsembleAddedDuringRecovery",
    "MetadataUpdateLoopTest.testNewestValueCannotBeUsedAfterReadBack",
    verdict="same",
)
def test_an_ensemble_that_changes_under_a_recovery_voids_it() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B)
        is_changed = False

        async def change(call: Call) -> None:
            nonlocal is_changed
            if call.operation == "add" and not is_changed:
                is_changed = True
                found = await world.manager.read(LEDGER_ID)
                other = Segment(first_entry_id=0, ensemble=(A, B, E))
                await world.manager.write(
                    LEDGER_ID, found.metadata.with_segment(other), read_as=found
                )

        world.bookies.before = change

        with pytest.raises(ConflictError):
            await world.recover()
        assert not (await world.metadata()).is_closed

    run(scenario())


def test_a_ledger_deleted_under_a_recovery_is_an_error() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B)

        async def delete(call: Call) -> None:
            if call.operation == "add" and call.bookie == A:
                await world.manager.delete(LEDGER_ID, version=1)

        world.bookies.before = delete

        with pytest.raises(NoSuchLedgerError):
            await world.recover()

    run(scenario())
