"""The lock of a ledger that somebody works on by hand: taken as a worker takes it, and given back."""

import asyncio

import pytest

from ledgers.errors import UnavailableError
from ledgers.store import Check
from replication.queue import payloads
from replication.queue.listing import locked_ledger_ids
from replication.queue.lock_by_hand import WAIT_MAX_S, locked
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.nodes import LEDGER, UR

SESSION = Check(path="/", version=0)
"""Stands for whatever proves a session: it holds always."""


@in_virtual_time
async def test_it_can_be_had_where_no_node_has_ever_run() -> None:
    cluster = Cluster()

    async with locked(LEDGER, cluster.store, UR, SESSION, "host-a", clock=cluster.clock):
        assert await locked_ledger_ids(cluster.store, UR) == {LEDGER}

    assert await locked_ledger_ids(cluster.store, UR) == set()


@in_virtual_time
async def test_it_is_not_taken_from_whoever_has_it() -> None:
    cluster = await Cluster.start()
    path = payloads.lock_path(UR, LEDGER)
    await cluster.store.create(path, payloads.lock_to_bytes("host-b"))

    with pytest.raises(UnavailableError, match="host-b is at work on it"):
        async with locked(LEDGER, cluster.store, UR, SESSION, "host-a", clock=cluster.clock):
            raise AssertionError("it was given")

    assert payloads.parse_lock((await cluster.store.get(path))[0]) == "host-b"


@in_virtual_time
async def test_whoever_has_it_is_waited_for_a_while() -> None:
    cluster = await Cluster.start()
    path = payloads.lock_path(UR, LEDGER)
    await cluster.store.create(path, payloads.lock_to_bytes("host-b"))

    async def let_go() -> None:
        await asyncio.sleep(WAIT_MAX_S / 2)
        await cluster.store.delete(path)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(let_go())
        async with locked(LEDGER, cluster.store, UR, SESSION, "host-a", clock=cluster.clock):
            assert payloads.parse_lock((await cluster.store.get(path))[0]) == "host-a"
