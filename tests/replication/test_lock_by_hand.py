"""The lock of a ledger that somebody works on by hand: taken as a worker takes it, and given back."""

import pytest

from ledgers.errors import UnavailableError
from ledgers.store import Check
from replication.queue import payloads
from replication.queue.listing import locked_ledger_ids
from replication.queue.lock_by_hand import locked
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.nodes import LEDGER, UR

SESSION = Check(path="/", version=0)
"""Stands for whatever proves a session: it holds always."""


@in_virtual_time
async def test_it_can_be_had_where_no_node_has_ever_run() -> None:
    cluster = Cluster()

    async with locked(LEDGER, cluster.store, UR, SESSION, "host-a"):
        assert await locked_ledger_ids(cluster.store, UR) == {LEDGER}

    assert await locked_ledger_ids(cluster.store, UR) == set()


@in_virtual_time
async def test_it_is_not_taken_from_whoever_has_it() -> None:
    cluster = await Cluster.start()
    path = payloads.lock_path(UR, LEDGER)
    await cluster.store.create(path, payloads.lock_to_bytes("host-b"))

    with pytest.raises(UnavailableError, match="somebody is repairing it"):
        async with locked(LEDGER, cluster.store, UR, SESSION, "host-a"):
            raise AssertionError("it was given")

    assert payloads.parse_lock((await cluster.store.get(path))[0]) == "host-b"
