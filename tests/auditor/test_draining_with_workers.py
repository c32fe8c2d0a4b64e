"""Leader and worker together: bookies are drained while they serve, and no ledger loses copies."""

import asyncio

import pytest

from auditor.records import read_drains
from daemon.operations.drains import cancel_drains
from ledgers.model import BookieId, LedgerState
from tests.auditor.auditing import auditing, draining
from tests.auditor.drains import own_marks
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import order_drain, visiting
from tests.replication.cluster import Cluster, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS, working


async def are_drained(cluster: Cluster, *bookies: BookieId) -> bool:
    record = await read_drains(cluster.store, PATHS)
    told = {} if record is None else record.bookies
    return all(bookie in told and told[bookie].is_drained for bookie in bookies)


async def members(cluster: Cluster, *ledger_ids: int) -> set[BookieId]:
    return {b for i in ledger_ids for b in (await cluster.metadata(i)).bookies}


async def test_draining_never_leaves_a_ledger_with_fewer_copies() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B3, B1), (B3, B4))
    await order_drain(cluster, B1, B2)
    async with draining(cluster), cluster.node() as node, working(node):
        await until(cluster, lambda: are_drained(cluster, B1, B2))

    assert not await members(cluster, 0, 1, 2) & {B1, B2}
    await cluster.assert_whole(0, 1, 2, 3)
    assert await own_marks(cluster) == []


@pytest.mark.parametrize(
    "may_fence", [True, False], ids=["with the order to fence", "without the order to fence"]
)
async def test_rule_s16_an_open_ledger_is_fenced_only_if_ordered(
    cluster: Cluster,
    may_fence: bool,
) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=1, state=LedgerState.OPEN)
    await order_drain(cluster, B1, may_fence=may_fence)
    async with draining(cluster), cluster.node() as node, working(node):
        await asyncio.sleep(300)

        assert (await cluster.metadata(1)).is_closed is may_fence
        assert await are_drained(cluster, B1) is may_fence
        assert (await own_marks(cluster) == []) is may_fence


async def test_marks_of_a_cancelled_drain_are_completed_without_a_move() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    before = [await cluster.ensembles(ledger_id) for ledger_id in (0, 1)]
    await order_drain(cluster, B1)
    async with draining(cluster):
        await asyncio.sleep(1)
        assert await own_marks(cluster) == [0, 1]
        await cancel_drains(visiting(cluster), [B1])
        await asyncio.sleep(1)
        async with cluster.node() as node, working(node):
            await asyncio.sleep(10)

    assert await own_marks(cluster) == []
    assert [await cluster.ensembles(ledger_id) for ledger_id in (0, 1)] == before
    assert await cluster.locked() == []


async def test_a_bookie_that_dies_while_draining_is_lost() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await order_drain(cluster, B1)
    async with auditing(cluster), cluster.node() as node:
        await asyncio.sleep(1)
        await cluster.kill(B1)
        async with working(node):
            await until(cluster, lambda: _is_free_of(cluster, B1))

    await cluster.assert_whole(0, 1)
    await cluster.assert_queue_empty()


async def test_without_a_target_everything_stays_with_a_reason() -> None:
    cluster = await Cluster.start(B1, B2)
    await cluster.write_ledger((B1, B2), ledger_id=0)
    await order_drain(cluster, B1)
    async with draining(cluster), cluster.node() as node, working(node):
        await asyncio.sleep(60)
        assert await cluster.ensembles(0) == [(B1, B2)]
        note = await node.notes.read(0)
        assert note is not None
        assert note.reason.needs_help

        await cluster.register(B3)
        await until(cluster, lambda: are_drained(cluster, B1))

    assert await cluster.ensembles(0) == [(B3, B2)]


async def _is_free_of(cluster: Cluster, bookie: BookieId) -> bool:
    return bookie not in await members(cluster, 0, 1) and not await cluster.marked()
