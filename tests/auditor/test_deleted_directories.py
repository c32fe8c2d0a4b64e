"""An operator deletes directories while everything runs: repairs continue."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ledgers.errors import BookmenderError
from ledgers.store import children_if_any
from tests.auditor.auditing import auditing
from tests.auditor.rechecking import recheck_of
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, ROOT, working

BEFORE, LEDGERS = 3, 6


async def delete_all(cluster: Cluster, path: str) -> None:
    """Delete the path and everything below it, as ``deleteall`` of ZooKeeper's shell does."""
    for name in await children_if_any(cluster.store, path):
        await delete_all(cluster, f"{path}/{name}")
    await cluster.store.delete(path)


async def restarting(session: Callable[[], Awaitable[None]]) -> None:
    """Start a new session whenever one ends, as ``daemon.threads`` does."""
    while True:
        try:
            await session()
        except (BookmenderError, ExceptionGroup):
            await asyncio.sleep(1)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(PATHS.locks, id="locks"),
        pytest.param(PATHS.marks, id="the shared queue"),
        pytest.param(PATHS.private.marks, id="our private queue"),
        pytest.param(PATHS.election, id="election"),
        pytest.param(PATHS.waiting, id="waiting"),
        pytest.param(PATHS.findings, id="findings"),
        pytest.param(PATHS.recent_copies, id="recent copies"),
        pytest.param(PATHS.orders, id="orders"),
        pytest.param(PATHS.nodes, id="nodes"),
        pytest.param(PATHS.private.directory, id="all that is ours"),
        pytest.param(PATHS.directory, id="the whole queue"),
    ],
)
async def test_ledgers_are_repaired_after_a_directory_was_deleted(path: str) -> None:
    cluster = await Cluster.start()
    for ledger_id in range(LEDGERS):
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id)

    async def work() -> None:
        async with cluster.node() as node, working(node) as worker:
            recheck = asyncio.create_task(recheck_of(node, cluster, after_s=60).run())
            await asyncio.wait([worker, recheck], return_when=asyncio.FIRST_COMPLETED)
            recheck.cancel()

    async def audit() -> None:
        async with auditing(cluster) as leader:
            assert leader.task is not None
            await asyncio.wait([leader.task])

    halves = [asyncio.create_task(restarting(role)) for role in (work, audit)]
    await asyncio.sleep(5)
    if await cluster.store.exists(path) is not None:
        await delete_all(cluster, path)

    await cluster.kill(B2)
    await asyncio.sleep(3_600)

    for role in halves:
        role.cancel()
    await asyncio.gather(*halves, return_exceptions=True)
    assert await cluster.store.exists(f"{ROOT}/available") is not None
    await cluster.assert_whole(*range(LEDGERS))
    for ledger_id in range(LEDGERS):
        assert B2 not in (await cluster.metadata(ledger_id)).bookies
