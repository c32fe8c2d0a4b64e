"""The cost of many nodes for ZooKeeper: their requests together, by ledger and by second."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from replication.repair import DONE, MARKED_AGAIN, Outcome, Repairer
from replication.settings import ReplicationSettings
from replication.work_queue import LedgerLease
from replication.worker import IDLE_LOOKS_PER_S
from tests.replication.cluster import Cluster, queue_empty, until
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, Node, working

pytestmark = pytest.mark.timeout(480)  # sixty nodes in one process, perhaps on a busy machine

REPAIR_S = 5.0


@asynccontextmanager
async def fleet(
    cluster: Cluster, count: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[Node]]:
    """Yield idle nodes that know each other and whose repairs only wait."""

    async def repair(self: Repairer, lease: LedgerLease, *_: object, **__: object) -> Outcome:
        await asyncio.sleep(REPAIR_S)
        return DONE if await self.queue.complete(lease) else MARKED_AGAIN

    monkeypatch.setattr(Repairer, "repair", repair)
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(cluster.node(f"node-{i}")) for i in range(count)]
        for node in nodes:
            await stack.enter_async_context(working(node))
        await asyncio.sleep(30)
        yield nodes


def request_count(nodes: Sequence[Node]) -> int:
    return sum(node.store.request_count for node in nodes)


@pytest.mark.parametrize("node_count", [30, 60])
async def test_the_cost_of_a_ledger_hardly_grows_with_the_nodes(
    cluster: Cluster, node_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger_count = 20 * node_count
    async with fleet(cluster, node_count, monkeypatch) as nodes:
        before = request_count(nodes)
        for ledger_id in range(ledger_count):
            await cluster.mark(B2, ledger_id=ledger_id)
        took_s = await until(cluster, lambda: queue_empty(cluster))

        assert (request_count(nodes) - before) / ledger_count < 5, "the read of its mark included"
    assert took_s < REPAIR_S + 1, "each was found by its owner's first look, or the one after it"


@pytest.mark.parametrize(
    ("is_marked", "requests_a_look"),
    [pytest.param(False, 4, id="empty queue"), pytest.param(True, 9, id="others' ledgers alone")],
)
async def test_idle_nodes_together_look_no_more_often_than_a_few(
    cluster: Cluster, is_marked: bool, requests_a_look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_marked:
        await cluster.mark(B2)
        await cluster.store.create(PATHS.lock(LEDGER))
    async with fleet(cluster, 60, monkeypatch) as nodes:
        before = request_count(nodes)
        await asyncio.sleep(30)

        assert request_count(nodes) - before < 30 * IDLE_LOOKS_PER_S * requests_a_look


async def test_the_disable_switch_is_read_only_when_it_changes(cluster: Cluster) -> None:
    async with cluster.node() as node, working(node):
        await cluster.store.create(PATHS.disable)
        await asyncio.sleep(1)
        before = node.store.request_count
        await asyncio.sleep(1_000)
        assert node.store.request_count == before, "nothing to look for, and a watch that tells"

        await cluster.write_ledger((B1, B2, B3))
        await cluster.mark(B2)
        await cluster.store.delete(PATHS.disable)
        assert await until(cluster, lambda: queue_empty(cluster)) < 1


async def test_ledgers_completed_one_by_one_are_replaced_in_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began_s: list[float] = []

    async def repair(self: Repairer, lease: LedgerLease, *_: object, **__: object) -> Outcome:
        began_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.010 + 0.003 * (lease.ledger_id % 10))
        return DONE if await self.queue.complete(lease) else MARKED_AGAIN

    monkeypatch.setattr(Repairer, "repair", repair)
    cluster = await Cluster.start()
    for ledger_id in range(60):
        await cluster.mark(B2, ledger_id=ledger_id)

    settings = ReplicationSettings(ledgers_at_once=10)
    async with cluster.node(settings=settings) as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    assert len(began_s) == 60
    assert len(set(began_s)) < 15
