"""Changes of the metadata during a recovery: guards, lost replies, and other clients."""

from collections.abc import Callable, Sequence

import pytest

from ledgers.errors import ConflictError, LockLostError, NoSuchLedgerError
from ledgers.model import LedgerMetadata, LedgerState, Segment
from ledgers.store import Check, Operation
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.memory_cluster import LEDGER_ID, A, B, C, D, E, MemoryCluster
from tests.memory.store import Fault as StoreFault
from tests.memory.store import MemoryStore
from tests.replication.cluster import in_virtual_time


def change_at_first_add(
    cluster: MemoryCluster, change: Callable[[LedgerMetadata], LedgerMetadata]
) -> None:
    """Let another client write changed metadata right before the first add of the recovery."""
    is_changed = False

    async def write(call: Call) -> None:
        nonlocal is_changed
        if call.operation == "add" and not is_changed:
            is_changed = True
            found = await cluster.manager.read(LEDGER_ID)
            await cluster.manager.write(LEDGER_ID, change(found.metadata), read_as=found)

    cluster.bookies.before = write


@in_virtual_time
async def test_every_metadata_write_carries_the_guards() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C])
    writes: list[Sequence[Operation]] = []

    def note(store: MemoryStore, operations: Sequence[Operation]) -> None:
        if operations:
            writes.append(operations)

    cluster.tree.faults = note
    guard = Check(path="/lock", version=1)
    await cluster.store.create("/lock")
    await cluster.store.set("/lock", b"ours", version=0)

    await cluster.recover(guards=[guard])

    mark, close = writes[2:]
    assert guard in mark
    assert guard in close


@in_virtual_time
async def test_a_guard_that_fails_stops_recovery_at_once() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C])

    with pytest.raises(LockLostError):
        await cluster.recover(guards=[Check(path="/lock", version=1)])
    assert (await cluster.metadata()).state is LedgerState.OPEN


@pytest.mark.parametrize("fault", StoreFault)
@pytest.mark.parametrize("spoilt", [0, 1], ids=["mark", "close"])
@in_virtual_time
async def test_a_write_whose_reply_is_lost_is_looked_up(fault: StoreFault, spoilt: int) -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    writes = 0

    def lose(store: MemoryStore, operations: Sequence[Operation]) -> StoreFault | None:
        nonlocal writes
        writes += bool(operations)
        return fault if operations and writes == spoilt + 1 else None

    cluster.tree.faults = lose

    assert (await cluster.recover()).last_entry_id == 0
    assert (await cluster.metadata()).is_closed


@pytest.mark.compat(
    "LedgerRecovery2Test.testMetadataClosedDuringRecovery",
    "ParallelLedgerRecoveryTest.testRecoveryWhenClosingLedgerHandle",
    verdict="same",
)
@pytest.mark.parametrize(
    ("state", "last_entry_id"),
    [
        pytest.param(LedgerState.CLOSED, 0, id="another recovery found less, and was first"),
        pytest.param(LedgerState.IN_RECOVERY, 1, id="still open: only its version changed"),
    ],
)
@in_virtual_time
async def test_the_first_close_counts(state: LedgerState, last_entry_id: int) -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    await cluster.put(1, A, B)
    change_at_first_add(
        cluster,
        lambda found: (
            found.closed(last_entry_id=0, length=10) if state is LedgerState.CLOSED else found
        ),
    )

    closed = await cluster.recover()

    assert closed.last_entry_id == last_entry_id
    assert closed == await cluster.metadata()


@pytest.mark.compat(
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery1",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery2",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery3",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery4",
    verdict="same",
)
@in_virtual_time
async def test_a_concurrent_repair_of_an_earlier_segment_is_kept() -> None:
    cluster = await MemoryCluster.with_ledger(
        [A, B, C], [A, B, D], firsts=[0, 1], entries=[0], on=[A, B, C]
    )
    await cluster.put(1, A)
    repaired = Segment(first_entry_id=0, ensemble=(A, B, E))
    change_at_first_add(cluster, lambda found: found.with_segment(repaired))

    closed = await cluster.recover()

    assert closed.segments[0] == repaired
    assert closed.last_entry_id == 1


@pytest.mark.compat(
    "LedgerRecovery2Test.testNewEnsembleAddedDuringRecovery",
    "MetadataUpdateLoopTest.testNewestValueCannotBeUsedAfterReadBack",
    verdict="same",
)
@in_virtual_time
async def test_a_concurrent_ensemble_change_makes_a_recovery_void() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B])
    other = Segment(first_entry_id=0, ensemble=(A, B, E))
    change_at_first_add(cluster, lambda found: found.with_segment(other))

    with pytest.raises(ConflictError):
        await cluster.recover()
    assert not (await cluster.metadata()).is_closed


@in_virtual_time
async def test_a_ledger_deleted_during_a_recovery_is_an_error() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B])

    async def delete(call: Call) -> None:
        if call.operation == "add" and call.bookie == A:
            await cluster.manager.delete(LEDGER_ID, version=1)

    cluster.bookies.before = delete

    with pytest.raises(NoSuchLedgerError):
        await cluster.recover()
