"""Closing a ledger by hand that somebody else has: what comes of it while they are waited for."""

import asyncio

import pytest

from daemon.cli.close_ledger import CloseRefusedError
from ledgers.model import LedgerState
from replication import znodes
from replication.lock_by_hand import WAIT_MAX_S
from replication.orders import HoldOrder, hold_znode
from tests.daemon.closing import close, idle_ledger
from tests.replication.cluster import Cluster, in_virtual_time, until
from tests.replication.ledger_values import B1
from tests.replication.nodes import LEDGER, PATHS, working

PATH = PATHS.lock(LEDGER)


async def held_by_another() -> Cluster:
    cluster = await idle_ledger()
    await cluster.store.create(PATH, znodes.lock_to_bytes("other"), is_ephemeral=True)
    return cluster


@in_virtual_time
async def test_one_that_a_worker_leaves_to_its_writer_for_the_grace_is_closed_after_it() -> None:
    cluster = await idle_ledger(write_quorum=3, ack_quorum=2)
    await cluster.mark(B1)
    await cluster.unregister(B1)  # the two others suffice to find the end

    async def is_locked() -> bool:
        return bool(await cluster.locked())

    async with cluster.node() as node, working(node):
        await until(cluster, is_locked)
        await asyncio.sleep(WAIT_MAX_S / 2)

        found = await close(cluster, is_forced=True)

    assert (found.closed or found.found).metadata.is_closed
    assert (await cluster.metadata()).last_entry_id == 9


@in_virtual_time
async def test_one_that_is_closed_meanwhile_by_whoever_has_it_is_closed() -> None:
    cluster = await held_by_another()

    async def close_it() -> None:
        await asyncio.sleep(1)
        read = await cluster.manager.read(LEDGER)
        closed = read.metadata.closed(last_entry_id=9, length=1_000)
        await cluster.manager.write(LEDGER, closed, read_as=read)

    closing = asyncio.create_task(close_it())
    found = await close(cluster)
    await closing

    assert found.closed is None
    assert found.found.metadata.is_closed
    assert await cluster.locked() == [PATH.rpartition("/")[2]], "it is not ours to give back"


@in_virtual_time
async def test_where_it_would_be_refused_nobody_is_waited_for() -> None:
    cluster = await held_by_another()
    cluster.put(LEDGER, 10, B1)
    began_s = cluster.clock.now_s()

    with pytest.raises(CloseRefusedError, match="it got an entry"):
        await close(cluster)

    assert cluster.clock.now_s() - began_s < 1


@in_virtual_time
async def test_a_hold_that_begins_while_somebody_is_waited_for_is_kept_to() -> None:
    cluster = await held_by_another()
    hold = HoldOrder(since_ms=cluster.clock.wall_ms())

    async def hold_and_let_go() -> None:
        await asyncio.sleep(1)
        await cluster.store.create(hold_znode(PATHS).path, hold.to_json(), with_parents=True)
        await cluster.store.delete(PATH)

    letting_go = asyncio.create_task(hold_and_let_go())
    with pytest.raises(CloseRefusedError, match="a safety hold forbids fencing"):
        await close(cluster, is_forced=True)
    await letting_go

    assert (await cluster.metadata()).state is LedgerState.OPEN
