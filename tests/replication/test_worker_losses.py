"""Ledgers that lost copies do not wait behind ledgers that did not: of drains, or given by hand."""

import asyncio

import pytest

from ledgers.bookies import Transfer
from replication import znodes
from replication.settings import ReplicationSettings
from replication.slots import LATE_TIMES_MAX
from replication.znodes import Mark
from tests.replication.cluster import Cluster, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6
from tests.replication.nodes import PATHS, working
from tests.replication.repairs import drain

SLOTS = 4
DRAINING_COUNT = 2 * SLOTS * (1 + LATE_TIMES_MAX)
"""More than there are places, and loans of them."""
SOON_S = 10


async def drained_slowly(*, copy_s: float) -> Cluster:
    """Drain B2: its many ledgers are marked in our private queue, and each copy lasts that long.

    The copy of the first ledger never ends.
    """
    cluster = await Cluster.start()
    await drain(cluster, B2)
    for ledger_id in range(DRAINING_COUNT):
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id)
        path = PATHS.private.mark(ledger_id)
        data = znodes.mark_to_bytes(Mark(replicas=(B2,), ctime_ms=1 + ledger_id))
        await cluster.store.create(path, data, with_parents=True)

    async def copy_slowly(transfer: Transfer) -> None:
        if transfer.target is not None and transfer.ledger_id < DRAINING_COUNT:
            await asyncio.sleep(copy_s if transfer.ledger_id else 1_000_000)

    cluster.bookies.before_transfer = copy_slowly
    return cluster


@pytest.mark.parametrize("others_marked", [0, 3])
async def test_a_loss_is_repaired_at_once_if_other_slots_are_taken(
    others_marked: int,
) -> None:
    cluster = await drained_slowly(copy_s=100_000)
    settings = ReplicationSettings(ledgers_at_once=SLOTS, idle_wait_s=2)
    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(100)
        assert len(await cluster.locked()) == (SLOTS - 1) * (1 + LATE_TIMES_MAX)

        for ledger_id in range(1_000, 1_001 + others_marked):
            await cluster.write_ledger((B4, B5, B6), ledger_id=ledger_id)
            await cluster.mark(B6, ledger_id=ledger_id)

        async def is_repaired() -> bool:
            return not await cluster.marked()

        assert await until(cluster, is_repaired) < SOON_S


async def test_the_other_slots_are_used_again_when_they_are_free() -> None:
    copy_s = 500
    cluster = await drained_slowly(copy_s=copy_s)
    settings = ReplicationSettings(ledgers_at_once=SLOTS, idle_wait_s=1_000)

    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(3 * copy_s + 2 * SOON_S)

        marked = [i for i in range(DRAINING_COUNT) if await node.queue.is_marked(i)]
    assert marked == [0]
