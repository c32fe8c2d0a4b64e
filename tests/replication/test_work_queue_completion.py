"""The end of a lease: the ledger is completed, or returned."""

from dataclasses import replace

import pytest

from ledgers.errors import ConflictError, LockLostError, UnknownOutcomeError
from ledgers.model import BookieId
from ledgers.store import Delete, SetData
from replication.ledger_record import WaitingNote
from replication.reasons import Blocked, Reason
from tests.memory.store import Fault
from tests.replication.cluster import Cluster, fault_once
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.watched import settle

MARK = PATHS.mark(LEDGER)
LOCK = PATHS.lock(LEDGER)
DIRECTORY = MARK.rpartition("/")[0]
EXTRA = "/extra"

# --- Finishing ------------------------------------------------------------------------------------


@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testMarkingAsReplicated",
    "TestLedgerUnderreplicationManager.testHierarchyCleanup",
    verdict="same",
)
async def test_completion_is_one_request(cluster: Cluster) -> None:
    """It deletes mark, directory and lock."""
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await settle()  # its view of the bookies has been read
        before = node.store.request_count

        assert await node.queue.complete(lease)

        assert node.store.request_count == before + 1
        assert await cluster.locked() == []
        assert await cluster.store.exists(DIRECTORY) is None
        assert await node.queue.is_completed(lease)


async def test_further_writes_succeed_or_fail_with_the_completion(cluster: Cluster) -> None:
    await cluster.store.create(EXTRA)
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        with pytest.raises(ConflictError):
            await node.queue.complete(lease, [SetData(path=EXTRA, data=b"x", version=5)])
        assert await cluster.marked() == [LEDGER]
        assert len(await cluster.locked()) == 1

        assert await node.queue.complete(lease, [SetData(path=EXTRA, data=b"x", version=0)])
        await cluster.assert_queue_empty()
    assert (await cluster.store.get(EXTRA))[0] == b"x"


@pytest.mark.compat("TestLedgerUnderreplicationManager.testManyFailures", verdict="same")
async def test_rule_s6_a_ledger_marked_again_meanwhile_stays_marked(cluster: Cluster) -> None:
    await cluster.store.create(EXTRA)
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await cluster.mark(B1, B2)

        assert not await node.queue.complete(lease, [SetData(path=EXTRA, data=b"x", version=0)])

        assert (await cluster.store.get(EXTRA))[0] == b"x"
        assert await cluster.marked() == [LEDGER]
        assert not await node.queue.is_completed(lease)
        await node.queue.release(lease)
        assert await cluster.locked() == []


@pytest.mark.parametrize("is_directory_left", [False, True])
async def test_a_deleted_mark_counts_as_completed(is_directory_left: bool) -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await cluster.store.delete(MARK)
        if not is_directory_left:
            await cluster.store.delete(DIRECTORY)

        assert await node.queue.complete(lease)
        await cluster.assert_queue_empty()
    assert await cluster.store.exists(DIRECTORY) is None


async def test_an_unknown_znode_beside_the_mark_stays(cluster: Cluster) -> None:
    await cluster.mark(B1)
    await cluster.store.create(f"{DIRECTORY}/strange")

    async with cluster.node() as node:
        assert await node.queue.complete(await node.lease())

        await cluster.assert_queue_empty()
    assert await cluster.store.children(DIRECTORY) == ["strange"]


@pytest.mark.parametrize("is_retaken", [False, True], ids=["deleted", "Java's now"])
async def test_rule_s3_a_ledger_without_its_lock_is_not_completed(
    cluster: Cluster,
    is_retaken: bool,
) -> None:
    """Its metadata is not written either."""
    await cluster.store.create(EXTRA)
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await cluster.store.delete(LOCK)
        if is_retaken:
            await cluster.store.create(LOCK, is_ephemeral=True)

        write = SetData(path=EXTRA, data=b"x", version=0)
        with pytest.raises(LockLostError):
            await node.queue.complete(lease)
        with pytest.raises(LockLostError):
            await node.queue.write(lease, [write])
        with pytest.raises(LockLostError):
            await node.queue.complete(lease, [write])

        await node.queue.release(lease)
        assert await cluster.marked() == [LEDGER]
        assert len(await cluster.locked()) == is_retaken
    assert (await cluster.store.get(EXTRA))[0] == b""


