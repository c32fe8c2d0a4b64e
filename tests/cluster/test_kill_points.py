"""A repair interrupted at each of its steps: the next node finishes it, and no entry is lost.

SIGKILL: the node ends, and its session times out. SIGSTOP for longer than the session: the node
wakes up in a repair that another node owns.
"""

import asyncio
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from replication.nodes import live_nodes
from tests.cluster.faulty_daemon import Point
from tests.cluster.steps import (
    WAIT_S,
    WORKER_ONLY,
    Bench,
    bench,
    errors,
    events,
    is_frozen,
    shape,
    start_node,
    wait_for,
)
from tests.workload import Written

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LARGE_ENTRIES = 2_000
"""More than a repair copies without checking the remaining copies again. Deleting the mark is then
a separate step."""


def start_faulty(cluster: LocalCluster, folder: Path, point: Point, signal_name: str) -> Child:
    return start_node(
        "faulty",
        cluster.metadata_service_uri,
        folder,
        command=("tests.cluster.faulty_daemon", point.value, signal_name),
        settings=WORKER_ONLY,
    )


def start_healthy(cluster: LocalCluster, folder: Path) -> Child:
    return start_node("healthy", cluster.metadata_service_uri, folder, settings=WORKER_ONLY)


async def is_expired(on: Bench, node: Child) -> bool:
    """Return True if ZooKeeper has expired the node's session."""
    return node.pid not in {n.info.pid for n in await live_nodes(on.seen.store, on.seen.paths)}


async def write_and_lose(on: Bench, point: Point) -> list[Written]:
    """Write small ledgers, whose mark is deleted in one transaction with the metadata write.

    For the point before the deletion of the mark, write one larger ledger.
    """
    shapes = [shape(number) for number in range(3)]
    if point is Point.BEFORE_UNMARK:
        shapes = [shape(0, entry_count=LARGE_ENTRIES, entry_bytes=10)]
    written = await on.write(*shapes)
    await on.lose(written)
    return written


def each_point(*always: Point) -> pytest.MarkDecorator:
    """Run the test at each point. ``always``: those of ``make test``."""
    long = pytest.mark.long(group="repair")
    return pytest.mark.parametrize(
        "point",
        [pytest.param(p, marks=() if p in always else long, id=p.value) for p in Point],
    )


@pytest.mark.compat(
    "BookieAutoRecoveryTest.testStopWhileReplicationInProgress",
    verdict="better",
    why="also with SIGKILL and SIGSTOP at each step; the metadata never names a missing copy",
)
@each_point(Point.MID_COPY, Point.AFTER_COMPARE_AND_SET)
async def test_another_node_finishes_the_repair_of_a_killed_node(
    point: Point, module_cluster: LocalCluster, tmp_path: Path
) -> None:
    async with bench(module_cluster.metadata_service_uri) as on:
        written = await write_and_lose(on, point)
        faulty = start_faulty(module_cluster, tmp_path, point, "SIGKILL")
        assert await asyncio.to_thread(faulty.wait, timeout_s=WAIT_S), "the signal was never sent"
        assert events(faulty, "struck")

        healthy = start_healthy(module_cluster, tmp_path)
        try:
            await on.wait_idle()
            await on.assert_whole(written)
            assert not errors(healthy)
        finally:
            await asyncio.to_thread(healthy.kill)


@pytest.mark.compat(
    "BookieAutoRecoveryTest.testStopWhileReplicationInProgress",
    "AutoRecoveryMainTest.testAutoRecoverySessionLoss",
    verdict="better",
)
@each_point(Point.MID_COPY, Point.BEFORE_COMPARE_AND_SET)
async def test_a_node_frozen_beyond_its_session_does_no_harm(
    point: Point, module_cluster: LocalCluster, tmp_path: Path
) -> None:
    """It continues with a new session."""

    async with bench(module_cluster.metadata_service_uri) as on:
        written = await write_and_lose(on, point)
        faulty = start_faulty(module_cluster, tmp_path, point, "SIGSTOP")
        await wait_for(lambda: is_frozen(faulty), f"freeze {point.value}")
        healthy = start_healthy(module_cluster, tmp_path)
        try:
            await wait_for(lambda: is_expired(on, faulty), "end of the frozen node's session")
            await on.wait_idle()
            before = len(events(faulty, "session.opened"))

            faulty.resume()
            await wait_for(lambda: len(events(faulty, "session.opened")) > before, "new session")
            await asyncio.to_thread(healthy.kill)
            later = await on.write(shape(4))
            await on.lose(later)

            await on.wait_idle()
            await on.assert_whole([*written, *later])
            assert not errors(faulty)
            assert not errors(healthy)
        finally:
            for node in (healthy, faulty):
                if node.is_running:
                    await asyncio.to_thread(node.kill)
