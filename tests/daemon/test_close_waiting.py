"""Closing a ledger by hand while another node has its lock."""

import asyncio

import pytest

from daemon.operations.close import CloseRefusedError
from ledgers.model import LedgerState
from replication import znodes
from replication.by_hand import WAIT_MAX_S
from replication.orders import HoldOrder, hold_znode
from tests.daemon.closing import close, idle_ledger
from tests.replication.cluster import Cluster, in_virtual_time, until
from tests.replication.ledger_values import B1
from tests.replication.nodes import LEDGER, PATHS, working

PATH = PATHS.lock(LEDGER)


async def locked_by_another() -> Cluster:
    cluster = await idle_ledger()
    await cluster.store.create(PATH, znodes.lock_to_bytes("other"), is_ephemeral=True)
    return cluster


@in_virtual_time
async def test_a_ledger_in_its_grace_is_closed_after_the_grace() -> None:
    cluster = await idle_ledger(write_quorum=3, ack_quorum=2)
    await cluster.mark(B1)
    await cluster.unregister(B1)  # the two others are enough to find the end

    async def is_locked() -> bool:
        return bool(await cluster.locked())

    async with cluster.node() as node, working(node):
        await until(cluster, is_locked)
        await asyncio.sleep(WAIT_MAX_S / 2)

        found = await close(cluster, is_forced=True)

    assert found.is_closed
    assert (await cluster.metadata()).last_entry_id == 9


@in_virtual_time
async def test_a_ledger_that_the_lock_owner_closes_is_closed() -> None:
    cluster = await locked_by_another()

    async def close_it() -> None:
        await asyncio.sleep(1)
        read = await cluster.manager.read(LEDGER)
        closed = read.metadata.closed(last_entry_id=9, length=1_000)
        await cluster.manager.write(LEDGER, closed, read_as=read)

    closing = asyncio.create_task(close_it())
    found = await close(cluster)
    await closing

    assert not found.has_changed
    assert found.is_closed
    assert await cluster.locked() == [PATH.rpartition("/")[2]], "the lock of another node stays"


@in_virtual_time
async def test_a_refusal_does_not_wait_for_the_lock() -> None:
    cluster = await locked_by_another()
    cluster.put(LEDGER, 10, B1)
    began_s = cluster.clock.now_s()

    with pytest.raises(CloseRefusedError, match="it got an entry"):
        await close(cluster)

    assert cluster.clock.now_s() - began_s < 1


@in_virtual_time
async def test_a_safety_hold_that_begins_meanwhile_stops_the_closing() -> None:
    cluster = await locked_by_another()
    hold = HoldOrder(since_ms=cluster.clock.wall_ms())

    async def begin_hold_and_unlock() -> None:
        await asyncio.sleep(1)
        await cluster.store.create(hold_znode(PATHS).path, hold.to_json(), with_parents=True)
        await cluster.store.delete(PATH)

    unlocking = asyncio.create_task(begin_hold_and_unlock())
    with pytest.raises(CloseRefusedError, match="a safety hold forbids fencing"):
        await close(cluster, is_forced=True)
    await unlocking

    assert (await cluster.metadata()).state is LedgerState.OPEN
