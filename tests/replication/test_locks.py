"""Our locks: their versions show whose they are."""

from itertools import combinations

import pytest

from ledgers.errors import LockLostError
from ledgers.store import Create, SetData
from replication.work_queue import VERSION_MAX, LedgerLock
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1
from tests.replication.nodes import PATHS

PATH = PATHS.lock(7)


def test_a_lock_never_has_the_version_of_javas_locks() -> None:
    versions = {LedgerLock.of(PATH, session_id=session).version for session in range(100)}

    assert versions == set(range(1, VERSION_MAX + 1))


def test_a_session_makes_the_same_lock_each_time() -> None:
    assert LedgerLock.of(PATH, session_id=5) == LedgerLock.of(PATH, session_id=5)


def test_the_locks_of_two_sessions_mostly_differ() -> None:
    locks = [LedgerLock.of(PATH, session_id=session) for session in range(100)]
    pairs = list(combinations(locks, 2))

    assert sum(one != other for one, other in pairs) > 0.7 * len(pairs)


def test_the_operations_lead_to_the_version() -> None:
    lock = LedgerLock(path=PATH, version=3)

    create, *changes = lock.make(b"me")

    assert create == Create(path=PATH, data=b"me", is_ephemeral=True)
    assert changes == [SetData(path=PATH, data=b"me", version=v) for v in (0, 1, 2)]


async def test_another_nodes_concurrent_lock_is_not_ours(cluster: Cluster) -> None:
    async with cluster.node("node-1") as first, cluster.node("node-2") as second:
        ledger_id = next(
            i
            for i in range(100)
            if len(
                {
                    LedgerLock.of(PATHS.lock(i), session_id=node.store.session_id).version
                    for node in (first, second)
                }
            )
            == 2
        )
        await cluster.mark(B1, ledger_id=ledger_id)
        lease = await first.lease(ledger_id)
        await cluster.store.delete(lease.lock.path)  # by an operator's hand
        assert (await second.lease(ledger_id)).lock != lease.lock

        with pytest.raises(LockLostError):
            await first.queue.write(lease, [])
        with pytest.raises(LockLostError):
            await first.queue.complete(lease)

    assert await cluster.marked() == [ledger_id]