@pytest.mark.parametrize(
    ("fault", "is_completed"),
    [
        pytest.param(Fault.LOST_REPLY, True, id="it was done"),
        pytest.param(Fault.LOST_REQUEST, False, id="it never arrived"),
    ],
)
async def test_after_a_lost_reply_the_outcome_is_found_out(
    cluster: Cluster, fault: Fault, is_completed: bool
) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        fault_once(cluster, node.store, Delete, fault)
        with pytest.raises(UnknownOutcomeError):
            await node.queue.complete(lease)

        assert await node.queue.is_completed(lease) is is_completed


async def test_rule_s3_a_new_mark_after_a_lost_reply_is_not_ours(cluster: Cluster) -> None:
    """The reply was to our completion; another node may have the lock."""
    await cluster.mark(B1)

    async with cluster.node("node-1") as ours, cluster.node("node-2") as theirs:
        lease = await ours.lease()
        fault_once(cluster, ours.store, Delete, Fault.LOST_REPLY)
        with pytest.raises(UnknownOutcomeError):
            await ours.queue.complete(lease)
        await cluster.mark(B3)
        await theirs.lease()

        with pytest.raises(LockLostError):
            await ours.queue.is_completed(lease)


# --- Giving back ----------------------------------------------------------------------------------


@pytest.mark.compat("TestLedgerUnderreplicationManager.testRelease", verdict="same")
async def test_a_returned_ledger_can_be_leased_by_another_node(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node("node-1") as one, cluster.node("node-2") as two:
        await one.queue.release(await one.lease())

        assert await cluster.marked() == [LEDGER]
        await two.lease()


@pytest.mark.compat(
    "G15",
    verdict="better",
    why="our lock is deleted at a version that only our locks have, together with a check of the "
    "session",
)
async def test_rule_s3_returning_never_deletes_another_nodes_lock(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node("node-1") as ours, cluster.node("node-2") as theirs:
        lease = await ours.lease()
        await cluster.store.delete(LOCK)  # a Java worker deletes locks without looking whose
        await theirs.lease()

        await ours.queue.release(lease)

        _, stat = await cluster.store.get(LOCK)
        assert stat.ephemeral_owner == theirs.store.session_id


async def test_returning_twice_is_harmless(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await node.queue.release(lease)
        await node.queue.release(lease)

        assert await cluster.locked() == []
    assert await cluster.marked() == [LEDGER]


@pytest.mark.parametrize("replicas", [(), (B1,)], ids=["no node", "a bookie"])
async def test_the_disable_switch_and_marks_are_read_as_they_are(
    cluster: Cluster,
    replicas: tuple[BookieId, ...],
) -> None:
    async with cluster.node() as node:
        assert not await node.queue.switch.is_on()
        assert not await node.queue.is_marked(LEDGER)

        await cluster.mark(*replicas)
        await cluster.store.create(PATHS.disable)

        assert await node.queue.switch.is_on()
        assert await node.queue.is_marked(LEDGER)


# --- The waiting note -----------------------------------------------------------------------------

NOTE = WaitingNote(
    ledger_id=LEDGER, blocked=Blocked(reason=Reason.NO_TARGET), node="host", since_ms=1
)


async def test_the_note_and_the_end_of_the_lease_are_one_request(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await settle()
        before = node.store.request_count

        await node.queue.unlock_with_note(lease, NOTE)

        assert node.store.request_count == before + 1
        assert await node.notes.read(LEDGER) == NOTE
        assert await cluster.locked() == []
        assert await cluster.marked() == [LEDGER]


async def test_a_note_that_an_operator_changes_is_deleted_with_the_mark(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await node.queue.write_note(lease, NOTE)
        await node.notes.let_go(LEDGER, guards=(), beside=replace(NOTE, tries=2))

        assert await node.queue.complete(lease)

        assert await node.notes.ledger_ids() == set()
        await cluster.assert_queue_empty()
