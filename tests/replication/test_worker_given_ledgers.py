"""A worker that repairs ledgers given by hand, and no others."""

import asyncio
import random

from replication.backoff import WaitingList
from replication.marks import DIRECTORIES_LISTED_MAX
from replication.nodes import Membership, Role
from replication.settings import ReplicationSettings
from replication.work_queue import GivenLedgers
from replication.worker import ReplicationWorker
from tests.replication.cluster import Cluster, until, with_lost_b2
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, Node, node_info

PRIVATE = PATHS.private
IN_A_DIRECTORY = 1 << 16
"""Ledgers that a lowest directory of marks has room for."""


def by_hand(cluster: Cluster, node: Node, *ledger_ids: int) -> ReplicationWorker:
    """Return a worker of this session for the given ledgers."""
    waiting = WaitingList(
        queue=GivenLedgers(
            node.store,
            node.batcher,
            PATHS,
            holder="hand",
            clock=cluster.clock,
            ledger_ids=ledger_ids,
        ),
        views=node.views,
        manager=node.manager,
        settings=ReplicationSettings(),
        node="hand",
        clock=cluster.clock,
        rng=random.Random(cluster.seed),
    )
    return ReplicationWorker(waiting=waiting, repairer=node.repairer)


async def mark_own(cluster: Cluster, *ledger_ids: int) -> None:
    for ledger_id in ledger_ids:
        await cluster.store.create(PRIVATE.mark(ledger_id), with_parents=True)


async def run_until_unmarked(cluster: Cluster, worker: ReplicationWorker, *ledger_ids: int) -> None:
    async def are_done() -> bool:
        paths = [queue.mark(i) for queue in (PATHS, PRIVATE) for i in ledger_ids]
        return not any([await cluster.store.exists(path) for path in paths])

    running = asyncio.create_task(worker.run())
    try:
        await until(cluster, are_done)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_only_the_given_ledgers_are_repaired() -> None:
    cluster = await with_lost_b2(3)
    await mark_own(cluster, 0, 1)
    async with cluster.node() as node:
        await run_until_unmarked(cluster, by_hand(cluster, node, 1), 1)

    assert await cluster.marked() == [0, 2]
    assert B2 not in (await cluster.metadata(1)).bookies
    await cluster.assert_whole(1)
    assert B2 in (await cluster.metadata(0)).bookies


async def test_they_are_found_at_once_in_a_very_long_queue(cluster: Cluster) -> None:
    ledger_ids = [number * IN_A_DIRECTORY for number in range(3 * DIRECTORIES_LISTED_MAX)]
    given = ledger_ids[::5]
    for ledger_id in given:
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id)
    await mark_own(cluster, *ledger_ids)
    await cluster.kill(B2)
    async with cluster.node() as node:
        began_s = cluster.clock.now_s()
        await run_until_unmarked(cluster, by_hand(cluster, node, *given), *given)

        assert cluster.clock.now_s() - began_s < 0.2
    await cluster.assert_whole(*given)


async def test_completed_ledgers_are_not_looked_for_again() -> None:
    cluster = await with_lost_b2(40)
    async with cluster.node() as node:
        worker = by_hand(cluster, node, *range(40))
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(30)
        before = node.store.request_count
        await asyncio.sleep(100)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        assert node.store.request_count - before < 2 * 100
    assert await cluster.marked() == []


async def test_no_ledger_is_left_to_other_workers() -> None:
    """Other workers may be dead or busy."""
    cluster = await with_lost_b2(8)
    async with cluster.node() as node:
        for number in range(9):
            await Membership.join(cluster.store, PATHS, node_info(f"busy-{number}", Role.WORKER))
        began_s = cluster.clock.now_s()
        await run_until_unmarked(cluster, by_hand(cluster, node, *range(8)), *range(8))

        assert cluster.clock.now_s() - began_s < ReplicationSettings().idle_wait_s


async def test_it_repairs_by_hand_while_auto_recovery_is_disabled() -> None:
    cluster = await with_lost_b2(1)
    await cluster.store.create(PATHS.disable)
    async with cluster.node() as node:
        await run_until_unmarked(cluster, by_hand(cluster, node, 0), 0)

    await cluster.assert_whole(0)


async def test_a_repair_by_hand_has_no_share_of_other_ledgers() -> None:
    cluster = await with_lost_b2(0)
    await Membership.join(cluster.store, PATHS, node_info("hand", Role.HAND))
    async with cluster.node() as node:
        assert await node.queue.workers() == {node.store.session_id}
        assert len(await node.membership.live_nodes()) == 2, "but it reads from bookies (S10)"
