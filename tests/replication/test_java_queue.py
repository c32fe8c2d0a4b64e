"""The queue with several clients, in the cases that the tests of Java's under-replication manager
cover."""

import asyncio
import random

import pytest

from ledgers.model import BookieId
from replication import znodes
from tests.auditor.auditing import Leader, leading
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS, Node

MANAGER = "TestLedgerUnderreplicationManager"
LONG_ID = 0xFEADEEFDAC
"""An id of 40 bits: more than one directory of its path differs from those of small ids."""
SOME_DIRECTORIES_SHARED = 0x5555_5555
SEED = 11


async def replicas(cluster: Cluster, ledger_id: int = LEDGER) -> tuple[BookieId, ...]:
    data, _ = await cluster.store.get(PATHS.mark(ledger_id))
    return znodes.parse_mark(data).replicas


@pytest.mark.compat(
    f"{MANAGER}.testMultipleManagersShouldBeAbleToTakeAndReleaseLock", verdict="same"
)
async def test_two_nodes_never_lease_one_ledger_at_the_same_time(cluster: Cluster) -> None:
    """They lease it and give it back a hundred times."""
    await cluster.mark(B1, ledger_id=LONG_ID)
    holding: set[str] = set()
    rng = random.Random(SEED)

    async def take_and_give_back(name: str, node: Node) -> None:
        taken_count = 0
        while taken_count < 100:
            lease = await node.queue.lease(await node.queued(LONG_ID))
            if lease is not None:
                assert not holding
                holding.add(name)
                await asyncio.sleep(rng.uniform(0, 0.02))
                holding.remove(name)
                await node.queue.release(lease)
                taken_count += 1
            await asyncio.sleep(rng.uniform(0, 0.02))

    async with (
        cluster.node("node-1") as one,
        cluster.node("node-2") as two,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(take_and_give_back("node-1", one))
        tasks.create_task(take_and_give_back("node-2", two))

    assert await cluster.marked() == [LONG_ID]
    assert await cluster.locked() == []


@pytest.mark.compat(f"{MANAGER}.test2reportSame", verdict="same")
async def test_concurrent_reports_of_a_loss_make_one_mark(cluster: Cluster) -> None:
    """The mark names the bookie once."""

    async with leading(cluster) as leader:
        await asyncio.gather(*(leader.marker.mark(LEDGER, [B1]) for _ in range(2)))

    assert await replicas(cluster) == (B1,)
    async with cluster.node() as node:
        assert await node.queue.complete(await node.lease())
    await cluster.assert_queue_empty()


@pytest.mark.compat(f"{MANAGER}.testManyFailuresInAnEnsemble", verdict="same")
async def test_losses_reported_one_by_one_are_all_in_the_mark(cluster: Cluster) -> None:

    async with leading(cluster) as leader:
        await leader.marker.mark(LEDGER, [B1])
        await leader.marker.mark(LEDGER, [B2])

    assert await replicas(cluster) == (B1, B2)


@pytest.mark.compat(f"{MANAGER}.testMarkSimilarMissingReplica", verdict="same")
async def test_bookies_with_similar_names_are_two_in_a_mark(cluster: Cluster) -> None:
    """One name is a part of the other."""
    names = tuple(map(BookieId, ("localhost:3181", "localhost:318", "localhost:31812")))

    async with leading(cluster) as leader:
        for name in names:
            await leader.marker.mark(LEDGER, [name])

    assert await replicas(cluster) == names


@pytest.mark.compat(f"{MANAGER}.testHierarchyCleanupInterference", verdict="same")
async def test_ledgers_marked_during_completions_are_all_handled(cluster: Cluster) -> None:
    """The tree is empty in the end."""
    rng = random.Random(SEED)
    cluster.tree.latency = lambda: cluster.clock.sleep(rng.uniform(0, 0.02))
    wanted = [number * SOME_DIRECTORIES_SHARED for number in range(100)]
    done: list[int] = []

    async def mark_all(leader: Leader) -> None:
        for ledger_id in wanted:
            await leader.marker.mark(ledger_id, [B1])

    async def work_off(node: Node) -> None:
        while len(done) < len(wanted):
            found = await node.queue.list_ledgers(rng)
            for queued in await node.queue.read(found.free):
                lease = await node.queue.lease(queued)
                assert lease is not None
                assert await node.queue.complete(lease)
                done.append(queued.ledger_id)
            await node.queue.tidy()

    async with leading(cluster) as leader, cluster.node() as node:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mark_all(leader))
            tasks.create_task(work_off(node))
        await node.queue.list_ledgers(rng)
        await node.queue.tidy()

    assert sorted(done) == wanted
    assert await cluster.store.children(PATHS.marks) == []
