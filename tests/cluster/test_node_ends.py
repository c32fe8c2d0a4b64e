"""A daemon stops at once when asked, even in the middle of work, and leaves no lock behind.

Each test leaves the cluster whole and the queue empty.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from auditor.election import current_leader
from daemon.local.cluster import LocalCluster
from ledgers.model import LedgerState
from replication.marks import locked_ledger_ids
from replication.nodes import live_nodes
from tests.cluster.faulty_daemon import Point
from tests.cluster.steps import (
    WORKER_ONLY,
    Bench,
    bench,
    errors,
    events,
    is_frozen,
    nodes,
    shape,
    wait_for,
)
from tests.workload import Ending

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

STOP_MAX_S = 5.0
ON_THREE = (3, 3, 2)


async def assert_nothing_is_left(on: Bench) -> None:
    store, paths = on.seen.store, on.seen.paths
    assert await locked_ledger_ids(store, paths) == set()
    assert await current_leader(store, paths) is None
    assert await live_nodes(store, paths) == []


@pytest.mark.compat("BookieAutoRecoveryTest.testStopWhileReplicationInProgress", verdict="better")
@pytest.mark.compat("AutoRecoveryMainTest.testShutdown", verdict="same")
async def test_a_node_stops_at_once_during_a_copy(uri: str, tmp_path: Path) -> None:
    """It leaves no lock, vote or session behind."""

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(number) for number in range(10)))
        node = start(
            "node", command=("tests.cluster.faulty_daemon", Point.MID_COPY.value, "SIGSTOP")
        )
        await wait_for(lambda: events(node, "audit.finished"), "audit")
        await on.lose(written)
        await wait_for(lambda: is_frozen(node), "copy under way")
        assert await locked_ledger_ids(on.seen.store, on.seen.paths)

        os.kill(node.pid, signal.SIGTERM)  # delivered first when the node is resumed
        node.resume()

        assert await asyncio.to_thread(node.wait, timeout_s=STOP_MAX_S)
        assert node.exit_code == 0
        await assert_nothing_is_left(on)
        assert not errors(node)

        start("next", settings=WORKER_ONLY)
        await on.wait_idle()
        await on.assert_whole(written)


@pytest.mark.long(group="repair")
@pytest.mark.compat("AutoRecoveryMainTest.testShutdown", verdict="same")
async def test_a_node_stops_at_once_during_a_grace(uri: str, tmp_path: Path) -> None:
    """It leaves no lock, vote or session behind."""

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(shape(0, quorums=ON_THREE, ending=Ending.ABANDONED))
        await on.lose(written)
        node = start("node")
        await wait_for(lambda: events(node, "election.won"), "vote")
        await wait_for(lambda: events(node, "ledger.deferred"), "ledger in its grace")
        assert await locked_ledger_ids(on.seen.store, on.seen.paths) == {written[0].ledger_id}

        node.terminate()

        assert await asyncio.to_thread(node.wait, timeout_s=STOP_MAX_S)
        assert node.exit_code == 0
        await assert_nothing_is_left(on)
        assert (await on.metadata(written[0])).state is LedgerState.OPEN
        assert not errors(node)

        start("next", settings={"REPLICATION_OPEN_LEDGER_GRACE_S": "0"})
        await on.wait_idle()
        await on.assert_whole(written)


@pytest.mark.long(group="repair")
@pytest.mark.compat("G22", verdict="better")
async def test_a_node_stops_at_once_while_a_bookie_hangs(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """It leaves no lock, vote or session behind."""

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(number, quorums=ON_THREE) for number in range(3)))
        frozen = (await on.metadata(written[0])).last_segment.ensemble[1]
        await on.lose(written)

        module_cluster.pause(frozen)
        try:
            node = start("node", settings=WORKER_ONLY)
            await wait_for(lambda: locked_ledger_ids(on.seen.store, on.seen.paths), "lock")
            node.terminate()
            assert await asyncio.to_thread(node.wait, timeout_s=STOP_MAX_S)
            await assert_nothing_is_left(on)
        finally:
            module_cluster.resume(frozen)
        assert node.exit_code == 0
        assert not errors(node)

        start("next", settings=WORKER_ONLY)
        await on.wait_idle()
        await on.assert_whole(written)


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(signal.SIGSTOP, id="frozen"),
        pytest.param(signal.SIGKILL, marks=pytest.mark.long(group="repair"), id="killed"),
    ],
)
async def test_a_node_stops_in_time_during_an_outage_of_zookeeper(
    module_cluster: LocalCluster, uri: str, tmp_path: Path, trouble: signal.Signals
) -> None:
    try:
        async with nodes(uri, tmp_path) as start:
            node = start("node")
            await wait_for(lambda: events(node, "election.won"), "vote")
            assert module_cluster.zookeeper_pid is not None

            os.kill(module_cluster.zookeeper_pid, trouble)
            node.terminate()
            assert await asyncio.to_thread(node.wait, timeout_s=STOP_MAX_S)

            assert not errors(node)
    finally:
        if module_cluster.zookeeper_pid is None:
            module_cluster.restart_zookeeper()
        else:
            os.kill(module_cluster.zookeeper_pid, signal.SIGCONT)
