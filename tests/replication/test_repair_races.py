"""Repairs during which others write the metadata, the mark or the lock, or a reply is lost."""

from dataclasses import replace

import pytest

from ledgers.bookies import Transfer
from ledgers.errors import LockLostError, UnavailableError
from ledgers.store import SetData
from replication.reasons import Reason
from replication.repair import ROUNDS_MAX, OutcomeKind
from replication.work_queue import LedgerLease
from tests.memory.bookies import Fault, Op
from tests.memory.store import Fault as StoreFault
from tests.replication.cluster import Cluster, fault_once
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.repairs import lost_b2, once_copied, once_while_copying, repair_with, touch

# --- Other writers of the metadata ----------------------------------------------------------------


@pytest.mark.compat("MetadataUpdateLoopTest.testConflictOnWrite", verdict="same")
async def test_rule_s3_after_a_conflict_nothing_is_copied_twice() -> None:
    cluster = await lost_b2()

    async def conflict(transfer: Transfer) -> None:
        await touch(cluster)

    once_copied(cluster, conflict)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert cluster.bookies.copied_count == 7
    assert (await cluster.metadata()).bookies == {B1, B3, *cluster.bookies.targets}
    await cluster.assert_whole()


async def test_rule_s3_a_restarted_target_gets_everything_again() -> None:
    cluster = await lost_b2()

    async def conflict_and_restart(transfer: Transfer) -> None:
        assert transfer.target is not None
        await touch(cluster)
        await cluster.kill(transfer.target)
        cluster.bookie(transfer.target).wipe()
        await cluster.revive(transfer.target)

    once_copied(cluster, conflict_and_restart)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert cluster.bookies.copied_count == 14
    await cluster.assert_whole()


@pytest.mark.compat(
    "BookieRecoveryTest.testMetadataConflictWithRecovery",
    "MetadataUpdateLoopTest.testConflictOnWriteBothWritingSame",
    verdict="same",
)
@pytest.mark.compat(
    "G17",
    verdict="better",
    why="by bookie index; after any conflict the metadata is read again and the repair is "
    "planned again",
)
async def test_rule_s2_another_repairs_changes_are_not_undone() -> None:
    cluster = await lost_b2()

    async def replaced_by_java(transfer: Transfer) -> None:
        versioned = await cluster.manager.read(LEDGER)
        for entry_id in cluster.bookie(B2).entry_ids(LEDGER):
            cluster.put(LEDGER, entry_id, B7)
        [segment] = versioned.metadata.segments
        changed = replace(versioned.metadata, segments=(segment.with_bookies({1: B7}),))
        await cluster.manager.write(LEDGER, changed, read_as=versioned)

    once_while_copying(cluster, replaced_by_java)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert await cluster.ensembles() == [(B1, B7, B3)]
    await cluster.assert_whole()


async def test_metadata_that_never_stops_changing_defers_the_repair() -> None:
    cluster = await lost_b2()

    async def keep_conflicting(transfer: Transfer) -> None:
        await touch(cluster)

    cluster.bookies.before_transfer = keep_conflicting
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.CONFLICTS)
    assert (await cluster.manager.read(LEDGER)).version <= 4 * ROUNDS_MAX
    assert await cluster.marked() == [LEDGER]


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldCleanTheLedgerFromUnderReplicationIfLedgerAlreadyDeleted",
    verdict="better",
)
@pytest.mark.parametrize(
    "other_blocked", [False, True], ids=["alone", "beside what cannot be repaired"]
)
async def test_a_ledger_deleted_during_the_copy_is_unmarked(
    cluster: Cluster,
    other_blocked: bool,
) -> None:
    await cluster.write_ledger((B1, B2, B3), (B4, B5, B6), starts=(0, 10), last=19)
    await cluster.kill(B2)
    await cluster.mark(B2)
    if other_blocked:
        cluster.bookies.fail(B5, Op.READ, Fault(error=UnavailableError))

    async def delete(transfer: Transfer) -> None:
        await cluster.manager.delete(LEDGER, version=0)

    once_while_copying(cluster, delete)
    async with cluster.node() as node:
        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_queue_empty()


# --- The queue ------------------------------------------------------------------------------------


@pytest.mark.compat("TestLedgerUnderreplicationManager.testManyFailures", verdict="same")
async def test_rule_s6_a_ledger_marked_again_stays_marked() -> None:
    """It is repaired."""
    cluster = await lost_b2()

    async def mark_again(transfer: Transfer) -> None:
        await cluster.mark(B2, B3)

    once_while_copying(cluster, mark_again)
    async with cluster.node() as node:
        outcome = await repair_with(node)

        assert outcome.kind is OutcomeKind.MARKED_AGAIN
        assert len(await cluster.locked()) == 1
        assert node.written == [await cluster.manager.read(LEDGER)]
    assert await cluster.marked() == [LEDGER]
    await cluster.assert_whole()


@pytest.mark.compat(
    "TestReplicationWorker.testRWShutDownInTheCaseOfZKOperationFailures",
    verdict="other",
    why="after a write with unknown outcome the state is read back, and a failed ledger is "
    "released; only the end of the session ends the worker's run",
)
@pytest.mark.parametrize("fault", StoreFault)
async def test_a_repair_whose_last_reply_was_lost_is_made_once(fault: StoreFault) -> None:
    cluster = await lost_b2()

    async with cluster.node() as node:
        lease = await node.lease()
        fault_once(cluster, node.store, SetData, fault)
        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.DONE
    assert cluster.bookies.copied_count == 7
    assert (await cluster.manager.read(LEDGER)).version == 1
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_rule_s3_a_lost_lock_ends_the_repair_without_a_write() -> None:
    cluster = await lost_b2()

    async def lose_lock(transfer: Transfer) -> None:
        await cluster.store.delete(PATHS.lock(LEDGER))

    once_while_copying(cluster, lose_lock)
    async with cluster.node() as node:
        with pytest.raises(LockLostError):
            await repair_with(node)

    assert await cluster.ensembles() == [(B1, B2, B3)]
    assert await cluster.marked() == [LEDGER]


async def test_rule_s3_after_a_lost_reply_and_a_new_mark_it_ends() -> None:
    """The lost reply was to the completion; the repair no longer has the lock."""
    cluster = await lost_b2()

    async with cluster.node() as node:
        lease = await node.lease()
        fault_once(cluster, node.store, SetData, StoreFault.LOST_REPLY)
        is_completed = node.queue.is_completed

        async def marked_again_first(lease: LedgerLease) -> bool:
            await cluster.mark(B3)
            return await is_completed(lease)

        node.queue.is_completed = marked_again_first  # type: ignore[method-assign]
        with pytest.raises(LockLostError):
            await node.repairer.repair(lease)

    assert await cluster.marked() == [LEDGER]
    await cluster.assert_whole()
