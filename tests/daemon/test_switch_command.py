"""``bookmender disable`` and ``bookmender enable``."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from auditor.disable_end import DisableEnd
from daemon.operations.switch import is_enabled, switch_off, switch_on
from daemon.status.gathering import gather_status
from replication.orders import disable_end_znode
from tests.auditor.auditing import Leader, leading
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testDuplicateEnDisableAutoRecovery",
    verdict="other",
    why="it is no error, and the command says so",
)
@in_virtual_time
async def test_disabling_or_enabling_twice_changes_nothing() -> None:
    cluster = await Cluster.start()
    seen, path = visiting(cluster), PATHS.disable

    assert [(await switch_off(seen)).has_changed for _ in range(2)] == [True, False]
    assert await cluster.store.exists(path) is not None
    assert [(await switch_on(seen)).has_changed for _ in range(2)] == [True, False]
    assert await cluster.store.exists(path) is None


@in_virtual_time
async def test_the_leader_enables_it_again_when_its_time_is_over() -> None:
    cluster = await with_ledgers((B1, B2))
    async with leading(cluster) as leader:
        switched = await switch_off(visiting(cluster), duration_s=100)
        await end_of(leader).run_once()
        assert not await is_enabled(visiting(cluster))
        assert switched.until_ms is not None
        await asyncio.sleep(101)
        status = await gather_status(visiting(cluster), clock=cluster.clock)
        assert status.orders.disabled_until_ms == switched.until_ms
        await end_of(leader).run_once()

    assert await is_enabled(visiting(cluster))
    assert await cluster.store.exists(disable_end_znode(PATHS).path) is None


async def by_operator(cluster: Cluster) -> None:
    await switch_off(visiting(cluster))


async def by_java(cluster: Cluster) -> None:
    await cluster.store.delete(PATHS.disable)
    await cluster.store.create(PATHS.disable)


async def for_longer(cluster: Cluster) -> None:
    await switch_off(visiting(cluster), duration_s=1_000)


@pytest.mark.parametrize("disable_later", [by_operator, by_java, for_longer])
@in_virtual_time
async def test_a_later_order_to_disable_stays(
    disable_later: Callable[[Cluster], Awaitable[None]],
) -> None:
    cluster = await with_ledgers((B1, B2))
    async with leading(cluster) as leader:
        await switch_off(visiting(cluster), duration_s=100)
        await disable_later(cluster)
        await asyncio.sleep(101)
        await end_of(leader).run_once()
        await end_of(leader).run_once()

    assert not await is_enabled(visiting(cluster))


def end_of(leader: Leader) -> DisableEnd:
    return DisableEnd(
        store=leader.store, batcher=leader.batcher, paths=PATHS, clock=leader.marker.clock
    )
