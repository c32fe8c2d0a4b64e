"""The queue shared by several nodes: looking, leasing, completing and returning."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from ledgers.errors import SessionLostError, UnauthorizedError, UnknownOutcomeError
from ledgers.store import Create, Delete, MultiFailed, Operation, OperationResult, Stat
from replication import znodes
from replication.marks import DIRECTORIES_AT_ONCE, DIRECTORIES_LISTED_MAX
from replication.work_queue import Queue, QueuedLedger
from replication.znodes import Mark
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, fault_once
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.watched import settle

MARK = PATHS.mark(LEDGER)
LOCK = PATHS.lock(LEDGER)
DIRECTORY = MARK.rpartition("/")[0]
SEED = 11


async def look(queue: Queue, *, seed: int = SEED) -> frozenset[int]:
    return (await queue.list_ledgers(random.Random(seed))).free


# --- Looking --------------------------------------------------------------------------------------


@pytest.mark.compat("TestLedgerUnderreplicationManager.testBasicInteraction", verdict="better")
async def test_ledgers_are_found_everywhere_in_the_tree(cluster: Cluster) -> None:
    ledger_ids = [7, 65_536, 2**40, 2**63 - 1]
    for ledger_id in ledger_ids:
        await cluster.mark(B1, ledger_id=ledger_id)

    async with cluster.node() as node:
        assert await look(node.queue) == {*ledger_ids}


async def test_a_locked_ledger_is_not_free(cluster: Cluster) -> None:
    for ledger_id in range(3):
        await cluster.mark(B1, ledger_id=ledger_id)
    await cluster.store.create(PATHS.lock(1), is_ephemeral=True)

    async with cluster.node() as node:
        assert await look(node.queue) == {0, 2}


async def test_each_look_lists_another_part_of_a_long_queue(cluster: Cluster) -> None:
    """It knows that there is more."""
    for number in range(DIRECTORIES_LISTED_MAX + 4):
        await cluster.mark(B1, ledger_id=number << 16)

    async with cluster.node() as node:
        looks = [await look(node.queue, seed=seed) for seed in range(20)]
        is_listed = {node.queue.may_hold(ledger_id) for ledger_id in (0, 5)}

    assert {len(found) for found in looks} == {DIRECTORIES_LISTED_MAX}
    assert len(set().union(*looks)) == DIRECTORIES_LISTED_MAX + 4
    assert is_listed == {True}


async def test_a_look_stops_when_it_has_enough_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replication.marks.LEDGERS_ENOUGH", 3)
    cluster = await Cluster.start()
    for number in range(DIRECTORIES_AT_ONCE + 1):
        await cluster.mark(B1, ledger_id=number << 16)

    async with cluster.node() as node:
        assert len(await look(node.queue)) == DIRECTORIES_AT_ONCE
        assert node.queue.may_hold(99)


async def test_after_a_complete_listing_all_marks_are_known(cluster: Cluster) -> None:
    await cluster.mark(B1, ledger_id=5)

    async with cluster.node() as node:
        await look(node.queue)

        assert node.queue.may_hold(5)
        assert not node.queue.may_hold(6)


async def test_an_empty_queue_and_one_without_znodes_have_no_ledgers(cluster: Cluster) -> None:
    async with cluster.node() as node:
        assert await look(node.queue) == frozenset()

        await cluster.store.delete(PATHS.marks)
        assert await look(node.queue) == frozenset()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
async def test_tidying_removes_only_empty_directories_of_every_level(
    cluster: Cluster, depth: int
) -> None:
    await cluster.mark(B1)
    before = cluster.tree.snapshot()
    empty = PATHS.marks + "/0001/0002/0003/0004"[: 5 * depth]
    await cluster.store.create(empty, with_parents=True)

    async with cluster.node() as node:
        await node.queue.read(await look(node.queue))
        await node.queue.tidy()

    assert cluster.tree.snapshot() == before


@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testHierarchyCleanupInterference", verdict="same"
)
async def test_a_directory_with_a_new_mark_is_not_removed(cluster: Cluster) -> None:
    await cluster.store.create(DIRECTORY, with_parents=True)

    async with cluster.node() as node:
        await node.queue.read(await look(node.queue))
        await cluster.mark(B1)
        await node.queue.tidy()

    assert await cluster.marked() == [LEDGER]


async def test_an_unreadable_mark_is_still_work(cluster: Cluster) -> None:
    await cluster.store.create(MARK, b"\xff not a mark", with_parents=True)

    async with cluster.node() as node:
        [queued] = await node.queue.read(await look(node.queue))

        stat = await cluster.store.exists(MARK)
        assert stat is not None
        (seen,) = queued.marks
        assert (seen.path, seen.version, seen.czxid, seen.mzxid) == (
            MARK,
            0,
            stat.czxid,
            stat.mzxid,
        )
        assert queued.replicas == frozenset()
        assert await node.queue.lease(queued) is not None


# --- Taking ---------------------------------------------------------------------------------------


@pytest.mark.compat("TestLedgerUnderreplicationManager.testLocking", verdict="same")
async def test_rule_s3_our_lock_is_ephemeral_and_names_us(cluster: Cluster) -> None:
    """It has its own version."""
    await cluster.mark(B1)

    async with cluster.node("host-a") as node:
        lease = await node.lease()

        data, stat = await cluster.store.get(LOCK)
        assert data == b'bookieId: "host-a"\n'
        assert stat.ephemeral_owner == node.store.session_id
        assert stat.version == lease.lock.version > 0
    assert await cluster.locked() == []


@pytest.mark.compat("TestLedgerUnderreplicationManager.testLocking", verdict="same")
async def test_a_lock_of_javas_is_respected_and_never_deleted(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        queued = await node.queued()
        await cluster.store.create(LOCK, b'bookieId: "java"\n', is_ephemeral=True)

        assert await node.queue.lease(queued) is None
    assert await cluster.locked() == ["urL0000000007"]


@pytest.mark.compat("TestLedgerUnderreplicationManager.testMarkingAsReplicated", verdict="same")
async def test_a_completed_ledger_is_not_leased(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        queued = await node.queued()
        await cluster.store.delete(MARK)

        assert await node.queue.lease(queued) is None
        assert await cluster.locked() == []


@pytest.mark.parametrize(
    ("fault", "is_taken"),
    [
        pytest.param(Fault.LOST_REPLY, True, id="it was done"),
        pytest.param(Fault.LOST_REQUEST, False, id="it never arrived"),
    ],
)
async def test_after_a_lost_reply_our_lock_is_recognised(fault: Fault, is_taken: bool) -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1)

    async with cluster.node() as node:
        queued = await node.queued()
        fault_once(cluster, node.store, Create, fault)
        lease = await node.queue.lease(queued)

        assert (lease is not None) is is_taken
        assert len(await cluster.locked()) == is_taken


async def test_rule_s8_after_a_lost_reply_a_sync_precedes_the_read(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        queued = await node.queued()
        behind = BehindUntilSynced(node.store, LOCK)
        queue = Queue(behind, node.batcher, PATHS, holder="node-1", clock=cluster.clock)
        fault_once(cluster, node.store, Create, Fault.LOST_REPLY)

        assert await queue.lease(queued) is not None


class BehindUntilSynced(MemoryStore):
    """A session on a server that does not know the last write to ``path`` before a sync."""

    def __init__(self, store: MemoryStore, path: str) -> None:
        self.__dict__ = store.__dict__
        self.path = path
        self.is_behind = True

    async def sync(self, path: str) -> None:
        await super().sync(path)
        self.is_behind = False

    async def exists(self, path: str) -> Stat | None:
        stat = await super().exists(path)
        return None if self.is_behind and path == self.path else stat


async def test_after_a_lost_reply_another_nodes_lock_is_not_ours(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node("node-1") as ours, cluster.node("node-2") as theirs:
        queued = await ours.queued()
        await theirs.lease()
        fault_once(cluster, ours.store, Create, Fault.LOST_REPLY)

        assert await ours.queue.lease(queued) is None


async def test_a_refusal_without_a_lock_is_not_another_nodes_lock(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        queued, lease = await node.queued(), await node.lease()

        async def shut_out(operations: Sequence[Operation], **_: object) -> list[OperationResult]:
            raise MultiFailed(0, UnauthorizedError("no access"))

        monkeypatch.setattr(node.batcher, "commit", shut_out)
        with pytest.raises(UnauthorizedError):
            await node.queue.lease(queued)
        with capture_logs() as logs:
            await node.queue.release(lease)  # it ends with the session
    assert [each["event"] for each in logs if each["log_level"] == "error"] == [
        "lock.release_denied"
    ]


@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testBasicInteraction",
    verdict="better",
    why="the ledgers at most risk come first, and a lost race costs one request",
)
async def test_two_nodes_lease_each_of_the_same_ledgers_once(cluster: Cluster) -> None:
    for ledger_id in range(100):
        await cluster.mark(B1, ledger_id=ledger_id)

    async with cluster.node("node-1") as one, cluster.node("node-2") as two:
        found = await one.queue.read(await look(one.queue))

        async def take_all(queue: Queue, wanted: Sequence[QueuedLedger]) -> list[int]:
            leases = await asyncio.gather(*(queue.lease(queued) for queued in wanted))
            return [lease.ledger_id for lease in leases if lease is not None]

        ours, theirs = await asyncio.gather(
            take_all(one.queue, found), take_all(two.queue, found[::-1])
        )

        assert sorted(ours + theirs) == list(range(100))
        assert ours
        assert theirs
        assert len(await cluster.locked()) == 100


async def test_rule_s3_nothing_is_leased_without_a_proven_session(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        queued = await node.queued()
        await cluster.store.delete(node.membership.path)

        with pytest.raises(SessionLostError):
            await node.queue.lease(queued)
        assert await cluster.locked() == []


# --- The shared and the private queue -------------------------------------------------------------

PRIVATE = PATHS.private
SHARED_MARK, PRIVATE_MARK = PATHS.mark(LEDGER), PRIVATE.mark(LEDGER)


async def mark(cluster: Cluster, path: str, *, ctime_ms: int = 1) -> None:
    data = znodes.mark_to_bytes(Mark(replicas=(B1,), ctime_ms=ctime_ms))
    await cluster.store.create(path, data, with_parents=True)


async def marked_in(*paths: str) -> Cluster:
    cluster = await Cluster.start()
    for path in paths:
        await mark(cluster, path)
    return cluster


async def find(queue: Queue) -> QueuedLedger:
    look = await queue.list_ledgers(random.Random(0))
    assert look.free == {LEDGER}
    (queued,) = await queue.read(look.free)
    assert look.losses == {LEDGER} if queued.is_loss else not look.losses
    return queued


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param([SHARED_MARK], id="shared"),
        pytest.param([PRIVATE_MARK], id="private"),
        pytest.param([SHARED_MARK, PRIVATE_MARK], id="both"),
    ],
)
@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testMarkingAsReplicated",
    "TestLedgerUnderreplicationManager.testHierarchyCleanup",
    verdict="same",
)
async def test_a_ledger_is_leased_and_completed_in_each_tree(paths: list[str]) -> None:
    """Completion is one request, which deletes mark, directory and lock."""
    cluster = await Cluster.start()
    before = cluster.tree.snapshot()
    for path in paths:
        await mark(cluster, path)

    async with cluster.node() as node:
        queued = await find(node.queue)
        assert [seen.path for seen in queued.marks] == paths
        assert queued.is_loss is (SHARED_MARK in paths)
        lease = await node.queue.lease(queued)
        assert lease is not None
        await settle()  # its view of the bookies has been read
        requests = node.store.request_count

        assert await node.queue.complete(lease)

        assert node.store.request_count == requests + 1
        assert not await node.queue.is_marked(LEDGER)
        assert await node.queue.is_completed(lease)
        await node.queue.tidy()
    assert {*cluster.tree.snapshot()} == {*before, *_parents(paths)}


def _parents(paths: list[str]) -> set[str]:
    """Return the three upper directories, which stay until a worker deletes them."""
    return {path.rsplit("/", depth)[0] for path in paths for depth in (2, 3, 4)}


@pytest.mark.parametrize("changed", [SHARED_MARK, PRIVATE_MARK])
async def test_rule_s6_a_ledger_is_not_leased_if_a_mark_has_changed(changed: str) -> None:
    cluster = await marked_in(SHARED_MARK, PRIVATE_MARK)

    async with cluster.node() as node:
        queued = await find(node.queue)
        await cluster.store.set(changed, znodes.mark_to_bytes(Mark(replicas=(B1, B2))), version=0)

        assert await node.queue.lease(queued) is None
        assert await cluster.locked() == []


@pytest.mark.parametrize(
    ("extended", "other"),
    [(SHARED_MARK, PRIVATE_MARK), (PRIVATE_MARK, SHARED_MARK)],
    ids=["shared", "private"],
)
async def test_rule_s6_a_mark_extended_meanwhile_stays(extended: str, other: str) -> None:
    """The other mark is deleted."""
    cluster = await marked_in(SHARED_MARK, PRIVATE_MARK)

    async with cluster.node() as node:
        lease = await node.queue.lease(await find(node.queue))
        assert lease is not None
        await cluster.store.set(extended, b"", version=0)

        assert not await node.queue.complete(lease)

        assert await cluster.store.exists(extended) is not None
        assert await cluster.store.exists(other) is None
        assert len(await cluster.locked()) == 1
    assert await cluster.store.children(PATHS.marks) is not None
    assert await cluster.store.children(PRIVATE.marks) is not None


@pytest.mark.parametrize("path", [SHARED_MARK, PRIVATE_MARK])
async def test_completion_in_steps_empties_a_tree_up_to_its_root(path: str) -> None:
    cluster = await Cluster.start()
    before = cluster.tree.snapshot()
    await mark(cluster, path)

    async with cluster.node() as node:
        lease = await node.queue.lease(await find(node.queue))
        assert lease is not None
        await cluster.store.delete(path)

        assert await node.queue.complete(lease)
    assert cluster.tree.snapshot() == before


async def test_a_mark_made_in_the_other_tree_meanwhile_is_new_work() -> None:
    cluster = await marked_in(SHARED_MARK)

    async with cluster.node() as node:
        lease = await node.queue.lease(await find(node.queue))
        assert lease is not None
        await mark(cluster, PRIVATE_MARK)
        fault_once(cluster, node.store, Delete, Fault.LOST_REPLY)
        with pytest.raises(UnknownOutcomeError):
            await node.queue.complete(lease)

        assert await node.queue.is_completed(lease)
        assert (await find(node.queue)).marks[0].path == PRIVATE_MARK
