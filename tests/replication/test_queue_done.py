"""The end of a ledger's time in a worker's hands: done, or given back."""

import pytest

from ledgers.errors import ConflictError, LockLostError, UnknownOutcomeError
from ledgers.memory.store import Fault
from ledgers.model import BookieId
from ledgers.store import Delete, SetData
from tests.replication.cluster import Cluster, fault_once, in_virtual_time
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
@in_virtual_time
async def test_done_removes_mark_directory_and_lock_in_one_request() -> None:
    cluster = await Cluster.start()
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


@in_virtual_time
async def test_what_goes_with_it_is_written_with_it_or_not_at_all() -> None:
    cluster = await Cluster.start()
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
@in_virtual_time
async def test_rule_s6_a_ledger_that_was_marked_again_meanwhile_stays_marked() -> None:
    cluster = await Cluster.start()
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
@in_virtual_time
async def test_a_mark_that_somebody_deleted_is_as_good_as_done(is_directory_left: bool) -> None:
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


@in_virtual_time
async def test_a_strange_znode_beside_the_mark_is_no_obstacle_and_stays() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1)
    await cluster.store.create(f"{DIRECTORY}/strange")

    async with cluster.node() as node:
        assert await node.queue.complete(await node.lease())

        await cluster.assert_queue_empty()
    assert await cluster.store.children(DIRECTORY) == ["strange"]


@pytest.mark.parametrize("is_retaken", [False, True], ids=["gone", "Java's now"])
@in_virtual_time
async def test_rule_s3_without_its_lock_a_ledger_is_neither_written_nor_unmarked(
    is_retaken: bool,
) -> None:
    cluster = await Cluster.start()
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
@in_virtual_time
async def test_after_a_lost_reply_it_is_known_whether_the_ledger_is_done(
    fault: Fault, is_completed: bool
) -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        fault_once(cluster, node.store, Delete, fault)
        with pytest.raises(UnknownOutcomeError):
            await node.queue.complete(lease)

        assert await node.queue.is_completed(lease) is is_completed


@in_virtual_time
async def test_rule_s3_done_by_a_lost_reply_and_marked_again_the_lock_is_not_ours_any_more() -> (
    None
):
    cluster = await Cluster.start()
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
@in_virtual_time
async def test_a_ledger_given_back_can_be_taken_by_another_node() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1)

    async with cluster.node("node-1") as one, cluster.node("node-2") as two:
        await one.queue.release(await one.lease())

        assert await cluster.marked() == [LEDGER]
        await two.lease()


@pytest.mark.compat(
    "G15",
    verdict="better",
    why="our lock is deleted at a version that only our locks have, together with a check of the session",
)
@in_virtual_time
async def test_rule_s3_giving_back_never_deletes_another_nodes_lock() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1)

    async with cluster.node("node-1") as ours, cluster.node("node-2") as theirs:
        lease = await ours.lease()
        await cluster.store.delete(LOCK)  # a Java worker deletes locks without looking whose
        await theirs.lease()

        await ours.queue.release(lease)

        _, stat = await cluster.store.get(LOCK)
        assert stat.ephemeral_owner == theirs.store.session_id


@in_virtual_time
async def test_giving_back_twice_is_harmless() -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await node.queue.release(lease)
        await node.queue.release(lease)

        assert await cluster.locked() == []
    assert await cluster.marked() == [LEDGER]


@pytest.mark.parametrize("replicas", [(), (B1,)], ids=["nobody", "a bookie"])
@in_virtual_time
async def test_the_disable_switch_and_marks_are_read_as_they_stand(
    replicas: tuple[BookieId, ...],
) -> None:
    cluster = await Cluster.start()
    async with cluster.node() as node:
        assert not await node.queue.switch.is_on()
        assert not await node.queue.is_marked(LEDGER)

        await cluster.mark(*replicas)
        await cluster.store.create(PATHS.disable)

        assert await node.queue.switch.is_on()
        assert await node.queue.is_marked(LEDGER)
