"""The shared and the private queue: one ledger, one lock, and a mark in either tree or in both."""

import random

import pytest

from ledgers.errors import UnknownOutcomeError
from ledgers.store import Delete
from replication import znodes
from replication.work_queue import Queue, QueuedLedger
from replication.znodes import Mark
from tests.memory.store import Fault
from tests.replication.cluster import Cluster, fault_once
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.watched import settle

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
async def test_a_ledger_is_leased_and_completed_in_each_tree(paths: list[str]) -> None:
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
